"""The same work in our box and in a raw container of one engine, in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from raw_engine import RawEngine, started

from skerry import providers
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

T = TypeVar("T")
WARM_UP = 2
"""The first rounds fill caches on both sides."""


class Sides(NamedTuple):
    """Seconds of each round."""

    ours: list[float]
    raw: list[float]


class Bench(NamedTuple):
    engine: RawEngine
    provider: Provider
    runtime: str = ""

    def spec(self, image: str) -> Spec:
        return Spec(provider=self.provider.name, image=image, runtime=self.runtime or None)

    @asynccontextmanager
    async def pair(self, image: str) -> AsyncIterator[tuple[AsyncSandbox, str]]:
        """A sandbox of ours and the id of a raw container, of one image."""
        container = self.engine.run(image, self.runtime)
        try:
            sandbox = await AsyncSandbox.create(self.spec(image), self.provider)
            try:
                yield sandbox, container
            finally:
                await sandbox.destroy(volumes=True)
        finally:
            self.engine.remove(container)


@asynccontextmanager
async def bench(name: str, *images: str, runtime: str = "") -> AsyncIterator[Bench]:
    with started(name, *images) as engine, tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        provider = providers.load(name, {"host": engine.address, "state_dir": folder})
        try:
            yield Bench(engine, provider, runtime)
        finally:
            await provider.aclose()


async def creates(bench: Bench, image: str, rounds: int) -> Sides:
    """Ours to the first answered ping, theirs until start is answered."""
    ours, raw = [], []
    for _ in range(rounds + WARM_UP):
        took, container = timed(lambda: bench.engine.run(image, bench.runtime))
        raw.append(took)
        bench.engine.remove(container)
        start = time.perf_counter()
        sandbox = await AsyncSandbox.create(bench.spec(image), bench.provider)
        try:
            await sandbox.ping()
            ours.append(time.perf_counter() - start)
        finally:
            await sandbox.destroy(volumes=True)
    return Sides(ours[WARM_UP:], raw[WARM_UP:])


async def execs(bench: Bench, image: str, rounds: int) -> Sides:
    """`true` to its exit code; ten of ours for one of theirs, as it is so much quicker."""
    ours, raw = [], []
    async with bench.pair(image) as (sandbox, container):
        for _ in range(rounds + WARM_UP):
            raw.append(timed(lambda: bench.engine.exec(container, ["/bin/true"]))[0])
            for _ in range(10):
                start = time.perf_counter()
                result = await sandbox.exec(["/bin/true"])
                ours.append(time.perf_counter() - start)
                assert result.ok, result
    return Sides(ours[10 * WARM_UP :], raw[WARM_UP:])


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
