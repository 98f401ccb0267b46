"""Others on the same work, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Awaitable, Callable

from skerry.measure.figures import Figure, ms, p50
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

Cycle = Callable[[int], Awaitable[tuple[float, list[float]]]]
"""Create, run `echo` so many times, destroy: gives the seconds of all, and of each echo."""


async def peers(settings: Settings) -> list[Figure]:
    """The same work for each, in turn: a whole life with one command, then many commands in one life."""
    systems: dict[str, Cycle] = {"skerry local": _skerry}
    if importlib.util.find_spec("llm_sandbox"):
        systems["llm-sandbox bubblewrap"] = _llm_sandbox
    cycles: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(settings.rounds(40)):
        for name, cycle in systems.items():
            cycles[name].append((await cycle(1))[0])
    execs = {name: (await cycle(settings.rounds(40)))[1] for name, cycle in systems.items()}
    return [
        Figure(case="peers", what=f"{name}: {what}", measured=ms(p50(times)), value=p50(times) * 1e3, unit=" ms")
        for name in systems
        for what, times in (("create, echo, destroy", cycles[name]), ("echo", execs[name]))
    ]


async def _skerry(count: int) -> tuple[float, list[float]]:
    execs = []
    begin = time.perf_counter()
    async with AsyncSandbox(provider="local") as sandbox:
        for _ in range(count):
            start = time.perf_counter()
            assert (await sandbox.exec("echo hello")).text == "hello\n"
            execs.append(time.perf_counter() - start)
    return time.perf_counter() - begin, execs


async def _llm_sandbox(count: int) -> tuple[float, list[float]]:
    session = importlib.import_module("llm_sandbox.bubblewrap").BubblewrapSession
    execs = []
    begin = time.perf_counter()
    with session(lang="python", skip_environment_setup=True) as box:
        for _ in range(count):
            start = time.perf_counter()
            assert box.execute_command("echo hello").stdout == "hello\n"
            execs.append(time.perf_counter() - start)
    return time.perf_counter() - begin, execs
