"""MCP's own tests of servers (the npm package `@modelcontextprotocol/conformance`), as many as fit any server.

They send no token, so one is put into their requests on the way; all else comes as they send it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from engines.images import _cache, locked
from loopback import free_port
from starlette.types import Receive, Scope, Send
from surfaces.server.world import Served

from skerry.surfaces.server.app import build

VERSION = "0.1.16"
NODE = "22.23.3"
"""The package needs one that is newer than what many have; npm has it too."""
PACKAGES = (f"@modelcontextprotocol/conformance@{VERSION}", f"node@{NODE}")
INSTALL_S = 300
RUN_S = 60

APPLY = (
    "server-initialize", "ping", "tools-list", "resources-list", "prompts-list", "dns-rebinding-protection",
    "server-sse-multiple-streams",
)  # fmt: skip
_TOOL = "it calls a tool of its own name, such as test_simple_text, that a server under test is to have"
_PROMPT = "it asks for prompts by name, and we have none"
_NAME = "it reads test://..., which a server under test is to have"
LEFT_OUT = {
    **dict.fromkeys(
        (
            "tools-call-simple-text", "tools-call-image", "tools-call-audio", "tools-call-embedded-resource",
            "tools-call-mixed-content", "tools-call-with-logging", "tools-call-error", "tools-call-with-progress",
            "tools-call-sampling", "tools-call-elicitation", "elicitation-sep1034-defaults",
            "elicitation-sep1330-enums", "json-schema-2020-12", "server-sse-polling",
        ),
        _TOOL,
    ),
    **dict.fromkeys(
        (
            "prompts-get-simple", "prompts-get-with-args", "prompts-get-embedded-resource", "prompts-get-with-image",
            "completion-complete",
        ),
        _PROMPT,
    ),
    **dict.fromkeys(("resources-read-text", "resources-read-binary", "resources-templates-read"), _NAME),
    **dict.fromkeys(("resources-subscribe", "resources-unsubscribe"), "resources are not told of when they change"),
    "logging-set-level": "nothing is logged to clients, and the protocol gives that up",
}  # fmt: skip


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of the package, installed once for all who run tests here."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not there")
    folder = _cache() / f"mcp-conformance-{VERSION}-{NODE}"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with locked(folder):
        if not done.exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), *PACKAGES]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S, cwd=folder)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"npm cannot install it: {error}")
            done.touch()
    return folder / "node_modules"


class WithToken:
    """The application for clients that have no token."""

    def __init__(self, served: Served, token: str) -> None:
        self._app = build(served.server)
        self._header = (b"authorization", f"Bearer {token}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "headers": [*scope["headers"], self._header]}, receive, send)


@asynccontextmanager
async def without_tokens(served: Served) -> AsyncIterator[str]:
    """The URL of a server that asks for none."""
    port = free_port()
    config = uvicorn.Config(
        WithToken(served, await served.token("acme")), port=port, lifespan="off", log_config=None, access_log=False
    )
    listener = uvicorn.Server(config)
    listener.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(listener.serve())
    try:
        while not listener.started:
            await asyncio.sleep(0.01)
            assert not task.done()
        yield f"http://localhost:{port}/mcp"
    finally:
        listener.should_exit = True
        await task


async def run(package: Path, *arguments: str, cwd: Path) -> tuple[int | None, str]:
    """Run the program; its exit code and what it says."""
    program = package / "@modelcontextprotocol/conformance/dist/index.js"
    process = await asyncio.create_subprocess_exec(
        str(package / ".bin/node"),
        str(program),
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd)},
    )
    try:
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode(errors="replace")


@pytest.mark.parametrize("scenario", APPLY)
async def test_the_server_does_as_the_protocol_says(
    served: Served, package: Path, scenario: str, tmp_path: Path
) -> None:
    async with without_tokens(served) as url:
        code, said = await run(package, "server", "--url", url, "--scenario", scenario, cwd=tmp_path)
    assert code == 0, said


async def test_every_scenario_is_run_or_there_is_a_reason_why_not(package: Path, tmp_path: Path) -> None:
    code, said = await run(package, "list", "--server", cwd=tmp_path)
    assert code == 0, said
    known = {line.split()[1] for line in said.splitlines() if line.startswith("  - ")}
    assert known == {*APPLY, *LEFT_OUT}
    assert not set(APPLY) & set(LEFT_OUT)
