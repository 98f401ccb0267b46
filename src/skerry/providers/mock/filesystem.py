"""A small Unix filesystem in memory: names as bytes, modes, links, sizes, and an end to its space."""

from __future__ import annotations

import bisect
import errno
import os
import posixpath
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MAX_LINKS = 40
_MAX_NAME = 255
_NODE_BYTES = 4096
_DEFAULT_CAPACITY = 1 << 30
_ACCESS = {"r": 4, "w": 2, "x": 1}

Change = Callable[[str, bytes, bool], None]
"""Told of each change: the event of the agent's `watch`, the path, and whether it is a folder."""


@dataclass(eq=False)
class Node:
    mode: int
    uid: int
    gid: int
    mtime: float
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Node] = field(default_factory=dict)
    target: bytes = b""
    xattrs: dict[str, bytes] = field(default_factory=dict)
    links: int = 1

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_device(self) -> bool:
        return stat.S_ISCHR(self.mode)

    @property
    def size(self) -> int:
        return len(self.target) if self.is_link else len(self.data)


def error(code: int, path: bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))


class FileSystem:
    """Every call takes an absolute path (see `absolute`) and the user that asks; 0 may do everything."""

    def __init__(self, now: Callable[[], float], capacity: int | None = None) -> None:
        self._now = now
        self.capacity = capacity or _DEFAULT_CAPACITY
        self.used = 0
        self.watchers: set[Change] = set()
        self.read_only: set[bytes] = set()
        """Where folders are mounted that nothing may be written to."""
        self.root = Node(stat.S_IFDIR | 0o755, 0, 0, now())

    def find(self, path: bytes, uid: int = 0, *, follow: bool = True) -> Node:
        parent, name = self._walk(path, uid, follow)
        if not name:
            return parent
        node = parent.children.get(name)
        if node is None:
            raise error(errno.ENOENT, path)
        return node

    def real(self, path: bytes, uid: int = 0) -> bytes:
        """The path without links."""
        trail: list[bytes] = []
        self._walk(path, uid, True, trail)
        return b"/" + b"/".join(trail)

    def exists(self, path: bytes) -> bool:
        try:
            self.find(path)
        except OSError:
            return False
        return True

    def _walk(self, path: bytes, uid: int, follow: bool, trail: list[bytes] | None = None) -> tuple[Node, bytes]:
        """The folder that holds the last name, and that name ("" for the root itself)."""
        if b"\0" in path or not path.startswith(b"/"):
            raise error(errno.EINVAL, path)
        names = [name for name in path.split(b"/") if name not in (b"", b".")][::-1]
        stack = [self.root]
        trail = [] if trail is None else trail
        links = 0
        while names:
            name = names.pop()
            here = stack[-1]
            if not here.is_dir:
                raise error(errno.ENOTDIR, path)
            self.demand(here, "x", uid, path)
            if name == b"..":
                if len(stack) > 1:
                    stack.pop()
                    trail.pop()
                continue
            if len(name) > _MAX_NAME:
                raise error(errno.ENAMETOOLONG, path)
            node = here.children.get(name)
            if node is not None and node.is_link and (names or follow):
                links += 1
                if links > _MAX_LINKS:
                    raise error(errno.ELOOP, path)
                if node.target.startswith(b"/"):
                    del stack[1:]
                    trail.clear()
                names += [part for part in node.target.split(b"/") if part not in (b"", b".")][::-1]
                continue
            if not names:
                trail.append(name)
                return here, name
            if node is None:
                raise error(errno.ENOENT, path)
            stack.append(node)
            trail.append(name)
        return stack[-1], b""

    def demand(self, node: Node, access: str, uid: int, path: bytes) -> None:
        shift = 6 if node.uid == uid else 0
        if uid != 0 and not (node.mode >> shift) & _ACCESS[access]:
            raise error(errno.EACCES, path)

    def _slot(self, path: bytes, uid: int, *, follow: bool = False) -> tuple[Node, bytes, Node | None]:
        """A folder that may be changed, a name in it, and what bears that name now."""
        parent, name = self._walk(path, uid, follow)
        if not name:
            raise error(errno.EBUSY if parent is self.root else errno.EEXIST, path)
        self._refuse_read_only(path)
        self.demand(parent, "w", uid, path)
        return parent, name, parent.children.get(name)

    def _refuse_read_only(self, path: bytes) -> None:
        for place in self.read_only:
            if (self.real(path) + b"/").startswith(place + b"/"):
                raise error(errno.EROFS, path)

    def mount(self, path: bytes, folder: Node, *, read_only: bool = False) -> None:
        """Show a folder that others may see too."""
        parent = posixpath.dirname(path)
        if not self.exists(parent):
            self.make_dir(parent, parents=True)
        self.find(parent).children[posixpath.basename(path)] = folder
        if read_only:
            self.read_only.add(path)

    def _charge(self, count: int, path: bytes) -> None:
        if count > 0 and self.used + count > self.capacity:
            raise error(errno.ENOSPC, path)
        self.used += count

    def _add(self, path: bytes, uid: int, node: Node) -> Node:
        parent, name, old = self._slot(path, uid)
        if old is not None:
            raise error(errno.EEXIST, path)
        self._charge(_NODE_BYTES + len(node.data), path)
        parent.children[name] = node
        parent.mtime = self._now()
        self._tell("create", path, node.is_dir)
        return node

    def _tell(self, event: str, path: bytes, is_dir: bool) -> None:
        for watcher in list(self.watchers):
            watcher(event, path, is_dir)

    def changed(self, path: bytes) -> None:
        self._tell("modify", path, False)

    def make_dir(self, path: bytes, uid: int = 0, *, mode: int = 0o755, parents: bool = False) -> None:
        if parents:
            self._make_dirs(path, uid, mode)
        elif posixpath.normpath(path) == b"/":
            raise error(errno.EEXIST, path)
        else:
            self._add(path.rstrip(b"/"), uid, Node(stat.S_IFDIR | mode, uid, uid, self._now()))

    def _make_dirs(self, path: bytes, uid: int, mode: int) -> None:
        names = [name for name in path.split(b"/") if name not in (b"", b".")]
        prefix = [b"/" + b"/".join(names[:count]) for count in range(len(names) + 1)]
        known = bisect.bisect(range(1, len(prefix)), 0, key=lambda count: not self.exists(prefix[count]))
        folder = self.find(prefix[known], uid)
        if known < len(names):
            self._refuse_read_only(prefix[known])
        for here in prefix[known + 1 :]:
            if not folder.is_dir:
                break
            self.demand(folder, "w", uid, here)
            self._charge(_NODE_BYTES, here)
            folder.children[posixpath.basename(here)] = made = Node(stat.S_IFDIR | mode, uid, uid, self._now())
            self._tell("create", here, True)
            folder = made
        if not folder.is_dir:
            raise error(errno.EEXIST if known == len(names) else errno.ENOTDIR, path)

    def symlink(self, path: bytes, target: bytes, uid: int = 0) -> None:
        self._add(path, uid, Node(stat.S_IFLNK | 0o777, uid, uid, self._now(), target=target))

    def link(self, path: bytes, to: bytes, uid: int = 0) -> None:
        node = self.find(path, uid, follow=False)
        if node.is_dir:
            raise error(errno.EPERM, path)
        self.used -= _NODE_BYTES + len(node.data)  # `_add` charges it again, but a hard link takes no space
        self._add(to, uid, node)
        node.links += 1

    def device(self, path: bytes, name: bytes) -> None:
        self._add(path, 0, Node(stat.S_IFCHR | 0o666, 0, 0, self._now(), target=name))

    def open(self, path: bytes, access: str, uid: int = 0, *, create: bool = False, mode: int = 0o644) -> Node:
        """The file behind the path, which may be read (`r`) or written (`w`), made if wanted."""
        try:
            node = self.find(path, uid)
        except FileNotFoundError:
            if not create or path.endswith(b"/"):
                raise
            return self._add(self.real(path, uid), uid, Node(stat.S_IFREG | mode, uid, uid, self._now()))
        if node.is_dir:
            raise error(errno.EISDIR, path)
        self.demand(node, access, uid, path)
        if access == "w":
            self._refuse_read_only(path)
        return node

    def write(self, node: Node, offset: int, data: bytes, path: bytes) -> None:
        end = offset + len(data)
        self._charge(max(0, end - len(node.data)), path)
        if offset > len(node.data):
            node.data.extend(bytes(offset - len(node.data)))
        node.data[offset:end] = data
        node.mtime = self._now()
        self.changed(path)

    def truncate(self, node: Node, size: int = 0) -> None:
        self.used -= max(0, len(node.data) - size)
        del node.data[size:]
        node.mtime = self._now()

    def replace(self, path: bytes, data: bytes, uid: int = 0, *, mode: int | None = None) -> Node:
        """Write a whole file at once: all of it, or the old one stays."""
        node = self.open(path, "w", uid, create=True)
        self._charge(len(data) - len(node.data), path)
        node.data[:] = data
        node.mtime = self._now()
        if mode is not None:
            node.mode = stat.S_IFMT(node.mode) | mode
        self.changed(path)
        return node

    def move(self, path: bytes, to: bytes, uid: int = 0, *, overwrite: bool = True) -> None:
        parent, name, node = self._slot(path.rstrip(b"/"), uid)
        if node is None:
            raise error(errno.ENOENT, path)
        to_parent, to_name, old = self._slot(to.rstrip(b"/"), uid)
        if old is node:
            return
        if node.is_dir and (to_parent is node or any(found is to_parent for _, found in self.walk(path))):
            raise error(errno.EINVAL, to)
        if old is not None:
            if not overwrite:
                raise error(errno.EEXIST, to)
            if old.is_dir != node.is_dir:
                raise error(errno.EISDIR if old.is_dir else errno.ENOTDIR, to)
            self.remove(to, uid)
        del parent.children[name]
        to_parent.children[to_name] = node
        self._tell("move", path, node.is_dir)
        self._tell("create", to, node.is_dir)

    def remove(self, path: bytes, uid: int = 0, *, recursive: bool = False) -> None:
        parent, name, node = self._slot(path.rstrip(b"/") or b"/", uid)
        if node is None:
            raise error(errno.ENOENT, path)
        if node.is_dir and node.children and not recursive:
            raise error(errno.ENOTEMPTY, path)
        del parent.children[name]
        parent.mtime = self._now()
        for _, gone in [(b"", node), *below(node, path)]:
            gone.links -= 1
            if not gone.links:
                self.used -= _NODE_BYTES + len(gone.data)
        self._tell("delete", path, node.is_dir)

    def walk(self, path: bytes, depth: int | None = None, uid: int = 0) -> Iterator[tuple[bytes, Node]]:
        """What is below a folder, level by level, names in order."""
        node = self.find(path, uid)
        if not node.is_dir:
            raise error(errno.ENOTDIR, path)
        self.demand(node, "r", uid, path)
        return below(node, path, depth)

    def chmod(self, path: bytes, mode: int, uid: int = 0) -> None:
        node = self._own(path, uid)
        node.mode = stat.S_IFMT(node.mode) | (mode & 0o7777)
        self._tell("attrib", path, node.is_dir)

    def chown(self, path: bytes, owner: int, group: int, uid: int = 0) -> None:
        node = self._own(path, uid)
        if uid != 0 and (owner, group) != (node.uid, node.gid):
            raise error(errno.EPERM, path)
        node.uid, node.gid = owner, group
        self._tell("attrib", path, node.is_dir)

    def _own(self, path: bytes, uid: int) -> Node:
        node = self.find(path, uid)
        if uid not in (0, node.uid):
            raise error(errno.EPERM, path)
        self._refuse_read_only(path)
        return node

    def copy(self) -> FileSystem:
        """Another filesystem with the same contents; hard links become files of their own."""
        twin = FileSystem(self._now, self.capacity)
        twin.used = self.used
        pending = [(self.root, twin.root)]
        while pending:
            source, copy = pending.pop()
            for name, node in source.children.items():
                copy.children[name] = Node(
                    node.mode, node.uid, node.gid, node.mtime, bytearray(node.data), {}, node.target, dict(node.xattrs)
                )
                pending.append((node, copy.children[name]))
        return twin


def below(node: Node, path: bytes, depth: int | None = None) -> Iterator[tuple[bytes, Node]]:
    folders = deque([(path, node, 1)])
    while folders:
        here, folder, level = folders.popleft()
        for name, found in sorted(folder.children.items()):
            inner = posixpath.join(here, name)
            yield inner, found
            if found.is_dir and (depth is None or level < depth):
                folders.append((inner, found, level + 1))


def absolute(path: str | bytes, base: bytes) -> bytes:
    """A path as a process in `base` means it. `..` stays, for links decide where it leads."""
    return posixpath.join(base, os.fsencode(path))
