"""The first bytes of a client: what protocol it speaks, and which host it means by its own words."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from skerry.gate.base import Refused
from skerry.gate.decide import address_of, shown
from skerry.model.rules import WEB_PORTS, normal_name

MOST = 16 * 1024
"""Bytes of a greeting that is looked at."""
_ALERT, _HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 21, 22, 1, 0, 0
_TLS_RECORDS = range(20, 25)
_RECORD_HEAD, _MESSAGE_HEAD = 5, 4
_MAJOR = 3
_MOST_MAJOR = 16
"""Below it is what the servers of Go let pass as the version of a first record."""
_TEXT = re.compile(rb"[\t\r\x20-\xff]*|[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t].*")
"""A line of text, or one that begins as requests do: many servers take those with any byte in them."""
_REQUEST = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]+(?:[^ \t].*[ \t])?HTTP/\d", re.IGNORECASE)
_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", b"CONNECT ", b"PRI ")
_HTTP_2 = re.compile(rb"PRI[ \t]+\*[ \t]+HTTP/2", re.IGNORECASE)
_OLD_REQUEST = re.compile(rb"GET[ \t]", re.IGNORECASE)
"""A request of HTTP/0.9, which names no host."""


class Kind(Enum):
    TLS = "TLS"
    HTTP = "HTTP"
    LINE = "line"
    """Text that does not begin as requests do; lenient servers may take it for one, once its line has ended."""
    OTHER = "other"


class _Missing(Exception):
    """More bytes are needed."""


class _Bytes:
    """Fields of a message, one after the other. Raises Refused at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise Refused("it begins as TLS does, and is not")
        self._at += count
        return data

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        """Bytes behind their own length."""
        return self.take(self.number(size))

    def __bool__(self) -> bool:
        return self._at < len(self._data)


class Found(NamedTuple):
    kind: Kind
    server_name: str | None = None


def look(data: bytes, port: int) -> Found | None:
    """Tell what the first bytes of a client are; None while more are needed. Raises Refused for what could be used to
    mean another host than is seen."""
    try:
        if data[:1] and data[0] in _TLS_RECORDS and (len(data) < 2 or data[1] < _MOST_MAJOR):
            return Found(Kind.TLS, _server_name(_hello(data))) if _is_greeting(data, port) else Found(Kind.OTHER)
        if port in WEB_PORTS and data[:1] >= b"\x80":
            if len(data) < 3:
                return None
            if data[2] == _CLIENT_HELLO:
                raise Refused("a TLS greeting of old, which names no host")
        return Found(_text_kind(data, port))
    except _Missing:
        if len(data) >= MOST:
            raise Refused(f"its first {MOST} bytes do not say what host it means") from None
        return None


def check_server_name(found: Found, host: str, port: int) -> None:
    """Raise Refused if a client greets another host than was asked for."""
    name = found.server_name
    if name is None:
        if port == 443 and address_of(host) is None:
            raise Refused(f"the TLS greeting names no host; it has to name {host}")
        return
    try:
        is_same = name.isascii() and normal_name(name) == host
    except ValueError:
        is_same = False
    if not is_same:
        raise Refused(f"the TLS greeting names {shown(name)}, and {host} was asked for")


def _is_greeting(data: bytes, port: int) -> bool:
    """Whether a record is one of a ClientHello. Raises _Missing, and Refused for what lenient servers skip or take for
    that."""
    if len(data) < 2:
        raise _Missing
    if data[0] == _HANDSHAKE and data[1] == _MAJOR:
        return True
    if port not in WEB_PORTS:
        if data[0] not in (_ALERT, _HANDSHAKE):
            return False
        if len(data) <= _RECORD_HEAD:
            raise _Missing
        if (data[0] == _ALERT and data[3:5] != b"\0\2") or (data[0] == _HANDSHAKE and data[5] != _CLIENT_HELLO):
            return False
    raise Refused("it begins as TLS does, and not with a greeting")


def _text_kind(data: bytes, port: int) -> Kind:
    """Tell a request of HTTP from all else, by what the most lenient server would take for one. It takes a time that
    grows with the bytes alone: a box may send many."""
    begun = data.lstrip()
    line, newline, _ = begun.partition(b"\n")
    if not _TEXT.fullmatch(line):
        return Kind.OTHER
    if not newline:
        if port in WEB_PORTS or any(method.startswith(begun[: len(method)]) for method in _METHODS if begun):
            raise _Missing
        return Kind.LINE if len(begun) < MOST else Kind.OTHER
    if _HTTP_2.match(line):
        if port in WEB_PORTS:
            raise Refused("HTTP/2 without TLS does not say at its beginning what host it means; use HTTP/1.1")
        return Kind.OTHER
    if _REQUEST.match(line) or (port in WEB_PORTS and _OLD_REQUEST.match(line)):
        return Kind.HTTP
    return Kind.OTHER


def _hello(data: bytes) -> bytes:
    """The content of a ClientHello that may lie in several records. Raises _Missing or Refused."""
    message, at = b"", 0
    while len(message) < _MESSAGE_HEAD or len(message) < _MESSAGE_HEAD + int.from_bytes(message[1:4], "big"):
        head = data[at : at + _RECORD_HEAD]
        if len(head) < _RECORD_HEAD:
            raise _Missing
        size = int.from_bytes(head[3:], "big")
        if head[0] != _HANDSHAKE or head[1] != _MAJOR or not size:
            raise Refused("it begins as TLS does, and is not")
        piece = data[at + _RECORD_HEAD : at + _RECORD_HEAD + size]
        message += piece
        if message and message[0] != _CLIENT_HELLO:
            raise Refused("it begins as TLS does, and not with a greeting")
        if len(piece) < size:
            raise _Missing
        at += _RECORD_HEAD + size
    return message[_MESSAGE_HEAD : _MESSAGE_HEAD + int.from_bytes(message[1:4], "big")]


def _server_name(hello: bytes) -> str | None:
    """The host that a ClientHello names. Raises Refused for one that names several, or is malformed."""
    fields = _Bytes(hello)
    fields.take(2 + 32)  # version, random
    fields.block(1)  # session
    fields.block(2)  # ciphers
    fields.block(1)  # compression
    extensions = _Bytes(fields.block(2) if fields else b"")
    names: list[bytes] = []
    while extensions:
        kind, content = extensions.number(2), _Bytes(extensions.block(2))
        if kind == _SERVER_NAME:
            entries = _Bytes(content.block(2))
            while entries:
                if entries.number(1) != _HOST_NAME:
                    raise Refused("the TLS greeting names something that is no host")
                names.append(entries.block(2))
    if len(names) > 1:
        raise Refused("the TLS greeting names more than one host")
    return names[0].decode("latin-1") if names else None
