"""Virtual machines: cold ones beside the same QEMU started by hand, and clones beside cold ones."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from raw_machine import RawMachine

from skerry import providers
from skerry.errors import ProviderUnavailable
from skerry.measure.figures import Figure, ms, not_run, p50, ratio
from skerry.measure.memory import processes_of, proportional_memory
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.machine import MachineConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm.folder import VmFolder
from skerry.vm.images.store import ImageStore

from .settings import Settings

_IMAGE = "minimal"
_AT_ONCE = 8
_CLONES_A_BOOT = 4
_SIZE = 10_000_000
_PYTHON = "/.skerry/python"
_INTERPRETER = [f"{_PYTHON}/lib/ld.so", "--library-path", f"{_PYTHON}/lib", f"{_PYTHON}/bin/python3", "-I", "-S"]
_SPAWNS = """
import os, time
def once():
    start = time.perf_counter()
    os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], {}), 0)
    return time.perf_counter() - start
print(sorted(once() for _ in range(41))[20])
"""


class NotThere(Exception):
    """What is needed is not on this host."""


class Boots(NamedTuple):
    """Seconds of each."""

    raw: list[float]
    cold: list[float]
    clones: list[float]


async def vm(settings: Settings) -> list[Figure]:
    try:
        async with (
            machines("qemu", _IMAGE, template=False) as (provider, state),
            machines("qemu", _IMAGE) as (cloning, _),
        ):
            async with _box(cloning):
                """It makes the template."""
            boots = await _boots(provider, cloning, state, settings.rounds(8))
            alone, crowd, memory = await _crowds(cloning, settings.rounds(8))
            return [
                ratio("vm", "boot to first ping", boots.cold, boots.raw, against="raw QEMU to its hello", at_most=1.15),
                ratio("vm", "clone to first ping", boots.clones, boots.cold, against="our boot", at_most=0.1),
                ratio("vm", f"{_AT_ONCE} clones at once, each", crowd, alone, against="one clone", at_most=3),
                memory,
                *await _naps(cloning, boots.cold, alone, settings.rounds(8)),
                await _execs(cloning, settings.rounds(160)),
                *await _files(cloning, settings.rounds(8)),
            ]
    except NotThere as error:
        return [not_run("vm", "all", str(error))]


@asynccontextmanager
async def machines(name: str, image: str, **options: object) -> AsyncIterator[tuple[Provider, Path]]:
    """A provider with this host's images, and where its boxes are; they and its templates go at the end."""
    with TemporaryDirectory(prefix="skerry-bench-") as place:
        os.chmod(place, 0o711)
        state, cache = Path(place, "state"), Path(place, "cache/vm")
        cache.mkdir(parents=True)
        for entry in _store_with(image).glob("*"):
            if entry.name != "templates":
                (cache / entry.name).symlink_to(entry)
        settings = {"state_dir": str(state), "cache_dir": str(cache.parent), "start_timeout_s": 120.0, **options}
        provider = providers.load(name, settings)
        try:
            try:
                await provider.check()
            except ProviderUnavailable as error:
                raise NotThere(str(error)) from error
            yield provider, state
        finally:
            for id in await provider.discover():
                await provider.destroy(id, volumes=True)
            await provider.aclose()


def _store_with(image: str) -> Path:
    """The images that were made on this host, or those of its tests."""
    own = MachineConfig().cache()
    for store in (own / "vm", own.parent / "skerry-tests/vm"):
        if any(image in each.names for each in ImageStore(store).all()):
            return store
    raise NotThere(f"there is no image {image} for machines: skerry image build --vm --recipe {image}")


async def _boots(provider: Provider, cloning: Provider, state: Path, rounds: int) -> Boots:
    """In turn. The first of ours shows how the raw ones are to be started, and fills caches."""
    boots = Boots([], [], [])
    with TemporaryDirectory(prefix="skerry-bench-") as kept:
        async with _box(provider) as (sandbox, _):
            raw = RawMachine(VmFolder(state / sandbox.id / "vm"), Path(kept))
        with closing(raw):
            for _ in range(rounds):
                boots.raw.append(await asyncio.to_thread(raw.boot))
                async with _box(provider) as (_, took):
                    boots.cold.append(took)
                for _ in range(_CLONES_A_BOOT):
                    async with _box(cloning) as (_, took):
                        boots.clones.append(took)
    return boots


async def _crowds(provider: Provider, rounds: int) -> tuple[list[float], list[float], Figure]:
    """One clone, then many at once, and so on; what each of the many takes of the host's memory."""
    alone, crowd, each_mb = [], [], []
    for _ in range(rounds):
        async with _box(provider) as (_, took):
            alone.append(took)
        async with AsyncExitStack() as stack:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(stack.enter_async_context(_box(provider))) for _ in range(_AT_ONCE)]
            boxes = [task.result() for task in tasks]
            crowd += [took for _, took in boxes]
            each_mb += [sum(map(proportional_memory, processes_of(sandbox.id))) / 1e6 for sandbox, _ in boxes]
    what, measured = f"memory of a clone, with {_AT_ONCE}", f"{p50(each_mb):.1f} MB"
    memory = Figure(case="vm", what=what, measured=measured, value=p50(each_mb), unit=" MB", at_most=45)
    return alone, crowd, memory


async def _naps(
    provider: Provider, boots: list[float], clones: list[float], rounds: int
) -> tuple[Figure, Figure, Figure]:
    """A machine is put to sleep and woken, and branched while it runs."""
    verbs: Any = provider
    saves, wakes, forks = [], [], []
    async with _box(provider) as (sandbox, _):
        for _ in range(rounds):
            await sandbox.close()
            start = time.perf_counter()
            await verbs.sleep(sandbox.id)
            saves.append(time.perf_counter() - start)
            start = time.perf_counter()
            await verbs.resume(sandbox.id)
            await sandbox.ping()
            wakes.append(time.perf_counter() - start)
        for number in range(max(1, rounds // 2)):
            name = f"bench-{number}"
            start = time.perf_counter()
            await verbs.snapshot_memory(sandbox.id, name)
            async with AsyncExitStack() as stack:
                async with asyncio.TaskGroup() as group:
                    for _ in range(_AT_ONCE):
                        group.create_task(stack.enter_async_context(_box(provider, snapshot=name)))
                forks.append(time.perf_counter() - start)
            await verbs.remove_snapshot(name)
    return (
        ratio("vm", "memory saved", saves, boots, against="our boot", at_most=1.0),
        ratio("vm", "woken to first ping", wakes, boots, against="our boot", at_most=0.12),
        ratio("vm", f"forked into {_AT_ONCE}, all answered", forks, clones, against="one clone", at_most=5),
    )


async def _execs(provider: Provider, rounds: int) -> Figure:
    """Beside what it must cost: a message there and back, and the start of a program, as the guest measures it."""
    ours, limits = [], []
    async with _box(provider) as (sandbox, _):
        await sandbox.exec(["/bin/true"])
        measured = await sandbox.exec([*_INTERPRETER, "-c", _SPAWNS], timeout_s=60)
        assert measured.ok, measured
        spawn = float(measured.text)
        for _ in range(rounds):
            start = time.perf_counter()
            await sandbox.ping()
            middle = time.perf_counter()
            result = await sandbox.exec(["/bin/true"])
            ours.append(time.perf_counter() - middle)
            limits.append(middle - start + spawn)
            assert result.ok, result
    return ratio("vm", "exec /bin/true", ours, limits, against="ping + spawn in the guest", at_most=2)


async def _files(provider: Provider, rounds: int) -> list[Figure]:
    data = os.urandom(_SIZE)
    writes, reads = [], []
    async with _box(provider) as (sandbox, _):
        for _ in range(rounds):
            start = time.perf_counter()
            await sandbox.files.write("bench-file", data)
            middle = time.perf_counter()
            assert await sandbox.files.read("bench-file") == data
            reads.append(time.perf_counter() - middle)
            writes.append(middle - start)
            await sandbox.files.remove("bench-file")
    return [
        Figure(case="vm", what=f"10 MB {way}", measured=ms(p50(took)), value=_SIZE / 1e6 / p50(took), unit=" MB/s")
        for way, took in (("in", writes), ("out", reads))
    ]


@asynccontextmanager
async def _box(provider: Provider, snapshot: str | None = None) -> AsyncIterator[tuple[AsyncSandbox, float]]:
    sandbox, took = await _timed_create(provider, snapshot)
    try:
        yield sandbox, took
    finally:
        await sandbox.destroy(volumes=True)


async def _timed_create(provider: Provider, snapshot: str | None) -> tuple[AsyncSandbox, float]:
    """A sandbox, and how long it took to its first answer."""
    start = time.perf_counter()
    sandbox = await AsyncSandbox.create(Spec(provider="qemu", image=_IMAGE, snapshot=snapshot), provider)
    try:
        await sandbox.ping()
    except BaseException:
        await sandbox.destroy(volumes=True)
        raise
    return sandbox, time.perf_counter() - start
