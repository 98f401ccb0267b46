"""Dialling for boxes: a name is resolved here, each of its addresses checked, and one of those connected to."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from skerry.gate.base import Late, Policy, Refused, Unreachable
from skerry.gate.decide import address_of, check_address
from skerry.model.rules import Address
from skerry.model.spec import SandboxId

Lookup = Callable[[str], Sequence[str]]
"""Addresses of a name, in the order to be tried; it blocks. Raises OSError."""

_LOOKUP_S = 5.0
_FRESH_S = 10.0
_MOST_KEPT = 1024
_MOST_LOOKUPS = 256
_LOOKUPS_OF_ONE = 16
"""Names that are looked up at once for one sandbox: a server of names that never answers holds no more threads."""
_MOST_ADDRESSES = 16
_RESERVED = 256
"""Descriptors for all else: streams to agents, the registry, the ledger, name servers."""
_MANY = 1 << 16
_DIAL_S = 10.0
_ATTEMPT_S = 2.0
"""Time for one address while there are others."""
_CHUNK = 1 << 18
_SOMEBODY_ELSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation, which no machine has."""


class SocketDuplex:
    """A connection on a socket, which it owns. One may read while another writes; whoever waits when it is closed
    gets an error."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_flooded = False

    async def read(self) -> bytes:
        if self._is_flooded:  # what is always there to be received would keep the loop
            await asyncio.sleep(0)
        self._is_flooded = True
        while True:
            with suppress(BlockingIOError, InterruptedError):
                return self._sock.recv(_CHUNK)
            self._is_flooded = False
            waiter = self._reader = self._loop.create_future()
            self._loop.add_reader(self._fd, _wake, waiter)
            try:
                await waiter
            finally:
                if self._reader is waiter:  # else another came before we were cancelled, or it is closed
                    self._reader = None
                    self._loop.remove_reader(self._fd)

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            with suppress(BlockingIOError, InterruptedError):
                left = left[self._sock.send(left) :]
                continue
            waiter = self._writer = self._loop.create_future()
            self._loop.add_writer(self._fd, _wake, waiter)
            try:
                await waiter
            finally:
                if self._writer is waiter:  # else another came before we were cancelled, or it is closed
                    self._writer = None
                    self._loop.remove_writer(self._fd)

    async def close_write(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        for waiter, remove in ((self._reader, self._loop.remove_reader), (self._writer, self._loop.remove_writer)):
            if waiter is not None:
                remove(self._fd)
                if not waiter.done():
                    waiter.set_exception(ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed"))
        self._reader = self._writer = None
        self._sock.close()


class Dialer:
    """Resolves and dials for all sandboxes of the process."""

    def __init__(self, lookup: Lookup | None = None, is_own: Callable[[Address], bool] | None = None) -> None:
        self._lookup = lookup or look_up
        self.is_own = is_own or is_own_address
        """Whether an address is one of this machine."""
        self.links = 0
        """Connections of all sandboxes, open or being opened."""
        self._most_links = max(_RESERVED, _descriptors() - _RESERVED)
        self._kept: dict[str, tuple[float, tuple[Address, ...]]] = {}
        self._pending: dict[str, asyncio.Future[tuple[Address, ...]]] = {}
        self._lookups: Counter[SandboxId] = Counter()

    @property
    def room(self) -> int:
        """Connections that there is room for. A sandbox that has as many may have no more, so that there always is some
        room for one that has fewer."""
        return self._most_links - self.links

    async def find(self, policy: Policy, host: str, port: int) -> tuple[Address, ...]:
        """The addresses of a host, each of which may be connected to. Raises Refused if one of them may not be, or
        there is none."""
        addresses = await self.resolve(policy, host)
        for address in addresses:
            check_address(policy, host, port, address, self.is_own)
        return addresses

    async def dial(self, host: str, addresses: Sequence[Address], port: int) -> tuple[SocketDuplex, Address]:
        """Connect to the first of some addresses that answers. Raises Unreachable."""
        failure: OSError | None = None
        try:
            async with asyncio.timeout(_DIAL_S):
                for address in addresses:
                    is_last = address is addresses[-1]
                    try:
                        async with asyncio.timeout(None if is_last else _ATTEMPT_S):
                            return await _connect(address, port), address
                    except OSError as error:
                        failure = error
        except TimeoutError as error:
            failure = error
        if isinstance(failure, TimeoutError):
            raise Late(f"{host} did not answer on port {port}") from failure
        reason = "it has no address" if failure is None else os.strerror(failure.errno or errno.EIO)
        raise Unreachable(f"{host} cannot be reached on port {port}: {reason}") from failure

    async def resolve(self, policy: Policy, host: str) -> tuple[Address, ...]:
        """The addresses of a host, unchecked. Raises Refused, also if it has none."""
        address = address_of(host)
        if address is not None:
            return (address,)
        if known := policy.hosts.get(host):
            return _addresses(known)
        kept = self._kept.get(host)
        if kept is not None and asyncio.get_running_loop().time() < kept[0]:
            return kept[1]
        try:
            async with asyncio.timeout(_LOOKUP_S):
                return await asyncio.shield(self._pending.get(host) or self._begin(policy.id, host))
        except TimeoutError as error:
            raise Late(f"nobody told in {_LOOKUP_S:g} s where {host} is") from error
        except OSError as error:
            raise Unreachable(f"{host} cannot be resolved: {error.strerror or error}") from error

    def _begin(self, id: SandboxId, host: str) -> asyncio.Future[tuple[Address, ...]]:
        """Look a name up, in a thread that nobody waits for when the process ends."""
        if self._lookups[id] >= _LOOKUPS_OF_ONE or self._lookups.total() >= _MOST_LOOKUPS:
            raise Refused(f"too many names are being looked up at once; {host} was not")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[Address, ...]] = loop.create_future()

        def settle(answer: tuple[Address, ...] | Exception) -> None:
            del self._pending[host]
            self._lookups[id] -= 1
            if not self._lookups[id]:
                del self._lookups[id]
            if isinstance(answer, Exception):
                found.set_exception(answer)
                found.exception()  # whoever asked may have given up
                return
            found.set_result(answer)
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept.pop(host, None)
            self._kept[host] = (loop.time() + _FRESH_S, answer)

        def run() -> None:
            answer: tuple[Address, ...] | Exception
            try:
                answer = _addresses(self._lookup(host))
            except OSError as error:
                answer = error
            except Exception:  # such as of codecs, for a name that is none
                answer = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, answer)

        self._pending[host] = found
        self._lookups[id] += 1
        threading.Thread(target=run, name="skerry-lookup", daemon=True).start()
        return found


def _descriptors() -> int:
    """Count of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else min(soft, _MANY)


def look_up(name: str) -> Sequence[str]:
    """Addresses of a name as this machine knows them."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for *_, address in found]


def is_own_address(address: Address) -> bool:
    """Whether an address is one of this machine, so that it leads to services of its own: those can be bound to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    if not _can_bind(family, str(address)):
        return False
    if not _can_bind(family, _SOMEBODY_ELSES[family]):
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # all can be bound to here: net.ipv4.ip_nonlocal_bind
        try:
            sock.connect((str(address), 9))
        except OSError:
            return False
        return bool(sock.getsockname()[0] == str(address))


def _can_bind(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
    return True


def _addresses(texts: Sequence[str]) -> tuple[Address, ...]:
    """The first of some addresses, without doubles; one with the zone of a link is an error of the name."""
    found = {address_of(text): None for text in texts}
    if None in found:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return tuple(address for address in found if address is not None)[:_MOST_ADDRESSES]


async def _connect(address: Address, port: int) -> SocketDuplex:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return SocketDuplex(sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
