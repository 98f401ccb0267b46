"""Watches of folders in a sandbox, as a user holds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

from skerry.agent.call import Call
from skerry.errors import AgentProtocolError, CallTimeout
from skerry.model.results import FileEvent
from skerry.sandbox.connection import Connect
from skerry.sandbox.entries import Event, records

_EVENTS_S = 30.0
_MOST_EVENTS = 4097
_MOST_LETTERS = _MOST_EVENTS << 13


class AsyncWatch:
    """Changes as they happen. Leaving the `with` ends it."""

    def __init__(self, call: Call, events: AsyncIterator[Event]) -> None:
        self._call = call
        self._events = events

    @classmethod
    async def begin(cls, call: Call) -> Self:
        """Wait until the kernel watches, so that nothing that happens after is missed."""
        events = records(call, Event)
        try:
            async with asyncio.timeout(30):
                await anext(events)
        except StopAsyncIteration:
            raise AgentProtocolError("the agent ended a watch before it began. Destroy this sandbox") from None
        except BaseException as error:
            call.abandon()
            if isinstance(error, TimeoutError):
                raise CallTimeout("the agent did not begin to watch within 30 s") from None
            raise
        return cls(call, events)

    async def __aiter__(self) -> AsyncIterator[FileEvent]:
        async for event in self._events:
            yield event.event_of()

    async def close(self) -> None:
        """Stop watching."""
        self._call.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncKeptWatch:
    """A watch that the agent keeps, by a number, when nobody listens: ask it what has happened."""

    def __init__(self, connect: Connect, number: int) -> None:
        self.number = number
        self._connect = connect

    async def events(self) -> list[FileEvent]:
        """All that has happened since the last time, up to this moment. Raises NotFound if it has ended."""
        call = (await self._connect()).open("watch_events", {"watch": self.number})
        found: list[FileEvent] = []
        letters = 0
        try:
            async for event in records(call.within(_EVENTS_S), Event):
                found.append(event.event_of())
                letters += len(found[-1].path)
                if len(found) > _MOST_EVENTS or letters > _MOST_LETTERS:
                    raise AgentProtocolError("the agent told of more than it keeps. Destroy this sandbox")
            await call.result(dict[str, Any])
        finally:
            call.abandon()
        return found

    async def end(self) -> None:
        """Watch no longer. Raises NotFound if it has ended."""
        await (await self._connect()).call("unwatch", {"watch": self.number}, type=dict[str, Any])
