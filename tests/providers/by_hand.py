"""One verdict for each act by hand: on every provider, whoever watches, and whenever one looks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from manager.world import HostClock, config_of, opened_manager, until

from skerry.host import cgroup, processes
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxChange, Capability, Provider
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.machine.provider import MachineProvider

Act = Callable[[SandboxId], Awaitable[object]]
Verdict = tuple[State, Cause | None]

NOBODY, FOLLOWER, GLANCES = "nobody", "a follower", "somebody who looks all the time"


def verdict_on(act: str, provider: Provider) -> Verdict:
    """What is killed is stopped where it can be started again; else it is dead."""
    if act == "kill" and Capability.STOP not in provider.capabilities:
        return State.DESTROYED, Cause.BOX_DIED
    return {
        "remove": (State.LOST, Cause.BOX_DIED),
        "kill": (State.STOPPED, None),
        "terminate": (State.STOPPED, None),
        "stop": (State.STOPPED, None),
        "pause": (State.PAUSED, None),
        "restart": (State.READY, None),
    }[act]


@asynccontextmanager
async def watched_by(who: str, manager: AsyncSandboxManager, provider: Any, id: SandboxId) -> AsyncIterator[None]:
    if who == NOBODY:
        yield
        return
    is_there = asyncio.Event()
    watch = provider.watch

    async def noticed() -> AsyncIterator[BoxChange]:
        async for change in watch():
            is_there.set()
            yield change

    async def look() -> None:
        while True:
            await manager.look_after(id)
            is_there.set()

    provider.watch = noticed
    task = asyncio.create_task(manager.follow() if who == FOLLOWER else look())
    try:
        async with asyncio.timeout(20):
            await is_there.wait()
        yield
    finally:
        del provider.watch
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


class ByHandTests:
    """Subclass it with a `provider` and a `hands` fixture, and one test that calls `judge`."""

    options: ClassVar[Mapping[str, object]] = {}

    async def judge(
        self, provider: Provider, folder: Path, who: str, act: str, hands: Mapping[str, Act], **options: Any
    ) -> None:
        config, expected = config_of(folder, provider=provider.name), verdict_on(act, provider)
        async with opened_manager(config, provider, HostClock(), reconcile=False) as manager:
            sandbox = await manager.create(**options)

            async def is_seen() -> bool:
                record = await manager.record(sandbox.id)
                return (record.state, record.cause) == expected

            try:
                async with watched_by(who, manager, provider, sandbox.id):
                    await hands[act](sandbox.id)
                    if who != NOBODY:
                        await until(is_seen)
                await manager.reconcile()
                assert await is_seen(), await manager.record(sandbox.id)
                assert await manager.reconcile() == []
                if act == "remove":
                    self.check_kept(provider, sandbox.id)
            finally:
                await manager.destroy(sandbox.id, volumes=True)

    def check_kept(self, provider: Provider, id: SandboxId) -> None:
        """What nobody removed by hand is there."""


each_watch = pytest.mark.parametrize("who", [NOBODY, FOLLOWER, GLANCES])
ACTS = ["remove", "kill", "stop", "pause", "restart"]
each_act = pytest.mark.parametrize("act", ACTS)


def hands_on_machines(provider: MachineProvider) -> dict[str, Act]:
    """Killed from outside, or their folder removed under them."""

    async def kill(id: SandboxId) -> None:
        folder = MachineBox(provider._state_dir, id).vm
        vm = folder.read()
        assert vm is not None
        assert vm.vmm is not None
        assert await asyncio.to_thread(processes.wait_until_dead, [vm.vmm], 10, kill=True)
        assert await folder.wait(10)

    async def remove(id: SandboxId) -> None:
        """One name after another, as `rm -r` does, with time to look in between."""
        box = MachineBox(provider._state_dir, id)
        vm = box.vm.read()
        assert vm is not None
        for path in sorted(box.path.iterdir(), reverse=True):
            if path.is_file():
                path.unlink()
                await provider.discover()
        running = [each for each in (vm.vmm, vm.warden) if each is not None]
        assert await asyncio.to_thread(processes.wait_until_dead, running, 10, kill=True)
        shutil.rmtree(box.path)
        await asyncio.to_thread(cgroup.remove, [Path(group) for group in vm.groups], 10)

    return {"kill": kill, "remove": remove}
