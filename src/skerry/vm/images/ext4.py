"""Writer of ext4 file systems to be read only: without root or a mount, and the same for the same tree. Others' are
checked here.

All that describes it lies at its beginning, and the content of every file in one piece behind that.
"""

from __future__ import annotations

import os
import stat
import struct
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from skerry.errors import InvalidSpec
from skerry.vm.images import tree
from skerry.vm.images.tree import Node

BLOCK = 4096
_PER_GROUP = 8 * BLOCK
_INODE = 256
_INODES_PER_BLOCK = BLOCK // _INODE
_ROOT, _FIRST = 2, 11
_MAX_LINKS = 65000
_MAX_EXTENT = 1 << 15
_PER_LEAF = (BLOCK - 12) // 12
_USES_EXTENTS = 0x80000
_KINDS = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFIFO: 5, stat.S_IFLNK: 7}
_UUID = uuid.uuid5(uuid.NAMESPACE_DNS, "skerry").bytes
_LATEST = (1 << 31) - 1
_PIECE = 1 << 20

_SUPERBLOCK = struct.Struct("<13I6H4I2HI2H3I16s16s")
_INODE_HEAD = struct.Struct("<HHIIIIIHHIII60sIIII6H")
_EXTRA = struct.Struct("<HHIIIIIII")
_XATTR_MAGIC = 0xEA020000
_XATTR_PREFIXES = {"user.": 1, "security.": 6}
_XATTR_ENTRY = struct.Struct("<BBHIII")
_XATTR_HEADER = 32
_WORD = 0xFFFFFFFF
_MAGIC = b"\x53\xef"
_NEEDS_RECOVERY, _NUMBERS_OF_64_BITS = 0x4, 0x80
_MAX_BLOCK_SIZE = 6
"""As a power of two, of kibibytes."""

Took = Callable[[int], None]
"""Told how many bytes of content were written."""


def is_one(path: Path) -> bool:
    """Whether a file holds a file system of this kind, or one of its forerunners, by its superblock."""
    try:
        return path.is_file() and _superblock_of(path)[56:58] == _MAGIC
    except OSError:
        return False


def check(path: Path) -> None:
    """Raise InvalidSpec for a file that holds no such file system, or none that can be mounted to be read only."""
    found = _superblock_of(path)
    if found[56:58] != _MAGIC:
        raise InvalidSpec(f"{path} holds no ext4 file system: make one with `mke2fs -t ext4 -d FOLDER`", field="image")
    blocks, features = int.from_bytes(found[4:8], "little"), int.from_bytes(found[96:100], "little")
    if features & _NUMBERS_OF_64_BITS:
        blocks |= int.from_bytes(found[336:340], "little") << 32
    size = int.from_bytes(found[24:28], "little")
    if size > _MAX_BLOCK_SIZE or blocks * (1024 << size) > path.stat().st_size:
        raise InvalidSpec(f"{path} is damaged: its file system is larger than the file", field="image")
    if features & _NEEDS_RECOVERY:
        reason = "was not unmounted, and has changes in its journal: run `e2fsck -p` on it"
        raise InvalidSpec(f"{path} {reason}", field="image")


def _superblock_of(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), 1024, 1024).ljust(1024, b"\0")


def write(root: Node, path: Path, took: Took = lambda _: None) -> None:
    """Write the file. Content is read in the order in which the tree's entries came. Raises InvalidSpec."""
    nodes = _numbered(root)
    plan = _Plan(nodes)
    with open(path, "xb") as file:
        file.truncate(plan.blocks * BLOCK)
        for node, place in plan.places.items():
            file.seek(place * BLOCK)
            _copy(node, file, took)
        for place, block in plan.own_blocks:
            file.seek(place * BLOCK)
            file.write(block)
        file.seek(0)
        file.write(plan.head())


def _numbered(root: Node) -> list[Node]:
    """All nodes in the order of their numbers; each knows its number and how many names it has."""
    nodes: list[Node] = []
    root.number, root.links = _ROOT, 1
    for folder, parent in tree.walk(root):
        folder.parent = parent
        folder.links += 1
        parent.links += folder is not root
        for name, child in sorted(folder.children.items()):
            if len(name) > 255:
                raise InvalidSpec(f"the image has a name that is too long for a file: {name[:60]!r}...")
            if not child.number:
                nodes.append(child)
                child.number = _FIRST + len(nodes) - 1
            child.links += 1
            if child.links > _MAX_LINKS and not child.is_folder:
                raise InvalidSpec("the image has a file with more names than a file can have")
    return [root, *nodes]


class _Plan:
    """Layout of the file system: the place of everything in it."""

    def __init__(self, nodes: list[Node]) -> None:
        self.places: dict[Node, int] = {}
        self.own_blocks: list[tuple[int, bytes]] = []
        """Blocks that are ours: folders, long links, lists of extents and attributes."""
        self._inodes: dict[int, bytes] = {}
        self._folders = [node.number for node in nodes if node.is_folder]
        contents = [None if stat.S_ISREG(node.mode) else _own_content(node) for node in nodes]
        data = sum(_blocks_of(node, content) for node, content in zip(nodes, contents, strict=True))
        self._used_inodes = _FIRST - 1 + len(nodes) - 1
        self._size_up(data)
        self._next = self._first_data
        files = [(node, content) for node, content in zip(nodes, contents, strict=True) if content is None]
        others = [(node, content) for node, content in zip(nodes, contents, strict=True) if content is not None]
        for node, content in (*others, *sorted(files, key=lambda file: file[0].order)):
            self._inodes[node.number] = self._inode(node, content)

    def _size_up(self, data: int) -> None:
        """Count the groups, which depends on the room that their descriptions take."""
        groups = 0
        while True:
            groups += 1
            per_block = -(-self._used_inodes // groups)
            self._table_blocks = -(-per_block // _INODES_PER_BLOCK)
            self._inodes_per_group = self._table_blocks * _INODES_PER_BLOCK
            self._descriptor_blocks = -(-32 * groups // BLOCK)
            self._first_data = 1 + self._descriptor_blocks + groups * (2 + self._table_blocks)
            self.blocks = max(self._first_data + data, (groups - 1) * _PER_GROUP + 1)
            if self.blocks <= groups * _PER_GROUP and self._inodes_per_group <= _PER_GROUP:
                self._groups = groups
                return

    def _take(self, blocks: int) -> int:
        place = self._next
        self._next += blocks
        return place

    def _inode(self, node: Node, content: bytes | None) -> bytes:
        size = node.size if content is None else len(content)
        blocks = -(-size // BLOCK)
        fast = stat.S_ISLNK(node.mode) and size < 60
        flags, pointers, used = 0, b"", 0
        if fast:
            assert content is not None
            pointers = content
        elif not stat.S_ISFIFO(node.mode):
            flags = _USES_EXTENTS
            place = self._take(blocks)
            if content is None and size:
                self.places[node] = place
            elif content:
                self.own_blocks.append((place, content))
            pointers, leaves = self._extents(place, blocks)
            used = blocks + leaves
        inside, outside = _packed_xattrs(node.xattrs, _INODE - 160, BLOCK)
        attributes = 0
        if outside:
            attributes = self._take(1)
            self.own_blocks.append((attributes, outside))
            used += 1
        return _packed_inode(node, size, used, flags, pointers, attributes, inside)

    def _extents(self, place: int, blocks: int) -> tuple[bytes, int]:
        """Pack the extents of an inode; returns them and the count of blocks that they take outside of it."""
        extents = [
            struct.pack("<IHHI", done, min(_MAX_EXTENT, blocks - done), 0, place + done)
            for done in range(0, blocks, _MAX_EXTENT)
        ]
        if len(extents) <= 4:
            return _extent_node(extents, 4), 0
        indexes = []
        for first in range(0, len(extents), _PER_LEAF):
            leaf = self._take(1)
            self.own_blocks.append((leaf, _extent_node(extents[first : first + _PER_LEAF], _PER_LEAF)))
            indexes.append(struct.pack("<IIHH", first * _MAX_EXTENT, leaf, 0, 0))
        return _extent_node(indexes, 4, 1), len(indexes)

    def head(self) -> bytes:
        """All that comes before the data."""
        bitmaps = 1 + self._descriptor_blocks
        tables = bitmaps + 2 * self._groups
        descriptors, block_bits, inode_bits = [], [], []
        for group in range(self._groups):
            first, last = group * _PER_GROUP, min((group + 1) * _PER_GROUP, self.blocks)
            used = max(0, min(self._next, last) - first)
            block_bits.append(_bits(used, last - first))
            first_inode = group * self._inodes_per_group
            used_inodes = max(0, min(self._used_inodes - first_inode, self._inodes_per_group))
            inode_bits.append(_bits(used_inodes, self._inodes_per_group))
            folders = sum(first_inode < number <= first_inode + self._inodes_per_group for number in self._folders)
            places = (bitmaps + group, bitmaps + self._groups + group, tables + group * self._table_blocks)
            counts = (last - first - used, self._inodes_per_group - used_inodes, folders)
            descriptors.append(struct.pack("<3I3H14x", *places, *counts))
        table = bytearray(self._groups * self._table_blocks * BLOCK)
        for number, inode in self._inodes.items():
            table[(number - 1) * _INODE : number * _INODE] = inode
        superblock = (bytes(1024) + self._superblock()).ljust(BLOCK, b"\0")
        described = b"".join(descriptors).ljust(self._descriptor_blocks * BLOCK, b"\0")
        return b"".join([superblock, described, *block_bits, *inode_bits, table])

    def _superblock(self) -> bytes:
        inodes = self._groups * self._inodes_per_group
        free = self.blocks - self._next
        counts = (inodes, self.blocks, 0, free, inodes - self._used_inodes, 0, 2, 2)
        sizes = (_PER_GROUP, _PER_GROUP, self._inodes_per_group, 0, 0)
        states = (0, 0xFFFF, 0xEF53, 1, 1, 0, 0, 0, 0, 1)
        features = (0x208, 0x242, 0x62)  # attributes, no copies; types in names, extents, groups together; large files
        rest = (0, 0, _FIRST, _INODE, 0, *features, _UUID, b"skerry")
        block = bytearray(1024)
        _SUPERBLOCK.pack_into(block, 0, *counts, *sizes, *states, *rest)
        block[236:253] = _UUID + b"\x01"  # the seed of hashes of names, and which hash
        struct.pack_into("<HHI", block, 348, 32, 32, 2)
        block[372] = max(1, (self._groups - 1).bit_length())
        return bytes(block)


def _blocks_of(node: Node, content: bytes | None) -> int:
    size = node.size if content is None else len(content)
    blocks = 0 if stat.S_ISLNK(node.mode) and size < 60 else -(-size // BLOCK)
    extents = -(-blocks // _MAX_EXTENT)
    leaves = -(-extents // _PER_LEAF) if extents > 4 else 0
    return blocks + leaves + bool(_packed_xattrs(node.xattrs, _INODE - 160, BLOCK)[1])


def _own_content(folder: Node) -> bytes:
    """Content of a folder or a link."""
    if not folder.is_folder:
        return folder.target
    parent = folder.parent or folder
    names = [(b".", folder), (b"..", parent), *sorted(folder.children.items())]
    blocks: list[list[bytes]] = [[]]
    room = BLOCK
    for name, node in names:
        entry = struct.pack("<IHBB", node.number, 0, len(name), _KINDS[stat.S_IFMT(node.mode)]) + name
        entry += bytes(-len(entry) % 4)
        if len(entry) > room:
            blocks.append([])
            room = BLOCK
        room -= len(entry)
        blocks[-1].append(entry)
    return b"".join(_folder_block(entries) for entries in blocks)


def _folder_block(entries: list[bytes]) -> bytes:
    lengths = [len(entry) for entry in entries]
    lengths[-1] = BLOCK - sum(lengths[:-1])
    joined = (entry[:4] + struct.pack("<H", length) + entry[6:] for entry, length in zip(entries, lengths, strict=True))
    return b"".join(joined).ljust(BLOCK, b"\0")


def _packed_inode(
    node: Node, size: int, used: int, flags: int, pointers: bytes, attributes: int, inside: bytes
) -> bytes:
    mtime = min(node.mtime, _LATEST)
    links = 1 if node.links > _MAX_LINKS else node.links
    low, high = size & 0xFFFFFFFF, size >> 32
    ids = (used >> 29 & 0xFFFF, 0, node.uid >> 16 & 0xFFFF, node.gid >> 16 & 0xFFFF, 0, 0)
    head = _INODE_HEAD.pack(
        node.mode, node.uid & 0xFFFF, low, mtime, mtime, mtime, 0, node.gid & 0xFFFF, links,
        used * (BLOCK // 512) & 0xFFFFFFFF, flags, 0, pointers, 0, attributes, high, 0, *ids,
    )  # fmt: skip
    return (head + _EXTRA.pack(32, 0, 0, 0, 0, mtime, 0, 0, 0) + inside).ljust(_INODE, b"\0")


def _extent_node(items: list[bytes], most: int, depth: int = 0) -> bytes:
    return struct.pack("<HHHHI", 0xF30A, len(items), most, depth, 0) + b"".join(items)


def _bits(used: int, there: int) -> bytes:
    """A bitmap of one block; what is behind its end counts as used."""
    bits = (1 << used) - 1 | ((1 << (8 * BLOCK)) - (1 << there))
    return bits.to_bytes(BLOCK, "little")


def _copy(node: Node, file: BinaryIO, took: Took) -> None:
    assert node.open is not None
    with node.open() as source:
        left = node.size
        while left:
            piece = source.read(min(left, _PIECE))
            if not piece:
                raise InvalidSpec("a file became shorter while it was read; try again when nothing writes to it")
            left -= len(piece)
            if piece.count(0) == len(piece):
                file.seek(len(piece), 1)
            else:
                file.write(piece)
            took(len(piece))


def _packed_xattrs(attributes: Mapping[str, bytes], inside: int, block: int) -> tuple[bytes, bytes]:
    """Pack attributes for the inode if they fit into `inside` bytes, or else for a block. Raises InvalidSpec."""
    if not attributes:
        return b"", b""
    named = []
    for name, value in attributes.items():
        prefix = next(each for each in _XATTR_PREFIXES if name.startswith(each))
        named.append((_XATTR_PREFIXES[prefix], name.removeprefix(prefix).encode(), value))
    named.sort(key=lambda each: (each[0], len(each[1]), each[1]))
    body = _xattr_body(named, inside - 4, 0)
    if body is not None:
        return struct.pack("<I", _XATTR_MAGIC) + body, b""
    body = _xattr_body(named, block - _XATTR_HEADER, _XATTR_HEADER)
    if body is None:
        raise InvalidSpec("the image has a file with more extended attributes than ext4 keeps")
    whole = 0
    for _, key, value in named:
        whole = (whole << 16 ^ whole >> 16 ^ _xattr_hash(key, value)) & _WORD
    return b"", struct.pack("<IIIII12x", _XATTR_MAGIC, 1, 1, whole, 0) + body


def _xattr_hash(name: bytes, value: bytes) -> int:
    found = 0
    for letter in name:
        found = (found << 5 ^ found >> 27 ^ letter) & _WORD
    padded = value + bytes(-len(value) % 4)
    for (word,) in struct.iter_unpack("<I", padded):
        found = (found << 16 ^ found >> 16 ^ word) & _WORD
    return found


def _xattr_body(named: list[tuple[int, bytes, bytes]], room: int, before: int) -> bytes | None:
    """Entries from the front, their values from the back; values are found from where the entries begin, or from the
    beginning of their block."""
    entries, end = [], room
    values = bytearray(room)
    for index, name, value in named:
        if len(name) > 255:
            return None
        end -= len(value) + -len(value) % 4
        place = max(end, 0) + before if value else 0
        entry = _XATTR_ENTRY.pack(len(name), index, place, 0, len(value), _xattr_hash(name, value)) + name
        entries.append(entry + bytes(-len(entry) % 4))
        if sum(map(len, entries)) + 4 > end:
            return None
        values[end : end + len(value)] = value
    head = b"".join(entries)
    values[: len(head)] = head
    return bytes(values)
