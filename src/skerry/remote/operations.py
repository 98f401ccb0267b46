"""Long work of a server: begun, followed with its progress to its end, and cancelled if nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec

from skerry.aio import run_to_end
from skerry.errors import CallInterrupted, SkerryError
from skerry.remote.api import Api, Problem, decoded, error_of

T = TypeVar("T")


class Step(msgspec.Struct, kw_only=True):
    """One thing that an operation tells on its way."""

    seq: int = 0
    message: str = ""
    done: int | None = None
    total: int | None = None
    data: dict[str, Any] | None = None


class Operation(msgspec.Struct):
    """Long work, and how it goes or ended."""

    id: str
    state: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    problem: Problem | None = None

    @property
    def has_ended(self) -> bool:
        return self.state != "running"

    def outcome(self, type: type[T]) -> T:
        """What came of it, also where that is less than was asked for. Raises the error that it ended with."""
        if self.state == "done" or bytes(self.result) != b"null":
            return decoded(self.result, type)
        if self.problem is None:
            raise CallInterrupted(f"operation {self.id} is {self.state}")
        raise error_of(self.problem)


OnStep = Callable[[Step], object]


async def follow(api: Api, beginning: Awaitable[Operation], type: type[T], on_step: OnStep | None = None) -> T:
    """Wait for the end of what was begun, and tell its steps. If the wait is given up, so is the work. Raises what it
    ended with, and StoreUnavailable if the server goes away: the work may go on there."""
    operation = await beginning
    try:
        return (await _to_end(api, operation, on_step)).outcome(type)
    except asyncio.CancelledError:
        with suppress(SkerryError):
            await run_to_end(_cancel(api, operation))
        raise


async def _to_end(api: Api, operation: Operation, on_step: OnStep | None) -> Operation:
    if operation.has_ended:
        return operation
    async with aclosing(api.follow(f"/operations/{operation.id}/events", {"after": 0})) as events:
        async for each in events:
            if each.name == "end":
                return each.read(Operation)
            if on_step is not None:
                on_step(each.read(Step))
    raise AssertionError("what is followed has no end of its own")


async def _cancel(api: Api, operation: Operation) -> None:
    await api.send("POST", f"/operations/{operation.id}/cancel", Operation)
