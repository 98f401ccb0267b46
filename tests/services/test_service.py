"""The service of a box, as its agent keeps it: restarts, their bound, its log, its health, and the box's idleness."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from agent.guest_process import Guest, interpreters

from skerry.errors import InvalidSpec, NotFound, Unsupported
from skerry.model.results import ServiceState, ServiceStatus
from skerry.model.spec import Port, Restart, Spec
from skerry.oci import archives
from skerry.providers.base import BoxState
from skerry.providers.mock import Clock, Mock
from skerry.providers.mock.process import Context
from skerry.sandbox import service
from skerry.sandbox.sandbox import AsyncSandbox

PATIENCE_S = 20.0
PYTHONS = interpreters()


def _number(version: str) -> int:
    return int(version.partition(".")[2])


@pytest.fixture(params=sorted({min(PYTHONS, key=_number), max(PYTHONS, key=_number)}))
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """The agent as a process of this host, by the oldest and the newest Python that is here."""
    with Guest(PYTHONS[request.param]) as running:
        yield running


async def begin(sandbox: AsyncSandbox, **options: Any) -> ServiceStatus | None:
    return await service.begin(await sandbox.connection.connect(), Spec.of(provider="guest", **options))


@pytest.fixture
async def sandbox(guest: Guest) -> AsyncIterator[AsyncSandbox]:
    made = guest.sandbox()
    yield made
    await made.close()


async def until(sandbox: AsyncSandbox, is_so: Callable[[ServiceStatus], bool]) -> ServiceStatus:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await sandbox.service.status()
            if status is not None and is_so(status):
                return status
            await asyncio.sleep(0.01)


async def log(sandbox: AsyncSandbox, *, follow: bool = False) -> bytes:
    return b"".join([data async for _, data in sandbox.service.logs(follow=follow)])


async def said_until(sandbox: AsyncSandbox, is_so: Callable[[bytes], bool]) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            said = await log(sandbox)
            if is_so(said):
                return said
            await asyncio.sleep(0.01)


async def test_a_command_runs_from_its_begin_on_and_is_begun_once(sandbox: AsyncSandbox) -> None:
    assert await sandbox.service.status() is None
    first = await begin(sandbox, command=["sleep", "1000"])
    again = await begin(sandbox, command=["true"])
    assert first is not None
    assert again is not None
    assert (first.state, first.healthy, first.pid) == (ServiceState.RUNNING, True, again.pid)
    assert [each.tag for each in await sandbox.processes.list()] == ["service"]


async def test_ports_that_somebody_listens_on_are_told_without_a_service_too(sandbox: AsyncSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        heard = await service.listening(await sandbox.connection.connect())
        assert heard is not None
        assert port in heard
    assert await sandbox.service.status() is None


async def test_one_that_crashes_is_started_again_and_its_output_is_kept(sandbox: AsyncSandbox) -> None:
    await begin(sandbox, command="echo try; echo wrong >&2; test -e tried && exec sleep 1000; touch tried; exit 3")
    status = await until(sandbox, lambda now: now.restarts == 1 and now.state is ServiceState.RUNNING)
    assert (status.exit_code, status.signal) == (3, None)
    said = await said_until(sandbox, lambda said: said.count(b"try\n") == 2 and said.count(b"wrong\n") == 2)
    assert said.count(b"wrong\n") == 2


@pytest.mark.parametrize(
    ("restart", "command", "state"),
    [
        (Restart.NO, "exit 1", ServiceState.EXITED),
        (Restart.ON_FAILURE, "exit 0", ServiceState.EXITED),
        (Restart.ON_FAILURE, "kill -TERM $$", ServiceState.EXITED),
        (Restart.ON_FAILURE, "kill -KILL $$", None),
        (Restart.ALWAYS, "exit 0", None),
    ],
)
async def test_the_policy_decides_whether_it_is_started_again(
    sandbox: AsyncSandbox, restart: Restart, command: str, state: ServiceState | None
) -> None:
    await begin(sandbox, command=command, restart=restart)
    if state is None:
        assert (await until(sandbox, lambda now: now.restarts > 0)).restarts > 0
    else:
        status = await until(sandbox, lambda now: now.state is state)
        assert (status.restarts, status.process, status.healthy) == (0, None, False)


async def test_a_program_that_is_not_there_is_a_state_and_no_error(sandbox: AsyncSandbox) -> None:
    await begin(sandbox, command=["/no/such/program"], restart="no")
    status = await until(sandbox, lambda now: now.state is ServiceState.EXITED)
    assert status.exit_code == 127
    assert b"not found" in await log(sandbox)


async def test_it_is_healthy_once_it_listens_on_its_ports(sandbox: AsyncSandbox) -> None:
    server = (
        "import socket, sys, time\n"
        "s = socket.socket()\n"
        "s.bind(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = await sandbox.start([sys.executable, "-c", server], stdin=True)
    _, said = await anext(aiter(process))
    port = int(said)
    await process.kill()
    status = await begin(sandbox, command=["sleep", "1000"], ports=[port])
    assert status is not None
    assert (status.state, status.healthy, status.listening) == (ServiceState.RUNNING, False, [])
    listens = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(1000)"
    async with await sandbox.start([sys.executable, "-c", listens]):
        assert (await until(sandbox, lambda now: now.healthy)).listening == [port]


async def test_the_log_keeps_the_end_and_a_slow_reader_holds_nobody_up(sandbox: AsyncSandbox) -> None:
    flood = "i=0; while [ $i -lt 40 ]; do head -c 100000 /dev/zero | tr '\\0' x; i=$((i+1)); done; echo end; sleep 1000"
    call = (await sandbox.connection.connect()).open("processes")  # the stream is busy with another call too
    await begin(sandbox, command=flood)
    reading = aiter(sandbox.service.logs(follow=True))
    async with asyncio.timeout(PATIENCE_S):
        await anext(reading)
    said = await said_until(sandbox, lambda said: said.endswith(b"end\n"))
    assert 1 << 19 < len(said) <= (1 << 20) + (1 << 19)
    await reading.aclose()  # type: ignore[attr-defined]
    call.abandon()


async def test_a_follower_hears_all_and_then_the_end(sandbox: AsyncSandbox) -> None:
    await begin(sandbox, command="echo one; while ! test -e go; do sleep 0.01; done; echo two")
    heard = asyncio.ensure_future(log(sandbox, follow=True))
    await sandbox.files.write("go", b"")
    async with asyncio.timeout(PATIENCE_S):
        assert await heard == b"one\ntwo\n"


async def test_who_stops_following_leaves_the_stream_as_it_was(sandbox: AsyncSandbox) -> None:
    await begin(sandbox, command="while :; do echo x; sleep 0.01; done")
    for _ in range(3):
        reading = aiter(sandbox.service.logs(follow=True))
        await anext(reading)
        await reading.aclose()  # type: ignore[attr-defined]
    await sandbox.ping()


async def test_a_sandbox_without_a_service_has_no_log_of_one(sandbox: AsyncSandbox) -> None:
    with pytest.raises(NotFound):
        await log(sandbox)


@pytest.mark.parametrize(
    "params",
    [{}, {"argv": []}, {"argv": ["true"], "restart": "never"}, {"argv": ["true"], "ports": [0]}, {"image": True}],
)
async def test_what_is_no_service_is_refused(sandbox: AsyncSandbox, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        await sandbox.call("serve", params)
    assert await sandbox.service.status() is None


async def test_an_agent_that_is_told_to_stop_starts_nothing_again(guest: Guest, sandbox: AsyncSandbox) -> None:
    await begin(sandbox, command="trap 'echo bye; exit 1' TERM; while :; do sleep 0.01; done", restart="always")
    await until(sandbox, lambda now: now.state is ServiceState.RUNNING)
    await sandbox.call("shutdown", {"grace_s": 10})
    assert await asyncio.to_thread(guest.process.wait, PATIENCE_S) == 143


# on the mock, whose time is virtual


async def crash(_: Context) -> int:
    return 1


async def serve_for_ever(context: Context) -> int:
    context.listen(3002)
    await context.sleep(1e9)
    return 0


async def test_one_that_never_starts_is_given_up_in_the_end() -> None:
    mock = Mock()
    mock.program("crash")(crash)
    async with AsyncSandbox(provider_object=mock, command=["crash"], restart="always") as sandbox:
        await mock.pass_time(300)
        status = await sandbox.service.status()
        assert status is not None
        assert (status.state, status.restarts, status.exit_code) == (ServiceState.FAILED, 10, 1)
        assert b"given up after 10 restarts" in await log(sandbox)


async def test_a_look_at_the_ports_of_an_idle_box_leaves_it_idle() -> None:
    mock = Mock(clock=Clock(autojump=False))
    async with AsyncSandbox(provider_object=mock, idle=10) as sandbox:
        await mock.clock.advance(9)
        assert await service.listening(await sandbox.connection.connect()) == set()
        assert (await mock.discover())[sandbox.id].state is BoxState.RUNNING
        await mock.clock.advance(2)
        assert (await mock.discover())[sandbox.id].state is BoxState.DEAD


async def test_a_box_with_a_service_is_not_idle_until_that_has_ended_for_good() -> None:
    mock = Mock()
    mock.program("serve")(serve_for_ever)
    mock.program("crash")(crash)
    async with AsyncSandbox(provider_object=mock, command=["serve"], idle=5) as sandbox:
        await mock.pass_time(100)
        await sandbox.ping()
    async with AsyncSandbox(provider_object=mock, command=["crash"], restart="always", idle=5) as sandbox:
        await mock.pass_time(60)  # the longest wait between two restarts is 30 s
        await sandbox.ping()
        await mock.pass_time(300)
        assert mock.host.boxes[sandbox.id].agent is None


@pytest.mark.parametrize("restart", [Restart.ALWAYS, Restart.ON_FAILURE])
async def test_it_ends_with_grace_and_runs_again_if_the_end_of_its_box_came_to_nothing(restart: Restart) -> None:
    mock = Mock()
    mock.program("serve")(serve_for_ever)
    async with AsyncSandbox(provider_object=mock, command=["serve"], restart=restart) as sandbox:
        await sandbox.connection.terminate(5)
        ended = await sandbox.service.status()
        assert ended is not None
        assert (ended.state, ended.process) == (ServiceState.WAITING, None)
        await mock.pass_time(61)
        again = await sandbox.service.status()
        assert again is not None
        assert (again.state, again.restarts) == (ServiceState.RUNNING, 1)


async def test_a_mock_refuses_addresses_and_commands_of_images() -> None:
    for options in ({"ports": [3002]}, {"command": "image"}):
        sandbox = AsyncSandbox(provider_object=Mock(), **options)  # type: ignore[arg-type]
        with pytest.raises(Unsupported):
            await sandbox.__aenter__()


def test_the_command_of_an_image_is_its_entrypoint_and_then_its_cmd() -> None:
    told = b'{"config": {"Entrypoint": ["/server"], "Cmd": ["--port", "3002"]}}'
    assert archives.read_settings(told).command == ("/server", "--port", "3002")
    assert archives.read_settings(b'{"config": {"Entrypoint": null, "Cmd": null}}').command == ()


def test_a_spec_takes_dockers_notation_and_nothing_but_the_loopback() -> None:
    spec = Spec.of(ports=["3002", "8080:80", 90, Port(port=1, local=2), "127.0.0.1::443/tcp"])
    assert spec.ports == (
        Port(port=3002), Port(port=80, local=8080), Port(port=90), Port(port=1, local=2), Port(port=443),
    )  # fmt: skip
    assert spec.but(memory="64M").ports == spec.ports
    assert Spec.parse({"ports": [{"port": 3}]}).ports == (Port(port=3),)


@pytest.mark.parametrize(
    "options",
    [
        {"ports": ["0"]}, {"ports": ["70000"]}, {"ports": ["0.0.0.0:1:2"]}, {"ports": ["1:2/udp"]}, {"ports": ["x"]},
        {"ports": ["80", "81:80"]}, {"ports": ["8080:1", "8080:2"]}, {"ports": [""]}, {"ports": ["-1"]},
        {"ports": list(range(1, 40))}, {"command": []}, {"command": " "}, {"command": ["a\0b"]}, {"command": [""]},
        {"restart": "always"}, {"command": "x", "restart": "sometimes"},
    ],
)  # fmt: skip
def test_a_spec_refuses_what_is_no_port_and_no_command(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as caught, suppress(Unsupported):
        Spec.of(**options)
    assert caught.value.field in ("ports", "command", "restart")
