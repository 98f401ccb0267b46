"""What the tests of the manager stand on: a configuration of their own, and a provider whose boxes are folders."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skerry import clock
from skerry.clock import Moment
from skerry.config import Config
from skerry.errors import AgentUnreachable, Conflict, CreateFailed
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.net.stream import Stream
from skerry.providers.base import BoxState, BoxStatus, Enforcement, Isolation, Provider
from skerry.store import Store


def config_of(state_dir: Path, **settings: Any) -> Config:
    """The settings of one installation, whatever the machine that runs the tests is set to."""
    values = {
        "provider": "mock",
        "project": "default",
        "lifetime": "never",
        "idle": "never",
        "max_sandboxes": 100,
        "max_boots": 16,
        "providers": {},
        "origins": {},
        "state_dir": str(state_dir),
        "database": f"{state_dir}/registry.db",
    }
    return Config(**{**values, **settings})


class Folders(Provider):
    """Boxes as folders: any process sees them, the host is their witness, and a race costs next to nothing."""

    name = "folders"
    isolation = Isolation.NONE

    def __init__(self, root: Path, *, boot_s: float = 0.0) -> None:
        self.root = root
        self._boot_s = boot_s
        root.mkdir(parents=True, exist_ok=True)

    async def check(self) -> None:
        return None

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        return {}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        try:
            (self.root / id).mkdir()
        except FileExistsError:
            raise Conflict(f"there is a folder {id} already") from None
        self._note("boots", +1)
        try:
            await asyncio.sleep(self._boot_s)
        finally:
            self._note("boots", -1)
        try:
            (self.root / id / "labels").write_bytes(msgspec.json.encode(spec.labels))
        except FileNotFoundError:
            raise CreateFailed(f"box {id} was destroyed while it booted") from None

    def _note(self, log: str, change: int) -> None:
        """A line of a log that all processes append to."""
        with open(self.root.parent / log, "ab", buffering=0) as file:
            file.write(b"%+d\n" % change)

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / id)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {SandboxId(name): BoxStatus(state=BoxState.RUNNING, labels=self._labels(name)) for name in self.boxes()}

    def _labels(self, name: str) -> dict[str, str]:
        try:
            return msgspec.json.decode((self.root / name / "labels").read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}

    async def dial(self, id: SandboxId) -> Stream:
        raise AgentUnreachable(f"box {id} is a folder")

    def boxes(self) -> set[str]:
        return set(os.listdir(self.root))


ENDED = Filter(include_ended=True)
_PATIENCE_S = 10.0


class HostClock:
    """The host's clock as a registry reads it, ahead by the time that a test lets pass."""

    def __init__(self) -> None:
        self.boot = clock.boot_id()
        self._ahead_s = 0.0

    def __call__(self) -> Moment:
        now = clock.now()
        return Moment(now.machine, self.boot, now.at + self._ahead_s)

    def pass_time(self, seconds: float) -> None:
        self._ahead_s += seconds


@asynccontextmanager
async def opened_manager(
    config: Config, provider: Provider, host_clock: HostClock, **options: Any
) -> AsyncIterator[AsyncSandboxManager]:
    """A manager with a connection of its own to the registry."""
    async with (
        aclosing(await Store.open(config.database, now=host_clock)) as store,
        AsyncSandboxManager(config, store=store, providers={provider.name: provider}, **options) as manager,
    ):
        yield manager


def set_wall_clock(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Somebody set the host's clock, by so much; no time has passed."""
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)


async def in_agreement(manager: AsyncSandboxManager, provider: Provider) -> None:
    """The registry is what the host holds."""
    live = {record.id for record in await manager.list() if record.state is not State.LOST}
    assert live == set(await provider.discover())


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait for what another task does in its own time, up to a deadline."""
    end = time.monotonic() + _PATIENCE_S
    while not (found if isinstance(found := condition(), bool) else await found):
        assert time.monotonic() < end
        await asyncio.sleep(0.001)
