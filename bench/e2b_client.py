"""`python e2b_client.py`, in an environment with E2B's SDK: makes a sandbox and runs a first command in it for a line
`one`, does so with N of them at once for a line `many N`, and answers with the seconds that it took."""

from __future__ import annotations

import asyncio
import sys
import time

from e2b import AsyncSandbox, Sandbox

_TIMEOUT_S = 120


def one() -> float:
    start = time.perf_counter()
    sandbox = Sandbox.create(timeout=_TIMEOUT_S)
    said = sandbox.commands.run("echo hello").stdout
    took = time.perf_counter() - start
    assert said == "hello\n", said
    sandbox.kill()
    return took


async def many(count: int) -> float:
    async def life() -> AsyncSandbox:
        sandbox = await AsyncSandbox.create(timeout=_TIMEOUT_S, request_timeout=_TIMEOUT_S)
        assert (await sandbox.commands.run("echo hello", request_timeout=_TIMEOUT_S)).stdout == "hello\n"
        return sandbox

    start = time.perf_counter()
    made = await asyncio.gather(*(life() for _ in range(count)))
    took = time.perf_counter() - start
    await asyncio.gather(*(each.kill() for each in made))
    return took


for line in sys.stdin:
    words = line.split()
    print(one() if words[0] == "one" else asyncio.run(many(int(words[1]))), flush=True)
