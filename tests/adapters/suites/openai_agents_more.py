"""What the SDK's own tests do not ask of a sandbox; runs in the SDK's environment."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.exceptions import UserError
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    SandboxRuntimeError,
    WorkspaceArchiveReadError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.session import SandboxSession
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

import skerry
from skerry.adapters.openai_agents import SkerrySandboxClient, SkerrySandboxClientOptions


def client() -> SkerrySandboxClient:
    return SkerrySandboxClient(**json.loads(os.environ.get("SUITE_SANDBOX", "{}")))


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    made = await client().create(
        manifest=Manifest(entries={"a.txt": File(content=b"a")}, environment={"value": {"COLOUR": "blue"}}),
        options=SkerrySandboxClientOptions(exposed_ports=(8000,)),
    )
    try:
        async with made:
            yield made
    finally:
        await client().delete(made)


async def content(session: SandboxSession, path: str) -> bytes:
    return (await session.read(Path(path))).read()


async def test_commands_run_in_the_workspace_with_its_files_and_variables(session: SandboxSession) -> None:
    done = await session.exec("pwd; cat a.txt; echo; echo $COLOUR; exit 3")
    assert done.stdout.decode().splitlines() == [session.state.manifest.root, "a", "blue"]
    assert done.exit_code == 3
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 60", timeout=0.2)


async def test_files_come_back_and_what_is_not_there_is_told_apart(session: SandboxSession) -> None:
    raw = bytes(range(256)) * 5000
    await session.write(Path("folder/raw.bin"), io.BytesIO(raw))
    assert await content(session, "folder/raw.bin") == raw
    assert await session.read_bounded(Path("folder/raw.bin"), max_bytes=10) == raw[:10]
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nothing"))
    with pytest.raises(WorkspaceArchiveReadError):
        await session.read(Path("folder"))


async def test_a_workspace_moves_to_another_sandbox(session: SandboxSession) -> None:
    await session.exec(
        "ln -s a.txt link; ln -s /usr/bin/env away; ln a.txt hard; mkfifo pipe; mkdir -p sub; chmod 755 a.txt"
    )
    archive = await session.persist_workspace()
    other = await client().create()
    try:
        async with other:
            await other.hydrate_workspace(archive)
            told = await other.exec(
                "readlink link away; cat hard; stat -c %a a.txt; ls -d sub; test -e pipe || echo none"
            )
            assert told.stdout.decode().split() == ["a.txt", "/usr/bin/env", "a755", "sub", "none"]
    finally:
        archive.close()


async def test_an_archive_that_leads_outside_is_refused(session: SandboxSession) -> None:
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    evil.seek(0)
    with pytest.raises(SandboxRuntimeError):
        await session.hydrate_workspace(evil)


async def test_a_port_that_was_asked_for_can_be_reached(session: SandboxSession) -> None:
    await session.pty_exec_start("python3 -m http.server 8000 --bind 127.0.0.1", yield_time_s=0.3)
    endpoint = await session.resolve_exposed_port(8000)
    for _ in range(100):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(b"GET /a.txt HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if answer.endswith(b"\r\n\r\na"):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(answer)


async def test_a_flood_that_nobody_looks_at_waits(session: SandboxSession) -> None:
    update = await session.pty_exec_start("yes", tty=True, yield_time_s=0.3, max_output_tokens=20)
    assert update.process_id is not None
    assert len(update.output) < 10_000
    inner: Any = session._inner
    (terminal,) = inner._terminals._open.values()
    assert sum(map(len, terminal._pieces)) < 6 << 20
    await session.pty_terminate_all()
    assert (await session.exec("while pgrep -x yes; do sleep 0.05; done", timeout=30)).ok()


async def test_a_run_that_was_cut_off_goes_on_in_the_same_sandbox_or_one_with_its_files(tmp_path: Path) -> None:
    made = await client().create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    await made.start()
    await made.write(Path("note"), io.BytesIO(b"old"))
    payload = json.loads(json.dumps(client().serialize_session_state(made.state)))
    again = await client().resume(client().deserialize_session_state(payload))
    async with again:
        assert again.state.sandbox_id == made.state.sandbox_id
        assert await content(again, "note") == b"old"
    later = json.loads(json.dumps(client().serialize_session_state(again.state)))
    third = await client().resume(client().deserialize_session_state(later))
    async with third:
        assert third.state.sandbox_id != made.state.sandbox_id
        assert await content(third, "note") == b"old"


async def test_a_machine_that_is_lost_is_an_error_of_the_run_and_no_output(session: SandboxSession) -> None:
    lost: Any = session._inner

    async def lose(_: object) -> list[Any]:
        await lost.sandbox.connection.provider.destroy(lost.sandbox.id)
        return [function_call("exec_command", {"cmd": "true"}, call_id="1")]

    model = ScriptedModel([ModelStep.respond(lose), [assistant_message("done", item_id="2")]])
    agent = SandboxAgent(name="agent", model=model, capabilities=[Shell()])
    with pytest.raises(UserError) as raised:  # the SDK's word for any error of a tool
        await Runner.run(agent, "go", run_config=RunConfig(sandbox=SandboxRunConfig(session=session)))
    failure = raised.value.__cause__
    assert isinstance(failure, ExecTransportError)
    assert isinstance(failure.__cause__, skerry.SandboxGone)
    assert failure.__cause__.infrastructure
    for attempt in (
        session.read(Path("a.txt")),
        session.write(Path("b"), io.BytesIO(b"")),
        session.persist_workspace(),
    ):
        with pytest.raises(SandboxRuntimeError):
            await attempt
    assert not await session.running()


async def test_a_machine_that_is_lost_during_a_command_is_an_error_of_the_transport(session: SandboxSession) -> None:
    lost: Any = session._inner
    command = asyncio.ensure_future(session.exec("touch begun; exec sleep 60"))
    assert (await session.exec("until [ -e begun ]; do sleep 0.02; done", timeout=30)).ok()
    update = await session.pty_exec_start("exec sleep 60", tty=True, yield_time_s=0.3)
    assert update.process_id is not None
    await lost.sandbox.connection.provider.destroy(lost.sandbox.id)
    for attempt in (command, session.pty_write_stdin(session_id=update.process_id, chars="", yield_time_s=5)):
        with pytest.raises(ExecTransportError) as raised:
            await attempt
        assert isinstance(raised.value.__cause__, skerry.SkerryError)
        assert raised.value.__cause__.infrastructure
