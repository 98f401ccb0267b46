"""Extended attributes as ext4 keeps them: in the inode where they fit, else in a block of their own."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from skerry.errors import InvalidSpec

_MAGIC = 0xEA020000
_PREFIXES = {"user.": 1, "security.": 6}
_ENTRY = struct.Struct("<BBHIII")
_HEADER = 32
_WORD = 0xFFFFFFFF


def packed(attributes: Mapping[str, bytes], inside: int, block: int) -> tuple[bytes, bytes]:
    """What goes into the inode, which has `inside` bytes for it, and into a block; one of them is empty."""
    if not attributes:
        return b"", b""
    named = sorted((*_split(name), value) for name, value in attributes.items())
    named.sort(key=lambda each: (each[0], len(each[1]), each[1]))
    body = _body(named, inside - 4, 0)
    if body is not None:
        return struct.pack("<I", _MAGIC) + body, b""
    body = _body(named, block - _HEADER, _HEADER)
    if body is None:
        raise InvalidSpec("the image has a file with more extended attributes than ext4 keeps")
    whole = 0
    for _, name, value in named:
        whole = (whole << 16 ^ whole >> 16 ^ _hash(name, value)) & _WORD
    return b"", struct.pack("<IIIII12x", _MAGIC, 1, 1, whole, 0) + body


def _split(name: str) -> tuple[int, bytes]:
    prefix = next(each for each in _PREFIXES if name.startswith(each))
    return _PREFIXES[prefix], name.removeprefix(prefix).encode()


def _hash(name: bytes, value: bytes) -> int:
    found = 0
    for letter in name:
        found = (found << 5 ^ found >> 27 ^ letter) & _WORD
    padded = value + bytes(-len(value) % 4)
    for (word,) in struct.iter_unpack("<I", padded):
        found = (found << 16 ^ found >> 16 ^ word) & _WORD
    return found


def _body(named: list[tuple[int, bytes, bytes]], room: int, before: int) -> bytes | None:
    """Entries from the front, their values from the back; values are found from where the entries begin, or from the
    beginning of their block."""
    entries, end = [], room
    values = bytearray(room)
    for index, name, value in named:
        if len(name) > 255:
            return None
        end -= len(value) + -len(value) % 4
        place = max(end, 0) + before if value else 0
        entry = _ENTRY.pack(len(name), index, place, 0, len(value), _hash(name, value)) + name
        entries.append(entry + bytes(-len(entry) % 4))
        if sum(map(len, entries)) + 4 > end:
            return None
        values[end : end + len(value)] = value
    head = b"".join(entries)
    values[: len(head)] = head
    return bytes(values)
