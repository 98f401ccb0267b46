"""Interpreters that remember: the first run from a warm pool, and the next ones beside the kernel's own time."""

from __future__ import annotations

import time

from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.pool.pool import AsyncSandboxPool
from skerry.sandbox.interpreter import AsyncInterpreter

from .settings import Settings

_FIRST_MS = 60.0
_NEXT_MS = 5.0
_OWN = "import time as _t; _b = _t.perf_counter(); eval(compile('1+1', 'x', 'eval')); print(_t.perf_counter() - _b)"


async def interpreter(settings: Settings) -> list[Figure]:
    firsts, nexts, own, commands = [], [], [], []
    async with (
        AsyncSandboxManager() as manager,
        AsyncSandboxPool(manager, size=2, provider="local", interpreters=["python"]) as pool,
    ):
        for _ in range(settings.rounds(20)):
            await pool.wait_for_full(60)
            start = time.perf_counter()
            sandbox = await pool.acquire()
            context = await sandbox.interpreter()
            await _sum(context)
            firsts.append(time.perf_counter() - start)
            for _ in range(settings.rounds(20)):
                nexts.append(await _sum(context))
                own.append(float((await context.run(_OWN)).stdout))
                start = time.perf_counter()
                await sandbox.exec(["/bin/true"])
                commands.append(time.perf_counter() - start)
            await sandbox.destroy()
    beyond = (p50(nexts) - p50(own)) * 1e3
    first = p50(firsts) * 1e3
    return [
        Figure(case="interpreter", what="acquire and first 1+1, warm pool", measured=ms(p50(firsts)),
               value=first, unit=" ms", at_most=_FIRST_MS),
        Figure(case="interpreter", what="next 1+1, beyond the kernel's own time", measured=ms(p50(nexts)),
               value=beyond, unit=" ms", at_most=_NEXT_MS),
        ratio("interpreter", "next 1+1", nexts, commands, against="exec /bin/true"),
    ]  # fmt: skip


async def _sum(context: AsyncInterpreter) -> float:
    start = time.perf_counter()
    done = await context.run("1+1")
    took = time.perf_counter() - start
    assert done.text == "2", done
    return took
