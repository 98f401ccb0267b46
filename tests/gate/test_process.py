"""The gate as a process: started once, adopted, ended; and what it does for managers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from engines.daemons import Daemon

from skerry.config import Config
from skerry.errors import GateUnavailable
from skerry.gate.client import MAX_LINE, GateClient, Request
from skerry.gate.process import Gate
from skerry.host import background
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.store import Store

from .own_gate import config_with_gate, end_gates, eventually, fetch, gates, hold, kill_gate, web


@pytest.fixture
def config(folder: Path) -> Iterator[Config]:
    """An installation of its own; its gate is ended after the test."""
    yield config_with_gate(folder)
    end_gates(folder)


async def test_code_reaches_what_its_rules_name_and_nothing_else(config: Config) -> None:
    async with web() as port, AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(allow=[f"web.test:{port}"])
        assert await fetch(sandbox, f"http://web.test:{port}/") == "hello"
        assert await fetch(sandbox, f"http://web.test:{port}/", "proxy") == "hello"
        assert "error" in await fetch(sandbox, f"http://other.test:{port}/")
        assert "403" in await fetch(sandbox, f"http://other.test:{port}/", "proxy")
        assert "refused" in await fetch(sandbox, f"http://127.0.0.1:{port}/")
        await sandbox.destroy()


async def test_many_managers_at_once_start_one_gate(config: Config, folder: Path) -> None:
    async def make() -> None:
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(network="rules")
            await sandbox.destroy()

    await asyncio.gather(*(make() for _ in range(8)))
    assert len(gates(folder)) == 1


async def test_what_a_manager_told_is_not_undone_by_an_older_look_at_the_registry(config: Config) -> None:
    async with aclosing(await Store.open(config.database)) as store:
        gate = Gate(config, store)
        owner, spec = identity.this_process(), Spec(provider="local", allow=("pypi.org",))
        older, _ = await store.reserve(new_id(), spec, owner=owner, boot_id="", state=State.PAUSED)
        newer = await store.change(older, spec=msgspec.structs.replace(spec, allow=()), kind="rules")
        try:
            await gate._take_up(newer)
            await gate._take_up(older)
            assert gate._boxes[newer.id].policy.rules.allow == ()
        finally:
            await gate._end()
        await store.change(newer, to=State.DESTROYED)


async def test_a_maker_tells_of_a_record_and_the_registry_of_what_others_have_told_of(config: Config) -> None:
    owner, spec = identity.this_process(), Spec(provider="local", allow=("pypi.org",))
    async with aclosing(await Store.open(config.database)) as store:
        gate = Gate(config, store)
        record, _ = await store.reserve(new_id(), spec, owner=owner, boot_id="", state=State.PAUSED)
        told = msgspec.structs.replace(record, spec=msgspec.structs.replace(spec, allow=("told.test",)))
        request = Request(look=record.id, record=told)
        try:
            for expected in ("told.test", "pypi.org"):
                await gate._look(record.id, request)
                assert [rule.text for rule in gate._boxes[record.id].policy.rules.allow] == [expected]
        finally:
            await gate._end()
        await store.change(record, to=State.DESTROYED)


async def test_a_gate_that_is_killed_lets_nothing_out_until_the_next_program_comes(
    config: Config, folder: Path
) -> None:
    async with web() as port, AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(allow=[f"web.test:{port}"], name="it")
        async with hold(sandbox, "web.test", port) as held:
            await asyncio.to_thread(kill_gate, folder)
            assert await held.says() == "ended"
        assert "error" in await fetch(sandbox, f"http://web.test:{port}/")
        assert "error" in await fetch(sandbox, f"http://web.test:{port}/", "proxy")
        async with AsyncSandboxManager(config) as other:
            found = await other.get("it")
            assert await fetch(found, f"http://web.test:{port}/") == "hello"
        assert len(gates(folder)) == 1
        await asyncio.to_thread(kill_gate, folder)
        another = await manager.create(allow=[f"web.test:{port}"])  # whoever makes one starts it too
        assert await fetch(another, f"http://web.test:{port}/") == "hello"
        await eventually(lambda: asyncio.run(is_up(config, sandbox.id)), "the network of the one before")
        assert await fetch(sandbox, f"http://web.test:{port}/") == "hello"
        await manager.destroy_all()


async def is_up(config: Config, id: str) -> bool:
    status = await GateClient(config).status()
    return status is not None and any(box.up for box in status.boxes if box.id == id)


async def test_a_gate_ends_by_itself_when_nothing_has_needed_it_for_a_while(config: Config, folder: Path) -> None:
    note = folder / "gate" / "note"
    with background.taken(note) as fd, socket.socket(socket.AF_UNIX) as listener:
        assert fd is not None
        listener.bind(str(folder / "gate" / "control"))
        listener.listen()
        async with aclosing(await Store.open(config.database)) as store, asyncio.timeout(30):
            await Gate(config, store, linger_s=0.1).serve(listener, note, fd)


async def test_a_gate_that_is_told_to_end_leaves_nothing_but_its_folder(config: Config, folder: Path) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(network="rules")
        (gate,) = gates(folder)
        os.kill(gate.pid, signal.SIGTERM)
        await eventually(lambda: not gates(folder), "its end")
        left = {path.name for path in (folder / "gate").iterdir()}
        assert not left & {"note", "control", "error"}
        await sandbox.destroy()


async def test_the_daemon_is_the_one_that_the_environment_of_the_sandboxs_maker_names(
    config: Config, docker_daemon: Daemon, docker_images: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/none.sock")
    await GateClient(config).ensure()
    monkeypatch.setenv("DOCKER_HOST", docker_daemon.address)
    settings = {**config.providers, "docker": {"cache_dir": str(folder / "cache")}}
    async with AsyncSandboxManager(msgspec.structs.replace(config, providers=settings)) as manager:
        sandbox = await manager.create(provider="docker", image=docker_images["busybox"], network="rules")
        try:
            assert await is_up(config, sandbox.id)
        finally:
            await sandbox.destroy()


async def test_a_gate_without_its_note_ends(config: Config, folder: Path) -> None:
    await GateClient(config).ensure()
    (folder / "gate" / "note").unlink()
    await eventually(lambda: not gates(folder), "its end")


async def test_the_sandboxes_that_end_are_dropped(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(network="rules")
        assert await is_up(config, sandbox.id)
        await sandbox.destroy()
    status = await GateClient(config).status()
    assert status is not None
    assert status.boxes == []


async def test_a_look_at_what_is_not_there_is_an_error_that_says_so(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        with pytest.raises(GateUnavailable, match="no sandbox has the id"):
            await GateClient(config).look(new_id(), "local")
        sandbox = await manager.create()
        with pytest.raises(GateUnavailable, match="network='rules'"):
            await GateClient(config).look(sandbox.id, "local")
        await sandbox.destroy()


async def test_a_gate_that_cannot_be_started_fails_the_create_and_leaves_no_box(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncSandboxManager(config) as manager:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(GateUnavailable, match="does not start"):
            await manager.create(network="rules")
        monkeypatch.undo()
        assert await manager.list() == []


async def test_a_gate_that_fails_writes_down_why(config: Config, folder: Path) -> None:
    (folder / "registry.db").write_text("this is no registry")
    with pytest.raises(GateUnavailable, match="ends as soon as it is started: Store"):
        await GateClient(config).look(new_id(), "local")
    await eventually(lambda: not gates(folder), "the end of the last")
    assert "Store" in GateClient(config).last_error()
    (folder / "registry.db").unlink()


# the control socket


def ask(folder: Path, *lines: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(folder / "gate" / "control"))
        for line in lines:
            try:
                sock.sendall(line)
            except OSError:
                break  # it hung up
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while data := sock.recv(1 << 16):
                answer += data
        except ConnectionError:
            pass
        return answer


async def test_a_gate_that_crashes_leaves_no_memory_of_its_secrets_on_disk(config: Config, folder: Path) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(network="rules")
        await sandbox.destroy()
    (process,) = gates(folder)
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    (core,) = [line.split() for line in limits.splitlines() if line.startswith("Max core")]
    assert core[4:6] == ["1", "1"]  # too small for a file, and the one size by which no program gets it either


async def test_a_gate_has_no_variable_of_its_starter_but_what_programs_need(
    config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARTERS_TOKEN", "a token of whoever started it")
    monkeypatch.setenv("LC_TIME", "C")
    await GateClient(config).ensure()
    await GateClient(config).status()  # by then it is no child any more
    (process,) = gates(folder)
    has = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert {b"LC_TIME=C", f"PATH={os.environ['PATH']}".encode()} <= {*has}
    assert not [variable for variable in has if b"STARTER" in variable]


async def test_only_its_user_can_find_the_socket(config: Config, folder: Path) -> None:
    await GateClient(config).ensure()
    assert stat.S_IMODE((folder / "gate" / "control").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "gate").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
async def test_another_user_gets_no_answer(config: Config, folder: Path) -> None:
    await GateClient(config).ensure()
    (folder / "gate").chmod(0o755)
    (folder / "gate" / "control").chmod(0o777)
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); sock = socket.socket(socket.AF_UNIX);"
        "sock.connect(sys.argv[1]); sock.sendall(b'{\"status\": true}\\n'); print(sock.recv(100))"
    )
    argv = [shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable, "-c", program]
    argv.append(str(folder / "gate" / "control"))
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=30)
    refused = "ConnectionReset" in done.stderr or "BrokenPipe" in done.stderr  # it was gone before the line was sent
    assert done.stdout.strip() == "b''" or refused, done


async def test_lines_that_are_no_request_are_answered_and_end_nothing(config: Config, folder: Path) -> None:
    await GateClient(config).ensure()
    lines = [b"no json\n", b"[1]\n", b'{"look": 7}\n', b'{"nonsense": true}\n', b'{"status": true}\n']
    *errors, status = (await asyncio.to_thread(ask, folder, *lines)).splitlines()
    assert all("no request" in json.loads(error)["error"] for error in errors)
    assert len(errors) == 4
    assert json.loads(status)["status"]["boxes"] == []


async def test_a_line_without_an_end_is_cut_off(config: Config, folder: Path) -> None:
    await GateClient(config).ensure()
    assert await asyncio.to_thread(ask, folder, b"x" * (MAX_LINE + (1 << 17))) == b""
    assert await GateClient(config).status() is not None
