"""One connection of a box, from what it asks for to its end: decided, dialled, written down, looked into, carried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from skerry.aio import end
from skerry.errors import SkerryError
from skerry.gate.base import Duplex, Late, Members, Meter, Opener, Policy, Recorder, Refused, Unreachable
from skerry.gate.bounds import Limits, Pace
from skerry.gate.decide import check_address, is_member, rule_for
from skerry.gate.dialer import Dialer
from skerry.gate.http1 import Reader, Request, exchange
from skerry.gate.inspect import Kind, check_server_name, look
from skerry.gate.proxy import Join, serve_requests
from skerry.gate.relay import Ahead, Turns, both, carry, last_word, pump
from skerry.model.rules import WEB_PORTS, Address

_MEMBER_S = 10.0
_UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
"""Alert of TLS, by which a client learns that it may not mean that host."""
_log = logging.getLogger("skerry.gate")


class Shared:
    """What all connections of one sandbox share."""

    def __init__(
        self,
        policy: Policy,
        dialer: Dialer,
        recorder: Recorder,
        opener: Opener | None,
        members: Members | None,
        limits: Limits,
    ) -> None:
        self.policy = policy
        self.dialer = dialer
        self.recorder = recorder
        self.opener = opener
        self.members = members
        self.limits = limits
        self.turns = Turns()
        self.pace = None if policy.egress is None else Pace(policy.egress)
        """What holds all that it sends; None if nothing does."""


class Out:
    """A connection that was dialled: it counts its bytes, takes turns with others of its sandbox, sends at the pace of
    that, and writes its end down."""

    def __init__(self, inner: Duplex, link: Link, address: Address | None) -> None:
        self._inner = inner
        self._link = link
        self.address = address
        self._up, self._down = link.meter.up, link.meter.down
        self._since = link.moved_at = asyncio.get_running_loop().time()
        self._is_open = True

    async def read(self) -> bytes:
        await self._link.shared.turns.mine()
        data = await self._inner.read()
        self._link.meter.down += len(data)
        self._count(len(data))
        return data

    async def write(self, data: bytes) -> None:
        pace = self._link.shared.pace
        if pace is None:
            await self._send(data)
            return
        for piece in pace.pieces(data):
            await pace.wait(piece)
            await self._send(piece)

    async def _send(self, data: bytes) -> None:
        await self._link.shared.turns.mine()
        await self._inner.write(data)
        self._link.meter.up += len(data)
        self._count(len(data))

    async def close_write(self) -> None:
        await self._inner.close_write()

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        link, facts = self._link, dict[str, Any]()
        if link.meter.secrets:
            facts["secrets"] = sorted(link.meter.secrets)
        if link.why is not None:
            facts["reason"] = link.why
        up, down = link.meter.up - self._up, link.meter.down - self._down
        seconds = round(asyncio.get_running_loop().time() - self._since, 3)
        try:
            link.note("close", up=up, down=down, seconds=seconds, **facts)
        finally:
            await self._inner.close()

    def _count(self, moved: int) -> None:
        self._link.moved_at = asyncio.get_running_loop().time()
        self._link.shared.turns.count(moved)


class Link:
    """A connection of a box."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.meter = Meter()
        self.host = ""
        self.port = 0
        self.is_opened = False
        """Whether requests on it are changed on their way, so that it depends on secrets."""
        self.moved_at = asyncio.get_running_loop().time()
        self.why: str | None = None
        """Reason for which we end it."""
        self.client: Duplex | None = None
        """The box's side, once it was taken."""
        self._task: asyncio.Task[None] | None = None
        self._outs: list[Out] = []

    def begin(self, work: asyncio.Task[None]) -> None:
        self._task = work

    def end(self, why: str) -> None:
        """End it, for a reason of ours."""
        if self.why is None and self._task is not None:
            self.why = why
            self._task.cancel()

    def append(self, kind: str, **facts: Any) -> None:
        """Write down what became of it."""
        self.shared.recorder.append(kind, self.shared.policy.id, name=self.host, port=self.port, **facts)

    def note(self, kind: str, **facts: Any) -> None:
        """Write down what is over, whether there is room or not."""
        self.shared.recorder.note(kind, self.shared.policy.id, name=self.host, port=self.port, **facts)

    def check(self, policy: Policy) -> str:
        """The rule by which it is allowed, with all that it is connected to. Raises Refused."""
        rule = rule_for(policy, self.host, self.port)
        for out in self._outs:
            self._check_address(policy, out.address)
        return rule

    def _check_address(self, policy: Policy, address: Address | None) -> None:
        if address is not None:
            check_address(policy, self.host, self.port, address, self.shared.dialer.is_own)
        elif not is_member(policy, self.host, self.port):
            raise Refused(f"{self.host} is no member that may be reached on port {self.port}")

    async def open(self, host: str, port: int) -> Join:
        """Decide on a host and connect to it, or be ready to where its requests are changed. Raises Refused."""
        self._decide(host, port)
        return self._serve_opened if self.is_opened else partial(self._join, await self._dial())

    async def ask(self, host: str, port: int, request: Request, client: Reader) -> None:
        """Send one request to a host, and its answer back. Raises Refused."""
        self._decide(host, port)
        if self.is_opened:
            await self._serve_opened(_OneRequest(request, client))
        else:
            await exchange(request, client, Reader(await self._dial()))

    async def close(self) -> None:
        """Close all that was dialled."""
        for out in self._outs:
            await out.close()

    def _decide(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        policy, opener = self.shared.policy, self.shared.opener
        self.check(policy)
        self.is_opened = opener is not None and not is_member(policy, host, port) and opener.is_for(policy, host, port)

    async def _dial(self) -> Out:
        """Connect to the host, by the rules as they are once there is a connection. Raises Refused."""
        policy, host, port = self.shared.policy, self.host, self.port
        self.check(policy)
        address: Address | None = None
        inner: Duplex
        if is_member(policy, host, port):
            inner, member = await self._dial_member(policy)
            where = {"member": member}
        else:
            addresses = await self.shared.dialer.find(policy, host, port)
            inner, address = await self.shared.dialer.dial(host, addresses, port)
            where = {"address": str(address)}
        try:
            rule = self.check(self.shared.policy)
            self._check_address(self.shared.policy, address)
            try:
                self.append("connect", **where, rule=rule)
            except (SkerryError, OSError) as error:
                raise Refused(f"the ledger takes no line, and without one nothing goes out: {error}") from error
        except BaseException:
            await inner.close()
            raise
        out = Out(inner, self, address)
        self._outs.append(out)
        return out

    async def _dial_member(self, policy: Policy) -> tuple[Duplex, str]:
        if self.shared.members is None:
            raise Unreachable(f"no other member can be reached, {self.host} neither")
        try:
            async with asyncio.timeout(_MEMBER_S):
                return await self.shared.members.dial(policy, self.host, self.port)
        except TimeoutError as error:
            raise Late(f"{self.host} did not answer on port {self.port}") from error
        except (SkerryError, OSError) as error:
            raise Unreachable(f"{self.host} cannot be reached on port {self.port}: {error}") from error

    async def _serve_opened(self, client: Duplex) -> None:
        opener, policy = self.shared.opener, self.shared.policy
        assert opener is not None
        first = await self._first_bytes(client, is_due=True)
        if first:
            meter = Meter(secrets=self.meter.secrets)  # bytes are counted where they are dialled
            await opener.serve(policy, self.host, self.port, Ahead(client, first), self._dial, meter)

    async def _join(self, server: Out, client: Duplex) -> None:
        """Carry bytes both ways. The server may speak first; what the client begins with has to mean the host, unless
        that is a member. Raises Refused."""
        if server.address is None:
            await carry(client, server)
            return
        hearing = asyncio.create_task(server.read())
        speaking = asyncio.create_task(self._greeting(client))
        try:
            await asyncio.wait((hearing, speaking), return_when=asyncio.FIRST_COMPLETED)
            if speaking.done() and not hearing.done() and speaking.result()[0] is Kind.HTTP:
                requests, answers = Reader(client, speaking.result()[1]), Reader(server, ahead=hearing)
                try:
                    await serve_requests(self.host, self.port, requests, answers, self.shared.limits.first_bytes_s)
                finally:
                    await answers.close()
            else:
                await both(self._up(speaking, client, server), pump(Ahead(server, reading=hearing), client))
        finally:
            await end(hearing, speaking)

    async def _greeting(self, client: Duplex) -> tuple[Kind, bytes]:
        """The first bytes of a client, and what they are. Raises Refused if they mean another host."""
        data = await self._first_bytes(client, is_due=self.port in WEB_PORTS)
        if not data:
            return Kind.OTHER, b""
        with self._patience():
            async with asyncio.timeout(self.shared.limits.first_bytes_s):
                while (found := look(data, self.port)) is None:
                    more = await client.read()
                    if not more and self.port in WEB_PORTS:
                        raise Refused("it ended before it had said what host it means")
                    if not more:
                        return Kind.OTHER, data
                    data += more
        if found.kind is Kind.TLS:
            try:
                check_server_name(found, self.host, self.port)
            except Refused:
                await last_word(client, _UNRECOGNIZED_NAME)
                raise
        return found.kind, data

    async def _up(self, speaking: asyncio.Task[tuple[Kind, bytes]], client: Duplex, server: Duplex) -> None:
        """Carry what a client says. Of a line that is not whole the pieces are let through; its end is not, if that
        makes it a request. Raises Refused."""
        kind, line = await speaking
        data = line
        while kind is Kind.LINE:
            await server.write(data)
            data = await client.read()
            line += data
            if not data:
                kind = Kind.OTHER
            elif (found := look(line, self.port)) is not None:
                kind = found.kind
        if kind is Kind.HTTP:
            raise Refused("a request of HTTP in pieces, or to a server that spoke first")
        if data:
            await server.write(data)
        await pump(client, server)

    async def _first_bytes(self, client: Duplex, *, is_due: bool) -> bytes:
        """What a client begins with; where clients speak first, that is due in time."""
        with self._patience():
            async with asyncio.timeout(self.shared.limits.first_bytes_s if is_due else None):
                return await client.read()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Turn the end of our patience into Refused."""
        try:
            yield
        except TimeoutError as error:
            if error.errno is not None:  # the connection's own
                raise
            raise Refused(f"the client did not say in {self.shared.limits.first_bytes_s:g} s what it wants") from None


class _OneRequest:
    """A client of which one request is seen, and nothing after it."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self._request = request
        self._client = reader.source
        self._head = request.encode()
        self._pieces = reader.pieces(request.body)
        self._is_over = asyncio.Event()

    async def read(self) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        async for piece in self._pieces:
            return piece
        await self._is_over.wait()  # its end would say that nobody waits for the answer
        return b""

    async def write(self, data: bytes) -> None:
        self._request.is_answered = True
        await self._client.write(data)

    async def close_write(self) -> None:
        await self._client.close_write()

    async def close(self) -> None:
        self._is_over.set()
