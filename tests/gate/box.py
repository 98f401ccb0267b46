"""A box as the gate sees it, without an agent: wishes are made by the test, and connections are pairs of sockets."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from skerry.agent.network import AgentNetwork, Open, OpenProxy, Resolve, Warning
from skerry.errors import SkerryError
from skerry.gate.base import Duplex, Policy
from skerry.gate.bounds import Limits
from skerry.gate.dialer import Dialer, SocketDuplex
from skerry.gate.session import Session
from skerry.model.rules import Rules
from skerry.model.spec import SandboxId

ID = SandboxId("sb-0123456789abcdef")
PATIENCE_S = 20.0


class Lines:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.error: SkerryError | None = None
        self._news = asyncio.Event()

    def append(self, kind: str, sandbox: SandboxId | None = None, **facts: Any) -> None:
        if self.error is not None:
            raise self.error
        self.note(kind, sandbox, **facts)

    def note(self, kind: str, sandbox: SandboxId | None = None, **facts: Any) -> None:
        assert sandbox == ID
        self.all.append({"kind": kind, **facts})
        self._news.set()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.all if line["kind"] == kind]

    def reasons(self) -> str:
        """Reasons of all that was refused."""
        return "\n".join(line["reason"] for line in self.of("refuse") + self.of("resolve"))

    async def wait(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of a kind, once there are so many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.of(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.of(kind)


class WasRefused(Exception):
    """The box's connection was reset before anything was sent."""


class Client:
    """A program in the box, with one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(count)

    async def until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """All up to the end, however that comes; then the connection is closed."""
        found = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while piece := await self._reader.read(1 << 16):
                    found += piece
        self.writer.close()
        return bytes(found)

    async def ask(self, data: bytes) -> bytes:
        """Send, and give back all that is answered."""
        with suppress(ConnectionError):
            await self.send(data)
        return await self.rest()


class Box:
    """Stands for AgentNetwork."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        """Ports that a program of the box has."""
        self._wishes: asyncio.Queue[Any] = asyncio.Queue()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._clients: list[Client] = []
        self._pairs: list[socket.socket] = []

    async def wishes(self) -> AsyncIterator[Any]:
        while (wish := await self._wishes.get()) is not None:
            yield wish

    async def resolved(self, wish: int, ports: Collection[int]) -> list[int]:
        self._answers[wish].set_result(set(ports))
        return [port for port in ports if port in self.taken]

    def take(self, wish: int) -> Duplex:
        ours, theirs = socket.socketpair()
        self._answers[wish].set_result(theirs)
        return SocketDuplex(ours)

    async def refuse(self, wish: int) -> None:
        self._answers[wish].set_result(None)

    def end(self) -> None:
        """The agent ends its side."""
        self._wishes.put_nowait(None)

    async def _wish(self, kind: Any, *facts: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._wishes.put_nowait(kind(number, *facts))
        async with asyncio.timeout(PATIENCE_S):
            return await self._answers[number]

    async def resolve(self, name: str) -> set[int]:
        """The ports of a name; none if it does not resolve."""
        return cast("set[int]", await self._wish(Resolve, name))

    async def connect(self, name: str, port: int) -> Client:
        """Connect to a name. Raises WasRefused."""
        return await self._client(await self._wish(Open, name, port))

    async def proxy(self) -> Client:
        """Connect to the proxy. Raises WasRefused."""
        return await self._client(await self._wish(OpenProxy))

    async def _client(self, sock: socket.socket | None) -> Client:
        if sock is None:
            raise WasRefused
        client = Client(*await asyncio.open_unix_connection(sock=sock))
        self._clients.append(client)
        return client

    def warn(self, text: str) -> None:
        self._wishes.put_nowait(Warning(text))

    async def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()
        for answer in self._answers.values():
            if answer.done() and isinstance(answer.result(), socket.socket):
                answer.result().close()
        await asyncio.sleep(0)


def policy(allow: Iterable[str] = (), deny: Iterable[str] = (), **more: Any) -> Policy:
    return Policy(id=ID, rules=Rules.of(allow, deny), **more)


class Sandbox:
    """A session, the box that it serves, and the ledger."""

    def __init__(self, box: Box, session: Session, ledger: Lines, serving: asyncio.Task[None]) -> None:
        self.box = box
        self.session = session
        self.ledger = ledger
        self.serving = serving


async def has_open(session: Session, count: int) -> None:
    """Look again in small steps until a session has so many connections."""
    async with asyncio.timeout(PATIENCE_S):
        while session.connections != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    policy: Policy,
    *,
    answers: Mapping[str, list[str]] | None = None,
    dialer: Dialer | None = None,
    limits: Limits | None = None,
    **more: Any,
) -> AsyncIterator[Sandbox]:
    """A sandbox that is served; at its end nothing is left open. `answers` are what names resolve to."""

    def look_up(name: str) -> list[str]:
        if name not in (answers or {}):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return (answers or {})[name]

    box, ledger = Box(), Lines()
    dialer = dialer or Dialer(look_up)
    session = Session(cast("AgentNetwork", box), policy, dialer=dialer, recorder=ledger, limits=limits, **more)
    task = asyncio.create_task(session.serve())
    try:
        yield Sandbox(box, session, ledger, task)
    finally:
        box.end()
        async with asyncio.timeout(PATIENCE_S):
            await task
        await box.close()
        assert session.connections == 0


class Rerouted(Dialer):
    """A dialer that finds servers of any port at another, so that a test needs no port of the web. All names are at
    127.0.0.1, which the rules of the test have to name."""

    def __init__(self, port: int) -> None:
        super().__init__(lambda name: ["127.0.0.1"])
        self._port = port
        self.dialled: list[tuple[str, int]] = []

    async def dial(self, host: str, addresses: Any, port: int) -> Any:
        self.dialled.append((host, port))
        return await super().dial(host, addresses, self._port)


class Web:
    """A server of HTTP/1 that tells what it was asked."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.bodies.append(await self._body(reader, head.lower()))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                await writer.drain()
                if b"connection: close" in head.lower():
                    writer.write_eof()
                    return

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            return await reader.readuntil(b"0\r\n\r\n")
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        return await reader.readexactly(int(length or 0))
