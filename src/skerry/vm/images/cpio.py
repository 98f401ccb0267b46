"""Archives of the form that a kernel unpacks into its first file system."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import NamedTuple

_MAGIC = b"070701"
_END = "TRAILER!!!"
_BLOCK = 512


class Item(NamedTuple):
    """A file, folder, link or device; parents come before what is in them."""

    name: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def folder(name: str, mode: int = 0o755) -> Item:
    return Item(name, stat.S_IFDIR | mode)


def file(name: str, content: bytes, mode: int = 0o644) -> Item:
    return Item(name, stat.S_IFREG | mode, content)


def link(name: str, target: str) -> Item:
    return Item(name, stat.S_IFLNK | 0o777, target.encode())


def archive(items: Iterable[Item]) -> bytes:
    """The same items make the same bytes: all belong to root and are of no time."""
    parts = [_entry(number, item) for number, item in enumerate(items, 1)]
    whole = b"".join([*parts, _entry(0, Item(_END, 0))])
    return whole + bytes(-len(whole) % _BLOCK)


def _entry(number: int, item: Item) -> bytes:
    name = item.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(item.mode) else 1
    major, minor = item.device
    fields = (number, item.mode, 0, 0, links, 0, len(item.content), 0, 0, major, minor, len(name), 0)
    head = _MAGIC + b"".join(b"%08x" % field for field in fields) + name
    return head + bytes(-len(head) % 4) + item.content + bytes(-len(item.content) % 4)
