"""Many processes that use one registry at the same moment. `python -m tests.manager.racers SCENARIO FOLDER COUNT`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from skerry.config import AdmissionSettings
from skerry.errors import HostFull, LimitReached
from skerry.host import room
from skerry.manager.manager import AsyncSandboxManager

from .world import Folders, config_of

LIMIT = 7
BOOTS = 3
SHARE = 64 << 20
SHARES = 9
"""Boxes of so much memory are promised as much as there may be."""
_ENOUGH = (SHARES * SHARE + SHARE // 2) / (room.look("/").memory_bytes or 1)
_BOUND = AdmissionSettings(overcommit=_ENOUGH, wait_s=0.0)


async def pass_the_limit(manager: AsyncSandboxManager) -> Any:
    """Make more than there may be, and end some of one's own, over and over."""
    mine: list[str] = []
    refused = 0
    for _ in range(6):
        try:
            mine.append((await manager.create()).id)
        except LimitReached:
            refused += 1
        if len(mine) > 1:
            await manager.destroy(mine.pop())
    return {"mine": mine, "refused": refused}


async def pass_the_promise(manager: AsyncSandboxManager) -> Any:
    """Make more at once than the host's memory was told to be enough for."""
    made: list[str] = []

    async def create() -> None:
        with suppress(HostFull):
            made.append((await manager.create(memory=SHARE)).id)

    await asyncio.gather(*(create() for _ in range(4)))
    return {"made": made, "refused": 4 - len(made)}


async def pass_the_real_promise(manager: AsyncSandboxManager) -> Any:
    return await pass_the_promise(manager)


async def ask_by_one_key(manager: AsyncSandboxManager) -> Any:
    made = await asyncio.gather(*(manager.create(key="the one") for _ in range(3)))
    return sorted({sandbox.id for sandbox in made})


async def destroy_the_same(manager: AsyncSandboxManager) -> Any:
    records = await manager.list()
    random.shuffle(records)
    await asyncio.gather(*(manager.destroy(record.id) for record in records))
    return [outcome.id for outcome in await manager.destroy_all() if outcome.error is not None]


async def boot_at_once(manager: AsyncSandboxManager) -> Any:
    return [(await manager.create()).id for _ in range(2)]


async def do_anything(manager: AsyncSandboxManager) -> Any:
    """Make, destroy and reconcile against each other; the end is for the test to judge."""
    for _ in range(4):
        sandbox = await manager.create()
        await manager.reconcile()
        await manager.destroy(sandbox.id)
    kept = await manager.create()
    await manager.reconcile()
    return kept.id


SCENARIOS: dict[str, tuple[Callable[[AsyncSandboxManager], Awaitable[Any]], dict[str, Any]]] = {
    each.__name__: (each, settings)
    for each, settings in (
        (pass_the_limit, {"max_sandboxes": LIMIT}),
        (pass_the_promise, {"admission": _BOUND}),
        (pass_the_real_promise, {"provider": "local", "providers": {"local": {"zygote": "off"}}, "admission": _BOUND}),
        (ask_by_one_key, {}),
        (destroy_the_same, {}),
        (boot_at_once, {"max_boots": BOOTS}),
        (do_anything, {}),
    )
}


async def race(scenario: str, folder: Path) -> Any:
    work, settings = SCENARIOS[scenario]
    config = config_of(folder, **{"provider": "folders", **settings})
    boxes = Folders(folder / "boxes", boot_s=0.005)
    boxes.takes_memory_here = True
    async with AsyncSandboxManager(config, providers={"folders": boxes}) as manager:
        return await work(manager)


def main(scenario: str, folder: str, count: str) -> None:
    ready, go = os.pipe()
    results = []
    for _ in range(int(count)):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(go)
            os.read(ready, 1)  # until all are there
            with open(writing, "w") as out:
                try:
                    json.dump({"result": asyncio.run(race(scenario, Path(folder)))}, out)
                except BaseException:
                    json.dump({"error": traceback.format_exc()}, out)
            os._exit(0)
        os.close(writing)
        results.append(reading)
    os.close(go)
    answers = []
    for reading in results:
        with open(reading) as answer:
            answers.append(json.loads(answer.read()))
        os.wait()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
