"""Lines of the ledger: their form and their hashes."""

from __future__ import annotations

import os
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

NO_HASH = "0" * 64
"""Hash before the first line of all."""
MAX_LINE = 1 << 16
HEADERS = ("begin", "rotate")
"""Kinds of the first line of a file: of the first file of all or one that nobody rotated, and of any other."""
TORN = "torn"
"""Kind of the line that closes off what a program left that died while it wrote."""
_SEAL = len(f',"hash":"{NO_HASH}"}}')
_NEAR, _FAR = 1 << 12, 4 * MAX_LINE
"""Bytes of a file in which its last line is looked for: most are short."""


class Who(msgspec.Struct, frozen=True, omit_defaults=True):
    """Program that wrote a line, and for whom it did what the line tells."""

    uid: int
    tool: str
    """cli, mcp, gate, forwarder; `api` is a program that uses skerry as a library."""
    pid: int
    actor: str = ""
    """Whoever asked a server for it: `token:ID` or `uid:NUMBER`."""
    tenant: str = ""


class Actor(NamedTuple):
    """Whoever a server works for at this moment."""

    name: str
    tenant: str = ""


ACTOR: ContextVar[Actor | None] = ContextVar("skerry-actor", default=None)


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was done, or decided."""

    seq: int
    time: float
    """Seconds since 1970, by the wall clock; the order is that of `seq`."""
    kind: str
    sandbox: str | None = None
    who: Who
    facts: dict[str, Any] = {}
    prev: str
    """Hash of the line before."""
    hash: str = ""


class Tail(NamedTuple):
    """End of the chain in a file."""

    seq: int = 0
    hash: str = NO_HASH
    rest: bytes = b""
    """Bytes after the last whole line: somebody died while writing them."""
    newline: bytes = b""
    """The newline, if it is missing at the end."""


_encode = msgspec.json.Encoder(enc_hook=str).encode
_decode = msgspec.json.Decoder(Line).decode


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def seal(line: Line) -> tuple[bytes, str]:
    """The bytes of a line, with the hash of all of it at its end, and that hash."""
    body = _body(line)
    if len(body) > MAX_LINE - _SEAL:
        body = _body(msgspec.structs.replace(line, facts=_shortened(line.facts)))
    if len(body) > MAX_LINE - _SEAL:
        body = _body(msgspec.structs.replace(line, facts={"left_out": "more than a line holds"}))
    hash = digest(body)
    return b'%b,"hash":"%b"}\n' % (body[:-1], hash.encode()), hash


def _body(line: Line) -> bytes:
    try:
        return _encode(line)
    except UnicodeEncodeError:  # names of files are bytes, and not always text
        return _encode(msgspec.structs.replace(line, facts=_as_text(line.facts)))


def unseal(raw: bytes) -> Line:
    """The line of some bytes without their newline. Raises ValueError if it is none, or was changed."""
    if digest(raw[:-_SEAL] + b"}").encode() != raw[-66:-2] or raw[-_SEAL:-66] != b',"hash":"' or raw[-2:] != b'"}':
        raise ValueError("its hash does not fit its content")
    return _decode(raw)


def claimed(raw: bytes) -> tuple[int, str] | None:
    """Number and hash that a line has which may have been changed; None if it is no line at all."""
    try:
        line = _decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return line.seq, line.hash


def read_tail(fd: int, size: int) -> Tail | None:
    """The end of the chain in a file of that size; None if there is no whole line near its end."""
    return _read_tail(fd, size, _NEAR) or _read_tail(fd, size, _FAR)


def _read_tail(fd: int, size: int, most: int) -> Tail | None:
    at = max(0, size - most)
    data = os.pread(fd, size - at, at)
    if at:
        data = data[data.find(b"\n") + 1 :]
    newline = b"" if data.endswith(b"\n") or not data else b"\n"
    end = len(data) - (not newline)
    while end > 0:
        begin = data.rfind(b"\n", 0, end) + 1
        try:
            line = unseal(data[begin:end])
        except (msgspec.DecodeError, ValueError, RecursionError):
            end = begin - 1
            continue
        return Tail(line.seq, line.hash, data[end + 1 :], newline)
    return None if at else Tail(rest=data, newline=newline)


def read_number(fd: int) -> int | None:
    """Number of the file among all, as its first line has it; None if that cannot be read."""
    try:
        number = unseal(os.pread(fd, MAX_LINE, 0).partition(b"\n")[0]).facts["file"]
    except (msgspec.DecodeError, ValueError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value


def _shortened(value: Any) -> Any:
    """Facts with long texts cut and long lists ended early."""
    if isinstance(value, str) and len(value) > 512:
        return f"{value[:512]}... ({len(value)} characters)"
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in list(value.items())[:64]}
    if isinstance(value, list | tuple):
        more = [f"... ({len(value)} in all)"] if len(value) > 32 else []
        return [*map(_shortened, value[:32]), *more]
    return value
