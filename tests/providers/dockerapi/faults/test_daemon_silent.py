"""A daemon that hangs or answers nonsense: every call ends by its deadline, and what is not known is not gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from skerry.errors import ProviderError
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import State
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import provider as engine_provider

from .proxy import Failing, Strike, When, proxied, serving
from .world import World

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("_short_deadlines")]

DEADLINES = {"timeout_s": 1.5, "start_timeout_s": 1.5}
PATIENCE_S = 20.0
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ANSWERS = {
    "silence": None,
    "the end": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": _OK + b'Content-Length: 100\r\n\r\n[{"Id": "',
    "half a chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n64\r\n[{",
    "no chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a body that is not JSON": _OK + b"Content-Length: 3\r\n\r\n[{]",
    "another type": _OK + b"Content-Length: 4\r\n\r\ntrue",
    "an error": b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 18\r\n\r\n{"message": "ouch"}',
    "half an error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 18\r\n\r\n{",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "a long head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
}
STAYS_OPEN = {"silence", "half a body", "half a chunk", "half an error"}
SAYS_DONE = {"a body that is not JSON", "another type"}
"""Of what is only to be done nobody reads more than that it is."""


@pytest.fixture
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_provider, "_REMOVE_TIMEOUT_S", 1.5)


VERBS: dict[str, Callable[[Docker, SandboxId, Spec], Awaitable[object]]] = {
    "check": lambda docker, _id, _spec: docker.check(),
    "enforcement": lambda docker, _id, spec: docker.enforcement(spec),
    "create": lambda docker, id, spec: docker.create(id, spec),
    "destroy": lambda docker, id, _spec: docker.destroy(id),
    "discover": lambda docker, _id, _spec: docker.discover(),
    "dial": lambda docker, id, _spec: docker.dial(id),
    "stop": lambda docker, id, _spec: docker.stop(id),
    "start": lambda docker, id, spec: docker.start(id, spec),
    "pause": lambda docker, id, _spec: docker.pause(id),
    "snapshot": lambda docker, id, _spec: docker.snapshot(id, "kept"),
    "snapshots": lambda docker, _id, _spec: docker.snapshots(),
    "volumes": lambda docker, _id, _spec: docker.volumes(),
    "watch": lambda docker, _id, _spec: anext(aiter(docker.watch())),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_every_call_to_a_daemon_that_makes_no_sense_ends(world: World, answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWERS[answer] or b"")
        if answer in STAYS_OPEN:
            await asyncio.Event().wait()

    async with world.manager() as manager:
        sandbox = await world.make(manager)
        before = await manager.record(sandbox.id)
        async with serving(world.sockets, serve) as address, world.manager(address, timeout_s=0.5) as confused:
            docker = confused.provider("docker")
            assert isinstance(docker, Docker)
            asked = [name for name in VERBS if name not in ("destroy", "stop") or answer not in SAYS_DONE]
            calls = (VERBS[name](docker, sandbox.id, sandbox.spec) for name in asked)
            async with asyncio.timeout(PATIENCE_S):
                ends = await asyncio.gather(*calls, return_exceptions=True)
            ended = dict(zip(asked, ends, strict=True))
            assert {name: end for name, end in ended.items() if not isinstance(end, ProviderError)} == {}
            assert await confused.reconcile() == []
            assert await manager.record(sandbox.id) == before
    assert (await world.reconciled())[sandbox.id].state is State.READY


async def test_a_removal_that_the_daemon_fails_at_is_tried_again(world: World) -> None:
    async with world.manager() as other:
        await world.make(other)  # what the first box of an engine needs is there from now on, and removes nothing more
    failing = Failing(world.socket, "DELETE .*/containers/", ANSWERS["an error"] or b"")
    async with serving(world.sockets, failing.serve) as address, world.manager(address) as manager:
        sandbox = await world.make(manager)
        await manager.destroy(sandbox.id)
        assert failing.has_failed
        assert (await manager.record(sandbox.id)).state is State.DESTROYED


async def test_a_start_that_meets_what_the_last_run_left_in_the_daemon_is_tried_again(world: World) -> None:
    words = b'{"message": "task 975e: already exists"}'
    answer = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n%s" % (len(words), words)
    async with world.manager() as other:
        sandbox = await world.make(other)
        await other.stop(sandbox.id)
    failing = Failing(world.socket, "POST .*/start", answer)
    async with serving(world.sockets, failing.serve) as address, world.manager(address) as manager:
        await manager.start(sandbox.id)
        assert failing.has_failed
    assert (await world.reconciled())[sandbox.id].state is State.READY


@asynccontextmanager
async def frozen(world: World) -> AsyncIterator[None]:
    os.kill(world.daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(world.daemon.pid, signal.SIGCONT)


async def test_of_a_daemon_that_hangs_nothing_is_known_until_it_goes_on(world: World) -> None:
    async with world.manager() as patient, world.manager(**DEADLINES) as manager:
        ids = [(await world.make(patient)).id for _ in range(2)]
        await patient.stop(ids[1])
        assert (await manager.execute(ids[0], ["true"])).ok
        before = await manager.list()
        async with frozen(world):
            async with asyncio.timeout(PATIENCE_S):
                assert await manager.reconcile() == []
            assert await manager.list() == before
            assert (await manager.execute(ids[0], ["echo", "still here"])).text == "still here\n"
            calls = (manager.destroy(ids[1]), manager.create(image=world.image), manager.stop(ids[0]))
            async with asyncio.timeout(PATIENCE_S):
                ends = await asyncio.gather(*calls, return_exceptions=True)
            assert [end for end in ends if not isinstance(end, ProviderError)] == []
    records = await world.reconciled()
    assert records[ids[0]].state in (State.READY, State.STOPPED)
    assert records[ids[1]].state is State.DESTROYED


@pytest.mark.parametrize("request_", ["POST /containers/create", "POST .*/start", "POST /volumes/create"])
async def test_what_a_daemon_does_after_all_is_undone(world: World, request_: str) -> None:
    """It hangs while it has the request, and goes on with it when everybody has given up."""
    id = new_id()

    def freeze() -> None:
        os.kill(world.daemon.pid, signal.SIGSTOP)

    async with (
        proxied(world.socket, world.sockets, freeze, hangs=True) as (proxy, address),
        world.manager(address, **DEADLINES) as manager,
        world.manager() as patient,
    ):
        kept = await world.make(patient)
        proxy.arm(Strike(request_, When.WITHIN))
        try:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(ProviderError):
                    await manager.create(id=id, image=world.image)
        finally:
            os.kill(world.daemon.pid, signal.SIGCONT)
        records = await world.reconciled()
    assert records[id].state is State.DESTROYED
    assert records[kept.id].state is State.READY
