"""Root file systems as trees in memory, of entries that nobody has vouched for. Nothing of them touches the host."""

from __future__ import annotations

import io
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from skerry.errors import InvalidSpec
from skerry.oci.roots import Entry

FOLDERS = (".skerry", ".data", ".cache", "proc", "sys", "dev", "run", "tmp", "home/user")
"""Folders that a machine mounts over; its root is read-only, so they have to be in every image."""
PYTHON = "/usr/lib/skerry/python"
"""Portable interpreter in an image that brings one."""
_NEW_FOLDER = stat.S_IFDIR | 0o755
_MAX_FOLLOWED = 40
_XATTR = "SCHILY.xattr."
_CAPABILITY = "security.capability"


class Node(msgspec.Struct, eq=False):
    """A file, folder, link or pipe. One with several names is one node."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    open: Callable[[], BinaryIO] | None = None
    target: bytes = b""
    children: dict[bytes, Node] = {}
    xattrs: dict[str, bytes] = {}
    order: int = 0
    """Its position among the others: to read contents in this order is the cheapest."""
    parent: Node | None = None
    links: int = 0
    number: int = 0

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


def of(entries: Iterable[Entry], folders: Sequence[str] = FOLDERS) -> Node:
    """Make one tree of the entries, with the folders that a machine needs. Raises InvalidSpec."""
    root = Node(_NEW_FOLDER)
    for order, entry in enumerate(entries):
        _add(root, entry, order)
    for path in folders:
        found = _resolve(root, path.split("/"))
        if path == "tmp":
            found.mode = stat.S_IFDIR | 0o1777
    return root


def walk(root: Node) -> Iterator[tuple[Node, Node]]:
    """Yield each folder and its parent, in the order of their names; the root is its own parent."""
    waiting = [(root, root)]
    while waiting:
        node, parent = waiting.pop()
        yield node, parent
        below = [child for _, child in sorted(node.children.items(), reverse=True) if child.is_folder]
        waiting.extend((child, node) for child in below)


def _add(root: Node, entry: Entry, order: int) -> None:
    path = [part for part in entry.info.name.split("/") if part not in ("", ".")]
    made = _linked(root, entry.info) if entry.info.islnk() else _made(entry, order)
    if not path:
        if made.is_folder:
            root.mode, root.uid, root.gid, root.mtime = made.mode, made.uid, made.gid, made.mtime
        return
    folder, name = _resolve(root, path[:-1]), _bytes(path[-1])
    there = folder.children.get(name)
    if there is not None and there.is_folder and made.is_folder:
        made.children = there.children
    folder.children[name] = made


def _linked(root: Node, info: tarfile.TarInfo) -> Node:
    path = [part for part in info.linkname.split("/") if part not in ("", ".")]
    folder = _resolve(root, path[:-1]) if path else root
    found = folder.children.get(_bytes(path[-1])) if path else None
    if found is None or found.is_folder:
        raise InvalidSpec(f"{info.name} is a link to {info.linkname}, which is no file of the image")
    return found


def _made(entry: Entry, order: int) -> Node:
    info = entry.info
    node = Node(KINDS[info.type] | stat.S_IMODE(info.mode), info.uid, info.gid, max(0, int(info.mtime)))
    node.size, node.open, node.order = info.size, entry.open, order
    if info.issym():
        node.mode = stat.S_IFLNK | 0o777
        node.target = _bytes(info.linkname)
        if not 0 < len(node.target) < 4096:
            raise InvalidSpec(f"{info.name} is a link that leads nowhere: its target is empty or too long")
    for key, value in info.pax_headers.items():
        name = key.removeprefix(_XATTR)
        if name != key and (name == _CAPABILITY or name.startswith("user.")):
            node.xattrs[name] = value.encode("utf-8", "surrogateescape")
    return node


KINDS = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


def _resolve(root: Node, path: list[str]) -> Node:
    """Find the folder at a path; links are followed inside of the tree, and what is missing is made."""
    above, left, followed = [root], path[::-1], 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            above = above[:-1] or [root]
            continue
        child = above[-1].children.setdefault(_bytes(part), Node(_NEW_FOLDER))
        if child.is_folder:
            above.append(child)
            continue
        if not stat.S_ISLNK(child.mode) or (followed := followed + 1) > _MAX_FOLLOWED:
            raise InvalidSpec(f"the image has something below {posixpath.join('/', *path)}, which is no folder")
        target = child.target.decode("utf-8", "surrogateescape")
        if target.startswith("/"):
            above = [root]
        left.extend(target.split("/")[::-1])
    return above[-1]


def _bytes(name: str) -> bytes:
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) > 4095 or b"\0" in encoded:
        raise InvalidSpec(f"the image has a name that no file can have: {name[:100]!r}")
    return encoded


def folder_entry(name: str, mode: int = 0o755) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return Entry(info, None)


def file_entry(name: str, content: bytes, mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.mode, info.size = mode, len(content)
    return Entry(info, lambda: io.BytesIO(content))


def link_entry(name: str, target: str) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return Entry(info, None)
