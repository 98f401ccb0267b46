"""A program that makes, uses and destroys real sandboxes until it is killed at the point it was told, or any other."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from skerry.agent.client import AgentClient
from skerry.config import Config
from skerry.errors import Conflict, CreateFailed, NotFound, SkerryError, WrongState
from skerry.host import cgroup, processes, scope
from skerry.host.spawn import Descriptors
from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.local import Local, boxes, creation
from skerry.providers.local.boxes import Box
from skerry.providers.local.zygote import Zygotes
from skerry.store import Store, base, sqlite

DEEDS = 6
_MEANWHILE = (Conflict, CreateFailed, NotFound, WrongState)
"""What another program's destroy may lead to."""

POINTS: dict[str, tuple[Any, str]] = {
    "store.reserve": (Store, "reserve"),
    "store.boot_slot": (Store, "boot_slot"),
    "store.get": (Store, "get"),
    "store.change": (Store, "change"),
    "store.statement": (base.Transaction, "execute"),
    "store.transaction": (sqlite, "_transact"),
    "provider.enforcement": (Local, "enforcement"),
    "provider.create": (Local, "create"),
    "provider.discover": (Local, "discover"),
    "provider.destroy": (Local, "destroy"),
    "box.folder": (Box, "make"),
    "box.meta": (Box, "write_meta"),
    "box.listen": (Box, "listen"),
    "box.ask": (Zygotes, "_send"),
    "box.fork": (Zygotes, "fork"),
    "box.spawn": (Descriptors, "spawn"),
    "box.child_pid": (creation, "read_child_pid"),
    "box.processes": (Box, "write_processes"),
    "box.limit": (scope.Holder, "confine"),
    "box.hello": (AgentClient, "greet"),
    "end.kill": (processes, "wait_until_dead"),
    "end.groups": (cgroup, "remove"),
    "end.mounts": (boxes, "detach_all"),
    "end.folder": (Box, "remove"),
}
"""Where a program can be killed: before or after each of these calls."""
OF_BUBBLEWRAP = ("box.spawn", "box.child_pid", "box.limit")
"""Those of them that are reached where there is no zygote."""


class Plan(NamedTuple):
    point: str
    occurrence: int
    after: bool


def arm(plan: Plan) -> None:
    """From now on this process dies at that call, and nothing of it runs after."""
    owner, name = POINTS[plan.point]
    original, calls = getattr(owner, name), 0

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls == plan.occurrence

    async def call_async(*args: Any, **options: Any) -> Any:
        due = is_due()
        if due and not plan.after:
            die()
        result = await original(*args, **options)
        if due:
            die()
        return result

    def call(*args: Any, **options: Any) -> Any:
        due = is_due()
        if due and not plan.after:
            die()
        result = original(*args, **options)
        if due:
            die()
        return result

    setattr(owner, name, call_async if inspect.iscoroutinefunction(original) else call)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Victim:
    """Writes down what it was told before it goes on, so that whoever looks later knows what it may rely on."""

    def __init__(self, config: Config, journal: Path, seed: int) -> None:
        self._config = config
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._random = random.Random(seed)
        self._key = f"round {seed // 10}"

    def note(self, *words: str) -> None:
        os.write(self._journal, (" ".join(words) + "\n").encode())

    def run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException:
            self.note("failed", repr(traceback.format_exc()[-1500:]))
        die()

    async def _live(self) -> None:
        async with AsyncSandboxManager(self._config) as manager:
            deeds = [self._keep, self._borrow, self._ask_by_key, self._end, self._end, self._use]
            for number in range(DEEDS):
                chosen = [self._random.choice(deeds) for _ in range(self._random.randint(1, 2))]
                # the first deeds are always the same, so that every point is reached
                chosen = [[self._keep, self._borrow], [self._ask_by_key], [self._end]][number] if number < 3 else chosen
                await asyncio.gather(*(self._attempt(deed, manager) for deed in chosen))

    async def _attempt(self, deed: Any, manager: AsyncSandboxManager) -> None:
        try:
            await deed(manager)
        except _MEANWHILE:
            return

    async def _keep(self, manager: AsyncSandboxManager) -> None:
        self.note("made", (await manager.create()).id)

    async def _borrow(self, manager: AsyncSandboxManager) -> None:
        self.note("borrowed", (await manager.create(ephemeral=True)).id)

    async def _ask_by_key(self, manager: AsyncSandboxManager) -> None:
        self.note("made", (await manager.create(key=self._key)).id)

    async def _end(self, manager: AsyncSandboxManager) -> None:
        if records := await manager.list():
            id = self._random.choice(records).id
            self.note("ending", id)
            await manager.destroy(id)
            self.note("ended", id)

    async def _use(self, manager: AsyncSandboxManager) -> None:
        if records := await manager.list():
            try:
                await manager.execute(self._random.choice(records).id, ["true"], timeout_s=10)
            except SkerryError:
                return  # another program may end it meanwhile; the check afterwards tells
