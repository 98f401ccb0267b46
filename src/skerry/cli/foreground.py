"""Commands that work until they are told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Work to its end, or until a signal asks for it; either way it cleans up first. The exit code."""
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # the next one does not disturb the cleaning up
            ended_by.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return 128 + ended_by[0]
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)
    return 0
