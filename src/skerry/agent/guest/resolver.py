"""Resolver of a box with rules: takes DNS questions at 127.0.0.1:53, by UDP and TCP, and answers what it is told to."""

from __future__ import annotations

import _socket
from _functools import partial  # type: ignore[import-not-found]

from .loop import READ, Loop, ignore_errors
from .tunnel import Listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Reply = Callable[[int, "str | None"], None]
    """Answer a question, with a code and, if the name has one, its address."""
    Ask = Callable[[str, Reply], None]
    """Find out what a name is worth, and reply once that is known."""

FINE, MALFORMED, FAILED, NO_NAME, NOT_DONE, REFUSED, BAD_VERSION = 0, 1, 2, 3, 4, 5, 16
ADDRESS = ("127.0.0.1", 53)
_DATAGRAM = _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
_A, _OPT, _IN = 1, 41, 1
_HEADER_BYTES = 12
_LABEL_BYTES, _NAME_BYTES = 63, 255
_IS_ANSWER, _OPCODE, _RECURSION = 0x80, 0x78, 0x01
_NAME_OF_QUESTION = b"\xc0\x0c"
_TTL_S = 1
_UDP_BYTES = 1232
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_MAX_QUESTION = 4096
_AT_ONCE = 64
_MAX_CLIENTS = 32
_CLIENT_S = 60


class Question:
    """One question: its name, in lower case and without a dot at its end, its kind, and how it is answered. One that
    cannot be looked up has its answer's code at once."""

    def __init__(self, data: bytes) -> None:
        """Read a message of twelve bytes or more, which is no answer."""
        self.name = ""
        self.kind = 0
        self.code: int | None = None
        self._head = data[:2] + bytes([_IS_ANSWER | data[2] & (_OPCODE | _RECURSION)])
        self._section = b""  # as it was asked, letter by letter
        self._has_edns = False
        try:
            self._read(data)
        except (IndexError, ValueError):
            self.code = MALFORMED

    def _read(self, data: bytes) -> None:
        if data[2] & _OPCODE:
            self.code = NOT_DONE
            return
        counts = [_number(data, at) for at in (4, 6, 8, 10)]
        if counts[:3] != [1, 0, 0] or counts[3] > 1:
            raise ValueError("not one question")
        labels, at = _read_name(data, _HEADER_BYTES)
        self.kind, family = _number(data, at), _number(data, at + 2)
        end = at + 4
        version = 0
        if counts[3]:
            version, end = _read_edns(data, end)
            self._has_edns = True
        if end != len(data):
            raise ValueError("more than a question")
        self._section = data[_HEADER_BYTES : at + 4]
        self.name = b".".join(labels).lower().decode("latin-1")
        if version:
            self.code = BAD_VERSION
        elif family != _IN:
            self.code = REFUSED
        elif not all(_LETTERS.issuperset(label.lower()) for label in labels):
            self.code = NO_NAME
        elif not labels:
            self.code = FINE

    def answer(self, code: int, address: str | None = None) -> bytes:
        """Encode the answer; without an address, or to a question for another thing than that, it has nothing in it."""
        record = b""
        if code == FINE and address is not None and self.kind == _A:
            record = _NAME_OF_QUESTION + _record(_A, _IN, _TTL_S, _socket.inet_aton(address))
        edns = b"\0" + _record(_OPT, _UDP_BYTES, code >> 4 << 24, b"") if self._has_edns else b""
        counts = (bool(self._section), bool(record), False, bool(edns))
        head = self._head + bytes([_IS_ANSWER | code & 0xF])
        return head + b"".join(int(count).to_bytes(2, "big") for count in counts) + self._section + record + edns


def _number(data: bytes | bytearray, at: int) -> int:
    """Read two bytes. Raises IndexError."""
    return data[at] << 8 | data[at + 1]


def _read_name(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Read the labels of a name, and where it ends. One that points elsewhere, as answers do, is none. Raises
    IndexError or ValueError."""
    labels: list[bytes] = []
    begin = at
    while data[at]:
        end = at + 1 + data[at]
        if data[at] > _LABEL_BYTES or end - begin >= _NAME_BYTES:
            raise ValueError("a name is too long")
        labels.append(data[at + 1 : end])
        at = end
    return labels, at + 1


def _read_edns(data: bytes, at: int) -> tuple[int, int]:
    """Read the version of the extension that a client knows, and where it ends. Raises IndexError or ValueError."""
    if data[at] or _number(data, at + 1) != _OPT:
        raise ValueError("another thing than an extension")
    return data[at + 6], at + 11 + _number(data, at + 9)


def _record(kind: int, family: int, ttl: int, data: bytes) -> bytes:
    numbers = ((kind, 2), (family, 2), (ttl, 4), (len(data), 2))
    return b"".join(number.to_bytes(size, "big") for number, size in numbers) + data


class Resolver:
    """The two sockets, and the clients that are being answered."""

    def __init__(self, loop: Loop, ask: Ask) -> None:
        """Raises OSError if the port cannot be had."""
        self._loop = loop
        self._ask = ask
        self._clients: set[_TcpClient] = set()
        self._udp = _socket.socket(_socket.AF_INET, _DATAGRAM)
        try:
            self._udp.bind(ADDRESS)
            self._tcp = Listener(loop, ADDRESS, self._on_client)
        except OSError:
            self._udp.close()
            raise
        loop.watch(self._udp.fileno(), READ, self._on_datagrams)

    def close(self) -> None:
        self._loop.forget(self._udp.fileno())
        self._udp.close()
        self._tcp.close()
        for client in list(self._clients):
            client.close()

    def serve(self, data: bytes, send: Callable[[bytes], None]) -> bool:
        """Answer a question, sooner or later; False for what is none and gets no answer."""
        if len(data) < _HEADER_BYTES or data[2] & _IS_ANSWER:  # two that answer answers would never end
            return False
        question = Question(data)
        if question.code is not None:
            send(question.answer(question.code))
        elif f".{question.name}".endswith(".localhost"):
            send(question.answer(FINE, "127.0.0.1"))
        elif question.name.endswith((".in-addr.arpa", ".ip6.arpa")):
            send(question.answer(NO_NAME))
        else:
            self._ask(question.name, lambda code, address: send(question.answer(code, address)))
        return True

    def _on_datagrams(self, _events: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, sender = self._udp.recvfrom(_MAX_QUESTION)
            except OSError:
                return
            self.serve(data, partial(self._send, sender))

    def _send(self, to: tuple[str, int], answer: bytes) -> None:
        ignore_errors(self._udp.sendto, answer, to)  # it is asked again, if anybody still wants to know

    def _on_client(self, socket: _socket.socket) -> None:
        client = _TcpClient(self, self._loop, socket, self._clients)
        if len(self._clients) > _MAX_CLIENTS:
            client.close()


class _TcpClient:
    """Connection on which questions come one after the other, each with its length before it."""

    def __init__(self, resolver: Resolver, loop: Loop, socket: _socket.socket, among: set[_TcpClient]) -> None:
        self._resolver = resolver
        self._loop = loop
        self._socket = socket
        self._among = among
        self._came = bytearray()
        self._is_asking = False
        among.add(self)
        loop.watch(socket.fileno(), READ, self._on_ready)
        self._end = loop.later(_CLIENT_S, self.close)

    def close(self) -> None:
        if self in self._among:
            self._among.discard(self)
            self._end.cancel()
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def _on_ready(self, _events: int) -> None:
        try:
            data = self._socket.recv(_MAX_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._came += data
        if not data or len(self._came) > 2 * _MAX_QUESTION:
            self.close()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Serve the next question that is whole, once the one before has its answer."""
        while not self._is_asking and len(self._came) >= 2:
            size = _number(self._came, 0)
            if size > _MAX_QUESTION:
                self.close()
            if size > len(self._came) - 2 or self not in self._among:
                return
            data = bytes(self._came[2 : 2 + size])
            del self._came[: 2 + size]
            self._is_asking = True
            if not self._resolver.serve(data, self._send):
                self.close()

    def _send(self, answer: bytes) -> None:
        if self not in self._among:
            return
        self._is_asking = False
        data = len(answer).to_bytes(2, "big") + answer
        try:
            is_whole = self._socket.send(data) == len(data)
        except OSError:
            is_whole = False
        if is_whole:
            self._loop.soon(self._go_on)
        else:
            self.close()  # it asks, and takes no answers
