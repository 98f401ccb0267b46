"""kill -9 of the daemon in the middle of what it was asked; its containers live on, and all agree once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from services.world import fetch, forwarders

from skerry.errors import ProviderError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import new_id
from skerry.model.states import State

from .proxy import Proxy, Strike, When, proxied
from .world import DATA, WORK, World, agents, processes

pytestmark = pytest.mark.timeout(180)

B, W, A = When
MAKE, START, STOP, REMOVE = "POST /containers/create", "POST .*/start", "POST .*/stop", "DELETE /containers/"


@asynccontextmanager
async def doomed(world: World) -> AsyncIterator[tuple[Proxy, AsyncSandboxManager]]:
    """A manager whose daemon dies when the proxy sees what it is armed for."""
    async with (
        proxied(world.socket, world.sockets, world.daemon.kill) as (proxy, address),
        world.manager(address) as manager,
    ):
        yield proxy, manager


@pytest.mark.parametrize(
    "strike",
    [
        Strike("POST /volumes/create", A),
        Strike(MAKE, B),
        Strike(MAKE, W),
        Strike(MAKE, A),
        Strike(START, B),
        Strike(START, W),
        Strike(START, A),
        Strike("GET /containers/.*/json", B),
    ],
    ids=lambda strike: f"{strike.when} {strike.request}",
)
async def test_a_create_of_a_daemon_that_dies_leaves_nothing(world: World, strike: Strike) -> None:
    async with doomed(world) as (proxy, manager):
        kept = await world.make(manager)
        proxy.arm(strike)
        id = new_id()
        with pytest.raises(ProviderError):
            await manager.create(id=id, image=world.image)
        assert proxy.has_struck.is_set()
        await world.revive()
        records = await world.reconciled()
    assert records[id].state is State.DESTROYED
    assert records[kept.id].state is State.READY


@pytest.mark.parametrize(
    ("verb", "strike"),
    [
        ("stop", Strike(STOP, B)),
        ("stop", Strike(STOP, W)),
        ("stop", Strike("POST .*/wait", W)),
        ("start", Strike(START, W)),
        ("start", Strike(START, A)),
        ("destroy", Strike(REMOVE, W)),
        ("destroy", Strike(REMOVE, A)),
        ("snapshot", Strike("POST /commit", W)),
        ("snapshot", Strike("POST /commit", A, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.when} {value.request}",
)
async def test_what_a_daemon_was_at_when_it_died_is_done_or_not(world: World, verb: str, strike: Strike) -> None:
    more = {"name": "kept"} if verb == "snapshot" else {}
    async with doomed(world) as (proxy, manager):
        kept, other = await world.make(manager), (await world.make(manager)).id
        if verb == "start":
            await manager.stop(other)
        proxy.arm(strike)
        with pytest.raises(ProviderError):
            await getattr(manager, verb)(other, **more)
        assert proxy.has_struck.is_set()
        await world.revive()
        records = await world.reconciled()
        possible = {State.DESTROYED} if verb == "destroy" else {State.READY, State.STOPPED}
        assert records[other].state in possible
        assert records[kept.id].state is State.READY
        if records[other].state is State.STOPPED:
            await manager.start(other)
            await world.reconciled()
        if verb == "snapshot" and await manager.snapshots():
            await manager.remove_snapshot("kept")
        assert await world.images() == {f"{world.image}:latest"}


async def test_a_command_goes_on_while_its_daemon_is_dead(world: World) -> None:
    async with world.manager() as manager:
        sandbox = await world.make(manager)
        async with await sandbox.start(["sh", "-c", "echo begun; read line; echo $line"], stdin=True) as process:
            said = aiter(process)
            assert await anext(said) == (1, b"begun\n")
            await asyncio.to_thread(world.daemon.kill)
            await process.write("goes on\n")
            assert await anext(said) == (1, b"goes on\n")
        assert (await sandbox.exec(["cat", WORK])).text == sandbox.id
    async with world.manager() as another:
        with pytest.raises(ProviderError):
            await another.execute(sandbox.id, ["true"])
        await world.revive()
        assert (await another.execute(sandbox.id, ["cat", DATA])).text == sandbox.id
    await world.reconciled()


async def test_after_a_restart_of_the_host_sandboxes_are_stopped_and_start_again(world: World) -> None:
    async with world.manager() as manager:
        ids = [(await world.make(manager)).id for _ in range(2)]
        await manager.stop(ids[1])
    await asyncio.to_thread(world.restart_host)
    assert [agents(id) for id in ids] == [[], []]
    records = await world.reconciled()
    assert [records[id].state for id in ids] == [State.STOPPED, State.STOPPED]
    async with world.manager() as manager:
        for id in ids:
            await manager.start(id)
    records = await world.reconciled()
    assert [records[id].state for id in ids] == [State.READY, State.READY]


async def test_a_service_answers_at_its_address_again_after_a_restart_of_the_host(world: World) -> None:
    """Its forwarder is gone as well; whoever starts the sandbox starts both."""
    async with world.manager() as manager:
        command = ["/bin/busybox", "httpd", "-f", "-p", "3002", "-h", "/etc"]
        sandbox = await manager.create(image=world.image, command=command, ports=[3002], data=False)
        address = sandbox.addresses[3002]
        await asyncio.to_thread(fetch, address, "/passwd")
    for forwarder in forwarders(sandbox.id):
        os.kill(forwarder.pid, signal.SIGKILL)
    await asyncio.to_thread(world.restart_host)
    async with world.manager() as manager:
        await manager.reconcile()
        await manager.start(sandbox.id)
        assert b"root" in await asyncio.to_thread(fetch, address, "/passwd")
        await manager.destroy(sandbox.id)
    assert forwarders(sandbox.id) == []


@pytest.mark.parametrize("program", ["containerd-shim", "start.py"])
async def test_a_box_whose_shim_or_agent_is_killed_is_stopped_and_starts_again(world: World, program: str) -> None:
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        container = (await world.ask("GET", f"/containers/skerry-{id}/json"))["Id"]
        for pid in processes(program, container if program == "containerd-shim" else id):
            os.kill(pid, signal.SIGKILL)
        await world.ask("POST", f"/containers/{container}/wait")
        assert (await world.reconciled())[id].state is State.STOPPED
        await manager.start(id)
    assert (await world.reconciled())[id].state is State.READY
