"""So many machines come up at a time, and one that hangs keeps no other from it."""

from __future__ import annotations

import asyncio

import pytest

from skerry.providers.machine.create import BootLimit


async def most_at_once(limit: BootLimit) -> int:
    now = most = 0

    async def come_up() -> None:
        nonlocal now, most
        async with limit.slot():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    async with asyncio.timeout(10):
        await asyncio.gather(*(come_up() for _ in range(9)))
    return most


async def test_no_more_than_so_many_at_a_time() -> None:
    assert await most_at_once(BootLimit(2, longest_s=60)) == 2


async def test_who_takes_too_long_goes_on_and_the_next_one_begins() -> None:
    limit = BootLimit(1, longest_s=0.01)
    async with limit.slot():
        assert await most_at_once(limit) == 1
    assert await most_at_once(limit) == 1  # its turn was given back once, not twice


async def test_a_turn_that_failed_or_was_never_had_is_not_lost() -> None:
    limit = BootLimit(1, longest_s=60)

    async def fail() -> None:
        async with limit.slot():
            waiting = asyncio.create_task(limit.slot().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await fail()
    assert await most_at_once(limit) == 1
