"""Measures sandboxes of one provider as a user has them: in the registry, with the limits that their spec asks for."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skerry.aio import run_to_end
from skerry.errors import ProviderError
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure import limits, memory
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.model.results import OnProgress, Progress
from skerry.model.spec import Spec
from skerry.providers.base import Capability, Isolation
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.units import format_size

_TRUE = ["/bin/true"]
_ECHO = ["echo", "here"]
_FILE = "bench-file"
_MB = 1_000_000
_BARE = "bwrap true"
_WARM = 5
"""Boxes that are made first and not counted: what makes them quick may come up beside the first ones."""


class Extent(NamedTuple):
    """How thoroughly to measure."""

    rounds: int
    execs: int
    file_mb: int
    live: int
    """Boxes at once: made at the same time, and left idle beside each other."""

    @classmethod
    def of(cls, isolation: Isolation, *, quick: bool) -> Extent:
        if isolation is Isolation.VM:
            return cls(3, 10, 10, 4) if quick else cls(10, 100, 50, 8)
        return cls(5, 20, 10, 8) if quick else cls(40, 300, 100, 50)


async def measure(manager: AsyncSandboxManager, spec: Spec, *, quick: bool, on_progress: OnProgress) -> list[Figure]:
    """Figures of the provider that `spec` names. Raises SkerryError; no box is left, however it ends."""
    provider = manager.provider(spec.provider)
    await provider.check()
    run = _Run(manager, spec, Extent.of(provider.isolation, quick=quick))
    steps: dict[str, Callable[[], Coroutine[Any, Any, list[Figure]]]] = {
        "create": run.creates,
        "exec": run.execs,
        "files": run.files,
        "many at once, and idle": run.many,
    }
    if Capability.PAUSE in provider.capabilities:
        steps["pause and resume"] = partial(run.resumes, save=False)
    if Capability.MEMORY in provider.capabilities:
        steps["sleep and wake"] = partial(run.resumes, save=True)
    if Capability.SNAPSHOT in provider.capabilities:
        steps["fork"] = partial(run.forks, with_memory=False)
    if Capability.MEMORY in provider.capabilities:
        steps["fork with memory"] = partial(run.forks, with_memory=True)
    figures: list[Figure] = []
    for done, (name, step) in enumerate(steps.items()):
        on_progress(Progress(f"{spec.provider}: {name}", done, len(steps)))
        figures += await step()
    return figures


class _Run:
    def __init__(self, manager: AsyncSandboxManager, spec: Spec, extent: Extent) -> None:
        self._manager = manager
        self._spec = spec
        self._extent = extent
        self._ready: list[float] = []
        """Seconds of each create to its first answer."""

    async def creates(self) -> list[Figure]:
        bare: list[float] = []
        cycles: list[float] = []
        ends: list[float] = []
        async with self._box() as (_, first):
            """What is only made once is made by now."""
        for _ in range(_WARM):
            async with self._box():
                """Not counted."""
        with limits.bare_box() or nullcontext() as box:
            for _ in range(self._extent.rounds):
                if box is not None:
                    bare.append(await asyncio.to_thread(box.once))
                async with self._box() as (sandbox, took):
                    self._ready.append(took)
                    start = time.perf_counter()
                    await sandbox.destroy()
                    ends.append(time.perf_counter() - start)
                start = time.perf_counter()
                async with self._box(ping=False) as (sandbox, _):
                    await _run(sandbox, _ECHO)
                    await sandbox.destroy()
                    cycles.append(time.perf_counter() - start)
        return [
            self._timed("the first create, with all that is made once", [first]),
            self._beside("create, to the first answer", self._ready, bare, _BARE),
            self._beside("create, echo, destroy", cycles, bare, _BARE),
            self._timed("destroy", ends),
        ]

    async def execs(self) -> list[Figure]:
        ours, bare = [], []
        async with self._box() as (sandbox, _):
            await _run(sandbox, _TRUE)
            with limits.bare_process() as process:
                for _ in range(self._extent.execs):
                    bare.append(await asyncio.to_thread(process.once))
                    start = time.perf_counter()
                    await _run(sandbox, _TRUE)
                    ours.append(time.perf_counter() - start)
        return [self._beside("exec of true, in an open sandbox", ours, bare, "posix_spawn of true")]

    async def files(self) -> list[Figure]:
        size = self._extent.file_mb * _MB
        data = os.urandom(_MB) * self._extent.file_mb
        writes, reads, plain_writes, plain_reads = [], [], [], []
        with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
            plain = Path(folder, _FILE)
            async with self._box() as (sandbox, _):
                for _ in range(max(3, self._extent.rounds // 4)):
                    plain_writes.append(await asyncio.to_thread(_timed, lambda: plain.write_bytes(data)))
                    start = time.perf_counter()
                    await sandbox.files.write(_FILE, data)
                    writes.append(time.perf_counter() - start)
                    plain_reads.append(await asyncio.to_thread(_timed, plain.read_bytes))
                    start = time.perf_counter()
                    back = await sandbox.files.read(_FILE)
                    reads.append(time.perf_counter() - start)
                    if back != data:
                        raise ProviderError(f"sandbox {sandbox.id} gave another file back than it was given")
                    plain.unlink()
                    await sandbox.files.remove(_FILE)
        pairs = [("in", writes, plain_writes, "a plain write"), ("out", reads, plain_reads, "a plain read")]
        figures = []
        for way, ours, limit, against in pairs:
            figure = self._beside(f"{self._extent.file_mb} MB {way}", ours, limit, against)
            figure.note = f"{size / _MB / p50(ours):.0f} MB/s"
            figures.append(figure)
        return figures

    async def many(self) -> list[Figure]:
        """Boxes made at once, and what they cost when nobody uses them."""
        count = self._extent.live
        async with self._boxes(count) as (sandboxes, took):
            start = time.perf_counter()
            await asyncio.gather(*(sandbox.ping() for sandbox in sandboxes))
            pinging = time.perf_counter() - start
            members = [await asyncio.to_thread(memory.processes_of, sandbox.id) for sandbox in sandboxes]
            free = memory.available()
            private = [sum(map(memory.private_memory, pids)) for pids in members]
            shared = [sum(map(memory.proportional_memory, pids)) for pids in members]
            start = time.perf_counter()
            await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
            destroying = time.perf_counter() - start
        one = p50(self._ready)
        figures = [
            self._beside(f"{count} creates at once, all answered", [took], [one], "one create"),
            self._timed(f"ping of {count}, all at once", [pinging]),
            self._timed(f"destroy of {count}, all at once", [destroying]),
        ]
        if not all(shared):
            return figures  # they are where this host cannot see them, or may not
        each = p50(shared)
        memories = [
            self._memory("memory of an idle sandbox, its own alone", private),
            self._memory("memory of an idle sandbox, with its part of what it shares", shared),
        ]
        memories[-1].note = f"about {free / each + count:.0f} fit into the {format_size(free)} that are free"
        return [*figures, *memories]

    async def resumes(self, *, save: bool) -> list[Figure]:
        pauses, resumes = [], []
        async with self._box() as (sandbox, _):
            for _ in range(self._extent.rounds):
                start = time.perf_counter()
                await self._manager.pause(sandbox.id, save=save)
                middle = time.perf_counter()
                await self._manager.resume(sandbox.id)
                await sandbox.ping()
                pauses.append(middle - start)
                resumes.append(time.perf_counter() - middle)
        return [
            self._timed("pause, its memory in files" if save else "pause", pauses),
            self._beside(
                f"resume{' from files' if save else ''}, to the first answer", resumes, self._ready, "a create"
            ),
        ]

    async def forks(self, *, with_memory: bool) -> list[Figure]:
        """Boxes with the files of another, or all that runs in it too, one after the other."""
        took = []
        async with self._box() as (sandbox, _):
            for _ in range(max(3, self._extent.rounds // 4)):
                start = time.perf_counter()
                fork = await self._manager.fork(sandbox.id, with_memory=with_memory)
                try:
                    await fork.ping()
                    took.append(time.perf_counter() - start)
                finally:
                    await run_to_end(fork.destroy(volumes=True))
        what = "files and memory" if with_memory else "files"
        return [self._beside(f"fork of its {what}, to the first answer", took, self._ready, "a create")]

    @asynccontextmanager
    async def _box(self, *, ping: bool = True) -> AsyncIterator[tuple[AsyncSandbox, float]]:
        """A sandbox, and the seconds that it took, with `ping` to its first answer."""
        start = time.perf_counter()
        sandbox = await self._manager.create(self._spec, ephemeral=True)
        try:
            if ping:
                await sandbox.ping()
            yield sandbox, time.perf_counter() - start
        finally:
            await run_to_end(sandbox.destroy(volumes=True))

    @asynccontextmanager
    async def _boxes(self, count: int) -> AsyncIterator[tuple[list[AsyncSandbox], float]]:
        """Sandboxes that were made at once, and the seconds until all had answered."""
        made: list[AsyncSandbox] = []

        async def make() -> None:
            sandbox = await self._manager.create(self._spec, ephemeral=True)
            made.append(sandbox)
            await sandbox.ping()

        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(make())
            yield made, time.perf_counter() - start
        finally:
            await run_to_end(_destroy_all(made))

    def _beside(self, what: str, ours: list[float], limit: list[float], against: str) -> Figure:
        if not limit:
            return self._timed(what, ours)
        return ratio(self._spec.provider, what, ours, limit, against=against)

    def _timed(self, what: str, seconds: list[float]) -> Figure:
        value = p50(seconds) * 1e3
        return Figure(case=self._spec.provider, what=what, measured=ms(p50(seconds)), value=value, unit=" ms")

    def _memory(self, what: str, sizes: list[int]) -> Figure:
        value = p50(sizes) / _MB
        return Figure(case=self._spec.provider, what=what, measured=f"{value:.2f} MB", value=value, unit=" MB")


async def _destroy_all(sandboxes: list[AsyncSandbox]) -> None:
    ends = await asyncio.gather(*(each.destroy(volumes=True) for each in sandboxes), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


async def _run(sandbox: AsyncSandbox, command: list[str]) -> None:
    result = await sandbox.exec(command)
    if result.exit_code != 0:
        raise ProviderError(f"{command[0]} ended with code {result.exit_code} in sandbox {sandbox.id}")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
