"""Many live sandboxes, and the end of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import limit

from skerry import providers
from skerry.agent.guest import users
from skerry.measure.figures import Figure, ms, p50
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings
from .witness import leftovers, open_files

_AT_ONCE = 8


async def many(settings: Settings) -> list[Figure]:
    count = 50 if settings.quick else 1000
    provider = providers.load("local")
    users.allow_many_files()  # each has a stream, and the machine's processes their own
    files_before = open_files()
    sandboxes: list[AsyncSandbox] = []
    try:
        start = time.perf_counter()
        numbers = iter(range(count))
        await asyncio.gather(*(_create_each(numbers, provider, sandboxes) for _ in range(_AT_ONCE)))
        creating = time.perf_counter() - start
        await asyncio.gather(*(sandbox.ping() for sandbox in sandboxes))
        start = time.perf_counter()
        await asyncio.gather(*(sandbox.ping() for sandbox in sandboxes))
        pinging = time.perf_counter() - start
        execs = []
        for sandbox in sandboxes[:: max(1, count // 50)]:
            start = time.perf_counter()
            await sandbox.exec(["/bin/true"])
            execs.append(time.perf_counter() - start)
    finally:
        start = time.perf_counter()
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
        destroying = time.perf_counter() - start
    ids = {sandbox.id for sandbox in sandboxes}
    left = leftovers(ids)
    left["boxes"] = len(ids & set(await provider.discover()))
    left["files"] = max(0, open_files() - files_before)
    await provider.aclose()
    with limit.bare_box() as box:
        bare = p50([box.once() for _ in range(20)])
    return [
        _figure(f"create {count}, {_AT_ONCE} at once", creating, f"{ms(bare)} bwrap true"),
        _figure(f"ping all {count} at once", pinging, at_most=0.2),
        _figure(f"exec /bin/true with {count} live", p50(execs)),
        _figure(f"destroy all {count}", destroying, at_most=4),
        Figure(case="many", what="left behind", measured=_describe(left), value=sum(left.values()), at_most=0),
    ]


def _figure(what: str, seconds: float, limit: str = "", at_most: float | None = None) -> Figure:
    measured = ms(seconds)
    return Figure(case="many", what=what, measured=measured, limit=limit, value=seconds, unit=" s", at_most=at_most)


def _describe(left: dict[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in left.items() if number) or "nothing"


async def _create_each(numbers: Iterator[int], provider: Provider, sandboxes: list[AsyncSandbox]) -> None:
    """One of several that share the work."""
    for _ in numbers:
        sandbox = await AsyncSandbox.create(Spec(), provider)
        sandboxes.append(sandbox)
