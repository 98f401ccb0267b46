"""Addresses on the loopback: served for the life of a sandbox, by whoever finds that nobody does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from loopback import free_port
from manager.world import config_of

from skerry.config import Config
from skerry.errors import CreateFailed, InvalidSpec, PortTaken, Unsupported
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

from .world import PATIENCE_S, eventually, fetch, forwarders, is_refused, notes

SERVER = ["python3", "-m", "http.server", "3002", "--directory", "/home/user"]


@pytest.fixture
def config(folder: Path) -> Iterator[Config]:
    """An installation of its own, which has to leave neither a box nor a forwarder."""
    yield config_of(folder, provider="local")
    assert notes(folder) == []


async def test_a_server_answers_at_its_address_while_no_program_of_ours_runs(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=SERVER, ports=["3002"], name="web")
        address = sandbox.addresses[3002]
        await sandbox.files.write("hello", "from the box")
    assert await asyncio.to_thread(fetch, address, "/hello") == b"from the box"
    async with AsyncSandboxManager(config) as other:
        found = await other.get("web")
        assert found.addresses == {3002: address}
        status = await found.service.status()
        assert status is not None
        assert (status.healthy, status.listening) == (True, [3002])
        await other.destroy("web")
    assert is_refused(address)
    assert forwarders(sandbox.id) == []


async def test_a_forwarder_has_no_variable_of_its_starter_but_what_programs_need(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARTERS_TOKEN", "a token of whoever started it")
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=SERVER, ports=["3002"])
        await asyncio.to_thread(fetch, sandbox.addresses[3002])
        (forwarder,) = forwarders(sandbox.id)
        has = Path(f"/proc/{forwarder.pid}/environ").read_bytes().split(b"\0")
        assert f"PATH={os.environ['PATH']}".encode() in has
        assert not [variable for variable in has if b"STARTER" in variable]
        await sandbox.destroy()


async def test_a_forwarder_that_was_killed_is_replaced_at_the_same_address(config: Config) -> None:
    port = free_port()
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=SERVER, ports=[f"{port}:3002"])
        assert sandbox.addresses == {3002: f"127.0.0.1:{port}"}

        async def kill() -> None:
            await eventually(lambda: forwarders(sandbox.id), "a forwarder")
            (forwarder,) = forwarders(sandbox.id)
            os.kill(forwarder.pid, signal.SIGKILL)
            await eventually(lambda: not forwarder.is_alive(), "its death")

        await asyncio.to_thread(fetch, f"127.0.0.1:{port}")
        await kill()
        await manager.get(sandbox.id)  # the next use
        await asyncio.to_thread(fetch, f"127.0.0.1:{port}")
        await kill()
        await manager.reconcile()
        await asyncio.to_thread(fetch, f"127.0.0.1:{port}")
        await kill()
        async with AsyncSandboxManager(config):  # any program that opens the registry
            await asyncio.to_thread(fetch, f"127.0.0.1:{port}")
        await kill()
        await manager.destroy(sandbox.id)


async def test_many_who_find_it_dead_at_once_start_one(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=SERVER, ports=[3002])
        await eventually(lambda: forwarders(sandbox.id), "a forwarder")
        os.kill(forwarders(sandbox.id)[0].pid, signal.SIGKILL)
        await eventually(lambda: not forwarders(sandbox.id), "its death")
        await asyncio.gather(*(manager.get(sandbox.id) for _ in range(10)))
        await asyncio.to_thread(fetch, sandbox.addresses[3002])
        assert len(forwarders(sandbox.id)) == 1
        await manager.destroy(sandbox.id)


async def test_it_ends_when_its_sandbox_has_ended_by_itself(config: Config, folder: Path) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=SERVER, ports=[3002], lifetime=3)
        await asyncio.to_thread(fetch, sandbox.addresses[3002])
    await eventually(lambda: is_refused(sandbox.addresses[3002]), "the end of the address")
    await eventually(lambda: not forwarders(sandbox.id), "the end of the forwarder")
    assert notes(folder) == []
    async with AsyncSandboxManager(config, reconcile=False) as manager:
        record = await manager.record(sandbox.id)
        assert (record.state, record.cause) == (State.DESTROYED, Cause.LIFETIME)


async def test_a_forwarder_without_its_note_ends(config: Config, folder: Path) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(ports=[3002])
        await eventually(lambda: forwarders(sandbox.id), "a forwarder")
        (folder / "forwarders" / sandbox.id).unlink()
        await eventually(lambda: not forwarders(sandbox.id), "its end")
        await manager.destroy(sandbox.id)


PROGRAM = """
import asyncio, os, signal, sys
from manager.world import config_of
from pathlib import Path
from skerry.manager.manager import AsyncSandboxManager

async def main():
    manager = await AsyncSandboxManager(config_of(Path(sys.argv[1]), provider="local")).__aenter__()
    server = ["python3", "-m", "http.server", "3002"]
    sandbox = await manager.create(command=server, ports=[3002], ephemeral=sys.argv[2] == "ephemeral")
    print(sandbox.id, sandbox.addresses[3002], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["ephemeral", "lasting"])
async def test_it_outlives_the_program_that_made_it_as_long_as_the_sandbox_does(
    config: Config, folder: Path, kind: str
) -> None:
    tests = str(Path(__file__).parent.parent)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", PROGRAM, str(folder), kind], capture_output=True, text=True, cwd=tests
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    id, address = done.stdout.split()
    await asyncio.to_thread(fetch, address)
    async with AsyncSandboxManager(config) as manager:
        if kind == "ephemeral":
            assert not await manager.exists(id)
        else:
            await asyncio.to_thread(fetch, address)
            await manager.destroy(id)
    assert is_refused(address)
    assert forwarders(id) == []


async def test_a_port_that_is_taken_is_told_before_there_is_a_box(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(PortTaken, match=f"{port} of this host is in use"):
                await manager.create(ports=[f"{port}:80"])
        assert await manager.list() == []
        first = await manager.create(ports=[f"{port}:80"])
        with pytest.raises(PortTaken, match=first.id):
            await manager.create(ports=[f"{port}:81"])
        assert [record.id for record in await manager.list()] == [first.id]
        await manager.destroy(first.id)
        again = await manager.create(ports=[f"{port}:80"])  # it is free at once
        await manager.destroy(again.id)


async def test_the_same_create_again_gives_the_same_address(config: Config) -> None:
    port = free_port()
    async with AsyncSandboxManager(config) as manager:
        one = await manager.create(ports=[f"{port}:80", 81], key="web")
        other = await manager.create(ports=[f"{port}:80", 81], key="web")
        assert (one.id, one.addresses) == (other.id, other.addresses)
        assert set(one.addresses) == {80, 81}
        await manager.destroy(one.id)


async def test_a_create_that_fails_keeps_no_port(config: Config, folder: Path) -> None:
    port = free_port()
    async with AsyncSandboxManager(config) as manager:
        with pytest.raises((CreateFailed, InvalidSpec)):
            await manager.create(ports=[f"{port}:80"], root="/no/such/folder")
        assert is_refused(f"127.0.0.1:{port}")
        assert [record.state for record in await manager.list(Filter(include_ended=True))] == [State.DESTROYED]


async def test_a_forwarder_that_cannot_start_fails_the_create(
    config: Config, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with AsyncSandboxManager(config) as manager:
        with pytest.raises(CreateFailed, match="forwarder"):
            await manager.create(ports=[3002])
        assert await manager.list() == []


async def test_one_that_never_starts_does_not_hold_up_the_create(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=["/no/such/program"], ports=[3002])
        status = await sandbox.service.status()
        assert status is not None
        assert not status.healthy
        await manager.destroy(sandbox.id)


async def test_an_address_takes_many_connections_and_no_more(config: Config) -> None:
    """Each is answered at once; those above the bound are closed, and there is room again when others leave."""
    code = (
        "import asyncio\n"
        "async def serve(reader, writer):\n"
        "    writer.write(b'hello')\n"
        "    await reader.read()\n"
        "    writer.close()\n"
        "async def main():\n"
        "    server = await asyncio.start_server(serve, '127.0.0.1', 3002, backlog=500)\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())\n"
    )

    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(command=["python3", "-c", code], ports=[3002])
        host, _, port = sandbox.addresses[3002].partition(":")

        def connect() -> tuple[socket.socket, bool]:
            link = socket.create_connection((host, int(port)), PATIENCE_S)
            try:
                return link, link.recv(5) == b"hello"
            except ConnectionResetError:
                return link, False

        def is_up() -> bool:
            link, answered = connect()
            link.close()
            return answered

        def fill() -> int:
            with ExitStack() as links:
                answers = 0
                for _ in range(300):
                    link, answered = connect()
                    links.enter_context(link)
                    answers += answered
                return answers

        await eventually(is_up, "the first answer")
        assert 200 < await asyncio.to_thread(fill) <= 256
        await eventually(is_up, "room for another")
        await manager.destroy(sandbox.id)


async def test_sandboxes_that_only_this_program_knows_have_no_address() -> None:
    sandbox = AsyncSandbox(provider_object=Mock(), ports=[3002])
    with pytest.raises(Unsupported, match="expose"):
        await sandbox.__aenter__()


async def test_an_image_command_is_refused_where_there_are_no_images(config: Config) -> None:
    async with AsyncSandboxManager(config) as manager:
        with pytest.raises(Unsupported, match="command"):
            await manager.create(Spec.of(provider="local", command="image"))
        assert await manager.list(Filter(include_ended=True)) == []
