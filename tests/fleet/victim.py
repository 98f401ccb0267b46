"""A program that starts a fleet and is killed on the way: `python -m fleet.victim FILE POINT OCCURRENCE before|after`.

POINT is one of `manager.victim`, or a phase: then it dies when so many members of it are ready. With any other word it
lives, and tells the phases' states."""

from __future__ import annotations

import asyncio
import sys

from manager.victim import POINTS, Plan, arm, die

from skerry.fleet.events import FleetEvent, MemberReady
from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.manager.manager import AsyncSandboxManager


async def main(file: str, point: str, occurrence: int, after: bool) -> None:
    ready = 0

    def hear(event: FleetEvent) -> None:
        nonlocal ready
        ready += isinstance(event, MemberReady) and event.phase == point
        if ready == occurrence:
            die()

    async with AsyncSandboxManager() as manager:
        fleet = AsyncFleet(manager, load_fleet(file))
        if point in POINTS:
            arm(Plan(point, occurrence, after))
            await fleet.up()
        report = await fleet.up(on_event=hear)
        print(*(phase.state for phase in report.phases.values()))


if __name__ == "__main__":
    _, file, point, occurrence, when = sys.argv
    asyncio.run(main(file, point, int(occurrence), when == "after"))
