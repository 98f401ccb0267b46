"""Admission: a box is made only while the host has memory for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manager.world import Folders, config_of, until
from skerry.config import AdmissionSettings, Config, load
from skerry.errors import ConfigError, HostFull
from skerry.host.room import Room
from skerry.manager.admission import Admission, Look, shortage
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.providers.base import Provider
from skerry.providers.docker import Docker, DockerConfig
from skerry.providers.incus import provider as incus
from skerry.providers.incus.info import IncusInfo, _Environment
from skerry.providers.incus.provider import Incus
from skerry.providers.mock import Host, Mock
from skerry.store import Store

M = 1 << 20
G = 1 << 30


class Here(Folders):
    takes_memory_here = True


class Watched:
    """A look at a host whose room the test decides, and which counts how often it was looked at."""

    def __init__(self, **room: Any) -> None:
        self.room = Room(**{"memory_bytes": 8 * G, "memory_free_bytes": 4 * G, **room})
        self.looks = 0

    def __call__(self, folder: str, *, cpu: bool = True, memory: bool = True) -> Room:
        self.looks += 1
        return self.room

    def change(self, **room: Any) -> None:
        self.room = msgspec.structs.replace(self.room, **room)


def box(memory: int | None = None) -> Spec:
    return Spec(provider="folders", memory=memory)


def settings(path: Path, min_free: int = 256 * M, **bounds: Any) -> Config:
    bounds = {"wait_s": 0.0, **bounds}
    admission = AdmissionSettings(**bounds)
    return config_of(path, provider="folders", min_free_memory=min_free, admission=admission)


def soon(wait_s: float) -> float:
    return asyncio.get_running_loop().time() + wait_s


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path / "boxes")


@asynccontextmanager
async def room_for(
    spec: Spec, provider: Provider, config: Config, look: Look, wait_s: float = 0.0
) -> AsyncIterator[None]:
    async with Admission(look).room_for(spec, provider, config, soon(wait_s)):
        yield


async def test_so_much_stays_free(tmp_path: Path, here: Here) -> None:
    look = Watched(memory_free_bytes=256 * M)
    async with room_for(box(), here, settings(tmp_path), look):
        pass
    with pytest.raises(HostFull, match=r"256M of memory free.*300M must stay free \(min_free_memory\).*retry later"):
        async with room_for(box(), here, settings(tmp_path, 300 * M), look):
            pass


async def test_what_a_box_may_take_counts(tmp_path: Path, here: Here) -> None:
    with pytest.raises(HostFull, match="the sandbox may take 512M"):
        async with room_for(box(512 * M), here, settings(tmp_path), Watched(memory_free_bytes=700 * M)):
            pass


async def test_boxes_that_are_being_made_count_until_they_are(tmp_path: Path, here: Here) -> None:
    config, look = settings(tmp_path, 100 * M), Watched(memory_free_bytes=800 * M)
    async with room_for(box(400 * M), here, config, look):
        with pytest.raises(HostFull, match="400M of it for boxes"):
            async with room_for(box(400 * M), here, config, look):
                pass
    async with room_for(box(400 * M), here, config, look):
        pass


async def test_boxes_elsewhere_and_hosts_that_tell_nothing_are_let_be(tmp_path: Path, here: Here) -> None:
    look = Watched(memory_free_bytes=0, disk_free_bytes=0)
    async with room_for(box(1 << 40), Folders(tmp_path / "elsewhere"), settings(tmp_path), look):
        assert look.looks == 0
    async with room_for(box(1 << 40), here, settings(tmp_path), lambda *_, **__: Room()):
        pass
    async with room_for(box(1 << 40), here, settings(tmp_path, 0, min_free_disk=0), look):
        pass


@pytest.mark.parametrize(
    ("room", "bounds", "said"),
    [
        ({"disk_free_bytes": 63 * M}, {}, r"63M free: 64M must stay free \(admission.min_free_disk\)"),
        ({"inodes_free": 999}, {}, r"999 inodes free: 1000 must stay free \(admission.min_free_disk\)"),
        ({"cpu_pressure": 91.0}, {"max_cpu_pressure": 90}, r"91% of the last 10 s.*90%.*admission.max_cpu_pressure"),
        ({"cpu_pressure": 100.0}, {}, ""),
        ({"memory_pressure": 30.0, "memory_free_bytes": G // 2}, {}, r"30% of .*20%.*admission.max_memory_pressure"),
        ({"memory_pressure": 100.0}, {}, ""),  # much is free: some box is at its own limit
        ({"memory_pressure": 30.0, "memory_free_bytes": G // 2}, {"max_memory_pressure": 0}, ""),
    ],
)
async def test_a_host_is_short_of_what_is_bounded(
    tmp_path: Path, room: dict[str, Any], bounds: dict[str, Any], said: str
) -> None:
    why = shortage(Watched(**room).room, settings(tmp_path, **bounds))
    assert re.search(said, why) if said else not why


async def test_a_create_waits_for_room_and_is_refused_when_its_time_is_over(tmp_path: Path, here: Here) -> None:
    look = Watched(memory_free_bytes=0)
    with pytest.raises(HostFull):
        async with room_for(box(), here, settings(tmp_path), look, wait_s=0.05):
            pass
    assert 1 < look.looks < 10
    admission = Admission(look)
    waiting = asyncio.create_task(_enter(admission, here, settings(tmp_path), 60))
    await until(lambda: look.looks > 10)
    look.change(memory_free_bytes=G)
    await asyncio.wait_for(waiting, 10)


async def test_those_who_wait_come_in_the_order_in_which_they_came_and_one_alone_looks(
    tmp_path: Path, here: Here
) -> None:
    look, order = Watched(memory_free_bytes=0), list[int]()
    admission, config = Admission(look), settings(tmp_path)

    async def create(number: int) -> None:
        await _enter(admission, here, config, 60)
        order.append(number)

    waiting = [asyncio.create_task(create(0))]
    await until(lambda: look.looks >= 2)
    waiting += [asyncio.create_task(create(number)) for number in range(1, 20)]
    await until(lambda: len(admission._room._turn._waiters or ()) == 19)
    looks = look.looks
    waiting[5].cancel()
    await asyncio.wait([waiting[5]])
    assert look.looks <= looks + 2
    look.change(memory_free_bytes=G)
    admission.ended()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [number for number in range(20) if number != 5]
    assert not admission._room.waiting


async def test_what_ends_here_lets_the_first_look_at_once(tmp_path: Path, here: Here) -> None:
    look = Watched(memory_free_bytes=0)
    admission = Admission(look)
    admission._room._waits_s = (3600.0, 3600.0)  # so that nothing else does
    waiting = asyncio.create_task(_enter(admission, here, settings(tmp_path), 7200))
    await until(lambda: look.looks == 2)
    look.change(memory_free_bytes=G)
    admission.ended()
    await asyncio.wait_for(waiting, 10)


async def _enter(admission: Admission, provider: Provider, config: Config, wait_s: float) -> None:
    async with admission.room_for(box(), provider, config, soon(wait_s)):
        pass


def test_an_engine_on_another_machine_takes_no_memory_of_this_one() -> None:
    assert Docker(DockerConfig(host="unix:///var/run/docker.sock")).takes_memory_here
    assert not Docker(DockerConfig(host="tcp://engine.test:2375")).takes_memory_here


@pytest.mark.parametrize("is_here", [True, False])
async def test_boxes_of_incus_take_memory_of_the_machine_that_its_daemon_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    async def look(*_: object) -> IncusInfo:
        return IncusInfo(_Environment(), "unix:///incus.socket", "pool", "dir")

    monkeypatch.setattr(incus, "look", look)
    monkeypatch.setattr(IncusInfo, "is_local", is_here)
    provider = Incus()
    await provider.describe()  # as `enforcement` before a box is made, it asks the daemon where it is
    full = Watched(memory_free_bytes=100 * M)
    with suppress(HostFull):
        async with room_for(Spec(provider="incus"), provider, settings(tmp_path), full):
            assert not is_here


async def test_a_create_on_a_full_host_is_refused_and_leaves_nothing(tmp_path: Path, here: Folders) -> None:
    store = await Store.open(f"{tmp_path}/registry.db")
    try:
        async with AsyncSandboxManager(settings(tmp_path), store=store, providers={"folders": here}) as manager:
            manager._open.admission._look = Watched(memory_free_bytes=100 * M)
            with pytest.raises(HostFull):
                await manager.create(box())
            assert here.boxes() == set()
            (record,) = await manager.list(Filter(include_ended=True))
            assert (record.cause, "memory" in record.detail) == (Cause.CREATION_FAILED, True)
            manager.set_limits(settings(tmp_path, 0))
            await asyncio.wait_for(manager.create(box()), 10)
            assert len(here.boxes()) == 1
    finally:
        await store.aclose()


async def test_a_stopped_sandbox_is_started_when_there_is_room(tmp_path: Path) -> None:
    class MockHere(Mock):
        takes_memory_here = True

    store = await Store.open(f"{tmp_path}/registry.db")
    config = config_of(tmp_path, min_free_memory=256 * M, admission=AdmissionSettings(wait_s=0.0))
    try:
        async with AsyncSandboxManager(config, store=store, providers={"mock": MockHere(host=Host())}) as manager:
            sandbox = await manager.create()
            await manager.stop(sandbox.id)
            look = manager._open.admission._look = Watched(memory_free_bytes=100 * M)
            with pytest.raises(HostFull, match="min_free_memory"):
                await manager.start(sandbox.id)
            assert (await manager.record(sandbox.id)).state is State.STOPPED
            look.change(memory_free_bytes=G)
            await manager.start(sandbox.id)
            assert (await manager.record(sandbox.id)).state is State.READY
            await manager.destroy_all()
    finally:
        await store.aclose()


async def test_a_create_is_three_changes_of_the_registry_and_nothing_read(
    tmp_path: Path, here: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(f"{tmp_path}/registry.db")
    config = config_of(tmp_path, provider="folders", max_boots=4)
    try:
        async with AsyncSandboxManager(config, store=store, providers={"folders": here}) as manager:
            await manager.create()
            transact, writes = store._database.transact, list[bool]()

            async def count(work: Any, *, write: bool = True, frees: bool = False) -> Any:
                writes.append(write)
                return await transact(work, write=write, frees=frees)

            monkeypatch.setattr(store._database, "transact", count)
            await manager.create()
            assert writes == [True] * 3
            await asyncio.gather(*(manager.create() for _ in range(40)))
            assert all(writes), "one that waits for its turn to boot does not ask the registry for it"
            assert len(writes) - 3 <= 40 * 4, "but for the first in line, when one has ended"
            monkeypatch.undo()
    finally:
        await store.aclose()


def test_the_setting_is_a_size(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().min_free_memory == 256 * M
    assert load({"min_free_memory": "1G"}).min_free_memory == 1 << 30
    monkeypatch.setenv("SKERRY_MIN_FREE_MEMORY", "0")
    assert load().min_free_memory == 0
    for wrong in ("much", -1):
        with pytest.raises(ConfigError, match="min_free_memory"):
            load({"min_free_memory": wrong})


def test_bounds_are_numbers_and_a_size(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().admission == AdmissionSettings()
    monkeypatch.setenv("SKERRY_ADMISSION__OVERCOMMIT", "1.5")
    monkeypatch.setenv("SKERRY_ADMISSION__MIN_FREE_DISK", "1G")
    assert load().admission == AdmissionSettings(overcommit=1.5, min_free_disk=G)
    for wrong in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv("SKERRY_ADMISSION__OVERCOMMIT", wrong)
        with pytest.raises(ConfigError, match=r"admission\.overcommit"):
            load()
