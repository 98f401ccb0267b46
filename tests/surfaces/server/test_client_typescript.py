"""The client in TypeScript: it is as the calls are, its types hold, and with it a sandbox is used from Node."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from surfaces.server.world import Served

from skerry.surfaces.rest import routes

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/typescript"
SHOWN = """\
exec: 0 hello
stream: 1
stream: 2
stream: 3
stream ended: 4
file: 0 255 10 200
listed: true
terminal: true 3
refused: true 404 not_found
left: 0
"""


@pytest.fixture
def node() -> list[str]:
    """A Node that has WebSocket, be it by a flag: the beginning of a command line."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no node on this host")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    version = int(re.findall(r"\d+", said)[0])
    if version < 20:
        pytest.skip(f"node {said.strip()} is older than 20")
    return [found, *(["--experimental-websocket"] if version < 22 else []), "--no-warnings"]


def test_the_client_is_as_the_calls_are() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/generate_client", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_call_has_a_function_in_both_files() -> None:
    calls = [route for route in routes.ALL if route.method != "WEBSOCKET"]
    for file in ("skerry.ts", "skerry.mjs"):
        text = (FOLDER / file).read_text()
        assert "«" not in text
        assert "»" not in text
        assert len(re.findall(r"^      this\.\w+.*\(\"[A-Z]+\", ", text, re.MULTILINE)) == len(calls), file


def test_the_types_hold() -> None:
    compiler = ROOT / "page/node_modules/.bin/tsc"
    if not compiler.exists() or shutil.which("node") is None:
        pytest.skip("there is no TypeScript on this host: `npm --prefix page ci` brings it")
    libraries = "es2023,dom,dom.iterable,dom.asynciterable"
    options = ["--strict", "--noUncheckedIndexedAccess", "--noEmit", "--target", "es2022", "--module", "esnext"]
    argv = [str(compiler), *options, "--lib", libraries, str(FOLDER / "skerry.ts")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout


async def test_a_sandbox_is_used_from_node(node: list[str], real: Served) -> None:
    env = {"PATH": os.environ["PATH"], "SKERRY_URL": real.url, "SKERRY_TOKEN": await real.token("acme")}
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*node, str(FOLDER / "tour.mjs"), stdout=pipe, stderr=pipe, env=env)
    try:
        async with asyncio.timeout(50):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    assert out.decode() == SHOWN
