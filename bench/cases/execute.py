"""A command through an open sandbox."""

from __future__ import annotations

import asyncio
import subprocess
import time

import limit

from skerry.measure.figures import Figure, p50, ratio
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

_AT_ONCE = 16


async def execute(settings: Settings) -> list[Figure]:
    ours, bare, plain, pings = [], [], [], []
    async with AsyncSandbox(provider="local") as sandbox:
        with limit.bare_process() as process:
            await sandbox.exec(["/bin/true"])
            for _ in range(settings.rounds(600)):
                bare.append(process.once())
                ours.append(await _timed_exec(sandbox))
                start = time.perf_counter()
                await sandbox.ping()
                pings.append(time.perf_counter() - start)
                plain.append(_timed_subprocess())
        total = settings.rounds(800)
        start = time.perf_counter()
        await asyncio.gather(*(_repeat_exec(sandbox, total // _AT_ONCE) for _ in range(_AT_ONCE)))
        rate = total // _AT_ONCE * _AT_ONCE / (time.perf_counter() - start)
    return [
        ratio("exec", "exec /bin/true", ours, bare, against="C posix_spawn", at_most=1.6),
        ratio("exec", "(peer) subprocess.run, no box", plain, bare, against="C posix_spawn"),
        Figure(case="exec", what="ping", measured=f"{p50(pings) * 1e6:.0f} us", value=p50(pings) * 1e6, unit=" us"),
        Figure(case="exec", what=f"execs, {_AT_ONCE} at once", measured=f"{rate:.0f}/s", value=rate, unit="/s"),
    ]


async def _timed_exec(sandbox: AsyncSandbox) -> float:
    start = time.perf_counter()
    result = await sandbox.exec(["/bin/true"])
    took = time.perf_counter() - start
    assert result.ok, result
    return took


def _timed_subprocess() -> float:
    start = time.perf_counter()
    subprocess.run(["/bin/true"], capture_output=True)
    return time.perf_counter() - start


async def _repeat_exec(sandbox: AsyncSandbox, count: int) -> None:
    for _ in range(count):
        await _timed_exec(sandbox)
