"""Network of a box with rules: names and connections that its programs ask for, each told to the host as a wish. The
host decides; nothing here does."""

from __future__ import annotations

import _socket
import errno
import posix
from _collections import deque
from _functools import partial  # type: ignore[import-not-found]

from . import wire
from .channel import Call, Failure, failure_of
from .loop import Timer, ignore_errors
from .resolver import FAILED, FINE, NO_NAME, Resolver
from .tunnel import Listener, PortTunnel, reset

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent
    from .resolver import Reply

_PROXY = ("127.200.0.1", 3128)
_NET = (127 << 24) + (200 << 16)
_FIRST_HOST, _LAST_HOST = 2, (1 << 16) - 2
_MAX_NAMES = 1024
_MAX_WISHES = 256
_MAX_VISITORS = 192  # of them: names can always be asked for
_MAX_CONNECTIONS = 512
_MAX_LISTENERS = 2048
_MANY_FILES = 1 << 16
_MAX_ASKING = 64
_MAX_PORTS = 256
_MAX_WARNINGS = 64
_WISH_S = 30
_UP_WINDOW = 1 << 19  # of each connection: there may be many, and their programs slow
_SYSCTL = "net.ipv4.ip_unprivileged_port_start=0"
_ENDED = Failure("cancelled", "the network of this box has ended")
_REPLACED = Failure("cancelled", "another call has taken over the network of this box")


class Name:
    """Name with an address of its own, and what listens there."""

    def __init__(self, text: str, address: str) -> None:
        self.text = text
        self.address = address
        self.listeners: dict[int, Listener] = {}

    def close(self, port: int) -> None:
        self.listeners.pop(port).close()


class Names:
    """Names that have an address, the one that was used last at the end. They outlive a `network` call, so that an
    address never leads to another name than it did."""

    def __init__(self) -> None:
        self.known: dict[str, Name] = {}
        self._last = _FIRST_HOST - 1

    def use(self, text: str) -> Name:
        """Find a name, or give it the address that has been free for longest."""
        name = self.known.pop(text, None)
        if name is None:
            if len(self.known) >= _MAX_NAMES:
                self.forget(next(iter(self.known)))
            name = Name(text, self._free_address())
        self.known[text] = name
        return name

    def forget(self, text: str) -> None:
        name = self.known.pop(text, None)
        if name is not None:
            self.close(name)

    def close(self, name: Name) -> None:
        for port in list(name.listeners):
            name.close(port)

    def close_all(self) -> None:
        for name in self.known.values():
            self.close(name)

    def make_room(self, most: int, for_whom: Name) -> bool:
        """Close listeners of the names that were used least, until there is room for one; False if there is none."""
        count = sum(len(name.listeners) for name in self.known.values())
        for name in self.known.values():
            if count < most:
                break
            if name is not for_whom:
                count -= len(name.listeners)
                self.close(name)
        return count < most

    def _free_address(self) -> str:
        taken = {name.address for name in self.known.values()}
        while True:
            self._last = self._last + 1 if self._last < _LAST_HOST else _FIRST_HOST
            address = _socket.inet_ntoa((_NET + self._last).to_bytes(4, "big"))
            if address not in taken:
                return address


class Lookup:
    """Wish to know a name, and all who asked for it meanwhile."""

    def __init__(self, name: str, reply: Reply) -> None:
        self.name = name
        self.replies = [reply]

    def answer(self, code: int, address: str | None = None) -> None:
        for reply in self.replies:
            reply(code, address)


class Visitor:
    """Wish for a connection, of a program that has connected to us and waits; told as `record` when it is its turn."""

    def __init__(self, connection: _socket.socket, record: dict[str, Any]) -> None:
        self.connection = connection
        self.record = record
        self.number: int | None = None


class Network:
    """All that is open for one `network` call: it ends with that."""

    def __init__(self, agent: Agent, call: Call) -> None:
        """Raises Failure if the port of the resolver cannot be had."""
        before: Network | None = agent.network
        if before is not None:
            before.end(_REPLACED)
        self.agent = agent
        self.loop = agent.loop
        self.call = call
        self.names: Names = Names() if before is None else before.names
        self.is_open = True
        most = _descriptors()
        self._max_listeners = min(_MAX_LISTENERS, most // 4)
        self._max_connections = min(_MAX_CONNECTIONS, most // 2)
        self._last_wish: int = 0 if before is None else before._last_wish
        self._wishes: dict[int, tuple[float, Lookup | Visitor]] = {}
        self._lookups: dict[str, int] = {}
        self._queue: dict[Visitor, None] = {}  # those whose turn has not come
        self._tunnels: set[PortTunnel] = set()
        self._waiting: deque[bytes] = deque()  # records that the host has no room for yet
        self._warned: set[str] = set()
        self._proxy: Listener | None = None
        self._expiry: Timer | None = None
        try:
            self._resolver = Resolver(agent.loop, self._look_up)
        except OSError as error:
            raise _no_resolver(error) from None
        agent.network = self
        call.pump = self._on_credit
        call.on_cancel = self._on_cancel
        call.on_close = self.end
        self._tell({"ready": True})
        try:
            self._proxy = Listener(self.loop, _PROXY, partial(self._visit, {"proxy": True}))
        except OSError as error:
            self._warn(f"the HTTP proxy cannot listen at {_PROXY[0]}:{_PROXY[1]}: {error.strerror}")

    def end(self, why: Failure | None = None) -> None:
        """Close all of it: whoever connects from now on is refused by the kernel."""
        if not self.is_open:
            return
        self.is_open = False
        for visitor in list(self._queue):
            self._dismiss(visitor)
        for number in list(self._wishes):
            self.refuse(number)
        self._resolver.close()
        if self._proxy is not None:
            self._proxy.close()
        self.names.close_all()
        for tunnel in list(self._tunnels):
            tunnel.break_off(_ENDED)
        self._waiting.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        if why is not None:
            self.call.fail(why)

    def _on_cancel(self) -> None:
        self.end()
        self.call.answer({})

    # wishes

    def _wish(self, wish: Lookup | Visitor, record: dict[str, Any], kind: str) -> int | None:
        """Tell the host of a wish; None if there are too many."""
        if len(self._wishes) >= _MAX_WISHES or len(self._waiting) >= _MAX_WISHES:
            return None
        self._last_wish += 1
        self._wishes[self._last_wish] = (self.loop.now() + _WISH_S, wish)
        if self._expiry is None:
            self._expiry = self.loop.later(_WISH_S, self._expire)
        self._tell({kind: self._last_wish, **record})
        return self._last_wish

    def _look_up(self, name: str, reply: Reply) -> None:
        number = self._lookups.get(name)
        if number is None:
            number = self._wish(Lookup(name, reply), {"name": name}, "resolve")
            if number is None:
                reply(FAILED, None)
            else:
                self._lookups[name] = number
            return
        lookup = self._wishes[number][1]
        assert isinstance(lookup, Lookup)
        if len(lookup.replies) < _MAX_ASKING:
            lookup.replies.append(reply)
        else:
            reply(FAILED, None)

    def _visit(self, record: dict[str, Any], connection: _socket.socket) -> None:
        if len(self._queue) + self._visitors() + len(self._tunnels) >= self._max_connections:
            self._warn(f"there are more than {self._max_connections} connections at once")
            reset(connection)
            return
        visitor = Visitor(connection, record)
        self._queue[visitor] = None
        self.loop.watch(connection.fileno(), 0, lambda _events: self._dismiss(visitor))  # it is gone
        self._call_next()

    def _visitors(self) -> int:
        """Count of the connections that the host has been told of and has not answered."""
        return len(self._wishes) - len(self._lookups)

    def _call_next(self) -> None:
        """Tell the host of those who wait, as far as it goes."""
        while self._queue and self._visitors() < _MAX_VISITORS:
            visitor = next(iter(self._queue))
            visitor.number = self._wish(visitor, visitor.record, "open")
            if visitor.number is None:
                return
            del self._queue[visitor]

    def _dismiss(self, visitor: Visitor) -> None:
        if visitor.number is not None:
            self.refuse(visitor.number)
        elif visitor in self._queue:
            del self._queue[visitor]
            self.loop.forget(visitor.connection.fileno())
            reset(visitor.connection)

    def take_out(self, number: object) -> Lookup | Visitor | None:
        """Take a wish that is being answered out of those that are open; None if it is not among them any more."""
        entry = self._wishes.pop(number, None) if type(number) is int else None
        wish = None if entry is None else entry[1]
        if isinstance(wish, Lookup):
            del self._lookups[wish.name]
        elif wish is not None:
            self.loop.forget(wish.connection.fileno())
        if self.is_open:
            self._call_next()
        return wish

    def refuse(self, number: object) -> None:
        wish = self.take_out(number)
        if isinstance(wish, Lookup):
            wish.answer(FAILED)
        elif wish is not None:
            reset(wish.connection)

    def resolve(self, number: object, ports: set[int]) -> list[int]:
        """Answer who asked for a name. Ports that a program of the box has at all addresses are given back: whoever
        connected there would reach that program, so that the name does not exist."""
        wish = self.take_out(number)
        if not isinstance(wish, Lookup):
            if wish is not None:
                reset(wish.connection)
            return []
        taken: list[int] = []
        if ports:
            name = self.names.use(wish.name)
            taken = self._listen(name, ports)
            if not taken:
                wish.answer(FINE, name.address)
                return []
        self.names.forget(wish.name)
        wish.answer(NO_NAME)
        return taken

    def take(self, number: object, call: Call) -> None:
        wish = self.take_out(number)
        if not isinstance(wish, Visitor):
            if wish is not None:
                wish.answer(FAILED)
            raise Failure("not_found", "the program that asked for this connection is gone")
        call.up_window = _UP_WINDOW
        ignore_errors(wish.connection.setsockopt, _socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._tunnels.add(PortTunnel(self.agent, call, wish.connection, self._tunnels.discard))

    def _expire(self) -> None:
        """Refuse what the host has not answered in time; wishes are in the order of their ends."""
        now = self.loop.now()
        self._expiry = None
        for number, (end, _) in list(self._wishes.items()):
            if end > now:
                self._expiry = self.loop.later(end - now, self._expire)
                return
            self.refuse(number)

    # names

    def _listen(self, name: Name, ports: set[int]) -> list[int]:
        """Listen on these ports alone, and give back those that a program has."""
        taken: list[int] = []
        for port in set(name.listeners) - ports:
            name.close(port)
        for port in sorted(ports - set(name.listeners)):
            try:
                if not self.names.make_room(self._max_listeners, name):
                    raise OSError(errno.EMFILE, "there are too many ports")
                on_connection = partial(self._connect, name, port)
                name.listeners[port] = Listener(self.loop, (name.address, port), on_connection)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    taken.append(port)
                else:
                    self._warn(f"no name can be reached on port {port}: {_why_not(error, port)}")
        return taken

    def _connect(self, name: Name, port: int, connection: _socket.socket) -> None:
        self.names.use(name.text)
        self._visit({"name": name.text, "port": port}, connection)

    # records

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            self._tell({"warning": text})

    def _tell(self, record: dict[str, Any]) -> None:
        self._waiting.append(wire.encode(record))
        self._pump()

    def _on_credit(self) -> None:
        self._pump()
        self._call_next()

    def _pump(self) -> None:
        while self._waiting and self.call.room() > 0:
            room, record = self.call.room(), self._waiting.popleft()
            self.call.send(record[:room])
            if len(record) > room:
                self._waiting.appendleft(record[room:])


def _descriptors() -> int:
    """Count of the descriptors that we may have open."""
    count = posix.sysconf("SC_OPEN_MAX")
    return count if 0 < count < _MANY_FILES else _MANY_FILES


def _no_resolver(error: OSError) -> Failure:
    if error.errno == errno.EACCES:
        return Failure("denied", f"this box was not made for rules: port 53 needs {_SYSCTL} in its network namespace")
    if error.errno == errno.EADDRINUSE:
        reason = "a program of the box has port 53 of 127.0.0.1, where its resolver belongs: end that"
        return Failure("denied", f"{reason} (it is open to all by {_SYSCTL})")
    return failure_of(error)


def _why_not(error: OSError, port: int) -> str:
    if error.errno == errno.EACCES and port < 1024:
        return f"it needs {_SYSCTL} in the network namespace of the box"
    return str(error.strerror)


def _network_of(agent: Agent, call: Call) -> Network:
    current: Network | None = agent.network
    if current is None or not current.is_open or current.call.channel is not call.channel:
        raise Failure("not_found", "no network call is open on this stream")
    return current


def network(agent: Agent, call: Call) -> None:
    if posix.getpid() != 1:
        raise Failure("unsupported", "only the first process of a box, which is its agent, can have its network")
    Network(agent, call)


def resolved(agent: Agent, call: Call) -> None:
    ports = call.params.get("ports")
    if type(ports) is not list or not all(type(port) is int and 0 < port < 65536 for port in ports):
        raise Failure("invalid", "ports is a list of numbers from 1 to 65535")
    if len(ports) > _MAX_PORTS:
        raise Failure("invalid", f"a name has at most {_MAX_PORTS} ports")
    call.answer({"taken": _network_of(agent, call).resolve(call.params.get("wish"), set(ports))})


def take(agent: Agent, call: Call) -> None:
    _network_of(agent, call).take(call.params.get("wish"), call)


def refuse(agent: Agent, call: Call) -> None:
    _network_of(agent, call).refuse(call.params.get("wish"))
    call.answer({})
