"""Network of a box with rules, as its agent tells of it: wishes of programs in the box, to be answered one by one. The
agent may lie in all of it: what it says is checked, and the first violation ends the stream."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Collection
from typing import Annotated, Any, Self

import msgspec

from skerry.agent.call import Call
from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import AgentError, PathDenied, printable

_MAX_PORTS = 256
"""Ports that a name may have; an agent takes no answer with more."""
_WINDOW = 1 << 16
_TUNNEL_WINDOW = 1 << 18
_TUNNEL_UP_WINDOW = 1 << 19
_MAX_RECORD = 4096
_MAX_OPEN = 1024
"""Wishes that may be open. An agent has 256 at most, but gives each up after a while, which nobody tells us."""
_OPEN_S = 30.0
_MAX_WARNING = 1000
_MAX_WARNINGS = 64
"""Of one call; an agent gives no more."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_NAME = re.compile(r"(?!\.)[a-z0-9_.-]{1,253}")


class Resolve(msgspec.Struct, frozen=True):
    """A program asks for a name: lower case, no dot at its end, and no more is known of its form."""

    wish: int
    name: str


class Open(msgspec.Struct, frozen=True):
    """A program has connected to a port of a name."""

    wish: int
    name: str
    port: int


class OpenProxy(msgspec.Struct, frozen=True):
    """A program has connected to the HTTP proxy; its bytes say what it wants."""

    wish: int


class Warning(msgspec.Struct, frozen=True):
    """Something that the agent cannot do for the box, such as a port that a program of the box has."""

    text: str


Wish = Resolve | Open | OpenProxy | Warning


class _Record(msgspec.Struct):
    """Any record of the agent, as the wire has it."""

    ready: bool = False
    resolve: _Number | None = None
    open: _Number | None = None
    name: str | None = None
    port: int | None = None
    proxy: bool = False
    warning: str | None = None


class _Resolved(msgspec.Struct):
    taken: list[int] = []


_decode = msgspec.json.Decoder(_Record).decode


class _Visit(AsyncTunnel):
    """A connection of a program in the box."""

    async def write(self, data: bytes) -> None:
        """Send to the program. Raises BrokenPipeError once it is gone, so that nothing more is fetched for it."""
        if self._call.done:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        await super().write(data)


class AgentNetwork:
    """The network of one box. Each wish is answered once, by `resolved`, `take` or `refuse`; a wish that is not
    answered in 30 s the agent refuses."""

    def __init__(self, client: AgentClient, call: Call) -> None:
        self._client = client
        self._call = call
        self._records = self._read_records()
        self._last = -1
        self._warnings = 0
        self._open: dict[int, float] = {}
        """Wishes that have no answer, by when they came."""

    @classmethod
    async def open(cls, client: AgentClient, timeout_s: float = CONTROL_TIMEOUT_S) -> Self:
        """Take over the network of a box; who had it before has it no more. Raises AgentError if the box was not made
        for it, or its agent does not answer in time; Unsupported for an agent that is not the box's first process."""
        network = cls(client, client.open("network", window=_WINDOW))
        try:
            async with asyncio.timeout(timeout_s):
                first = await anext(network._records)
        except PathDenied as error:
            raise AgentError(str(error)) from error
        except TimeoutError:
            network.close()
            raise AgentError(f"the agent has not taken over the network of its box within {timeout_s:g} s") from None
        except BaseException:
            network.close()
            raise
        if not first.ready:
            raise client.violated("its network begins without being ready")
        return network

    async def wishes(self) -> AsyncIterator[Wish]:
        """Yield what programs of the box wish for, as it comes; whoever does not answer gets no end of them. Never ends
        but by an error: CallInterrupted when another took the network over, AgentUnreachable or AgentProtocolError."""
        async for record in self._records:
            yield self._checked(record)

    async def resolved(self, wish: int, ports: Collection[int]) -> list[int]:
        """Say on which ports a name may be reached, at most the first 256; with none there is no such name. Gives back
        those that a program of the box has at all addresses: if there are any, the name does not exist either."""
        self._open.pop(wish, None)
        answer = await self._client.call(
            "resolved", {"wish": wish, "ports": sorted(ports)[:_MAX_PORTS]}, type=_Resolved
        )
        if not set(answer.taken).issubset(ports):
            raise self._client.violated("a port is taken that nobody asked for")
        return sorted(set(answer.taken))

    def take(self, wish: int) -> AsyncTunnel:
        """Take a connection: bytes of the program in the box are read from it, and written to it. `close` resets
        it, as a broken connection, unless `close_write` came before: then all that was written is delivered. Whatever
        fails is raised by `read`, with PathNotFound where the program is gone already."""
        self._open.pop(wish, None)
        call = self._client.open("take", {"wish": wish}, window=_TUNNEL_WINDOW, up_window=_TUNNEL_UP_WINDOW)
        return _Visit(call)

    async def refuse(self, wish: int) -> None:
        """Reset a connection that was wished for, or let the question for a name fail."""
        self._open.pop(wish, None)
        await self._client.call("refuse", {"wish": wish}, type=dict[str, Any])

    def close(self) -> None:
        """Let go of the network: all connections out of the box end, and nothing more gets out. The stream stays."""
        self._call.abandon()

    async def _read_records(self) -> AsyncIterator[_Record]:
        rest = b""
        async for _, data in self._call.chunks():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if len(line) > _MAX_RECORD:
                    break
                try:
                    yield _decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise self._client.violated(f"a record has the wrong form: {error}") from None
            if len(rest) > _MAX_RECORD or any(len(line) > _MAX_RECORD for line in lines):
                raise self._client.violated("a record is too long")
        raise self._client.violated("it ended its network by itself")

    def _checked(self, record: _Record) -> Wish:
        if record.warning is not None:
            self._warnings += 1
            if self._warnings > _MAX_WARNINGS:
                raise self._client.violated("it warns without end")
            return Warning(printable(record.warning[:_MAX_WARNING]))
        if record.resolve is not None:
            return Resolve(self._number(record.resolve), self._name(record))
        if record.open is None:
            raise self._client.violated("a record is no wish")
        wish = self._number(record.open)
        if record.proxy:
            return OpenProxy(wish)
        if record.port is None or not 0 < record.port < 65536:
            raise self._client.violated("a wish has no port")
        return Open(wish, self._name(record), record.port)

    def _name(self, record: _Record) -> str:
        if record.name is None or not _NAME.fullmatch(record.name):
            raise self._client.violated("a wish has no name")
        return record.name

    def _number(self, wish: int) -> int:
        """Note a wish that has come, and give up old ones."""
        if wish <= self._last:
            raise self._client.violated("the number of a wish comes again")
        self._last = wish
        now = asyncio.get_running_loop().time()
        self._open[wish] = now
        if len(self._open) > _MAX_OPEN:
            self._open = {each: came for each, came in self._open.items() if came > now - _OPEN_S}
            if len(self._open) > _MAX_OPEN:
                raise self._client.violated("it wishes for too much at once")
        return wish
