"""Writes a tree as an ext4 file system to be read only: without root or a mount, and the same for the same tree.

All that describes it lies at its beginning, and the content of every file in one piece behind that.
"""

from __future__ import annotations

import stat
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from skerry.errors import InvalidSpec
from skerry.vm.images import ext4_xattrs, tree
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

Took = Callable[[int], None]
"""Told how many bytes of content were written."""


def write(root: Node, path: Path, took: Took = lambda _: None) -> None:
    """Make the file. Content is read in the order in which the tree's entries came."""
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
    """Where everything lies."""

    def __init__(self, nodes: list[Node]) -> None:
        self.places: dict[Node, int] = {}
        self.own_blocks: list[tuple[int, bytes]] = []
        """What is ours to say: folders, long links, lists of extents and attributes."""
        self._inodes: dict[int, bytes] = {}
        self._folders = [node.number for node in nodes if node.is_folder]
        contents = [_own_content(node) for node in nodes]
        data = sum(_blocks_of(node, content) for node, content in zip(nodes, contents, strict=True))
        self._used_inodes = _FIRST - 1 + len(nodes) - 1
        self._size_up(data)
        self._next = self._first_data
        files = [node for node in nodes if stat.S_ISREG(node.mode)]
        for node, content in zip(nodes, contents, strict=True):
            if not stat.S_ISREG(node.mode):
                self._inodes[node.number] = self._inode(node, content)
        for node in sorted(files, key=lambda node: node.order):
            self._inodes[node.number] = self._inode(node, None)

    def _size_up(self, data: int) -> None:
        """How many groups there are depends on how much room their descriptions take."""
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
        inside, outside = ext4_xattrs.packed(node.xattrs, _INODE - 160, BLOCK)
        attributes = 0
        if outside:
            attributes = self._take(1)
            self.own_blocks.append((attributes, outside))
            used += 1
        return _packed_inode(node, size, used, flags, pointers, attributes, inside)

    def _extents(self, place: int, blocks: int) -> tuple[bytes, int]:
        """What an inode says of its blocks, and how many more it takes to say it."""
        extents = [
            struct.pack("<IHHI", done, min(_MAX_EXTENT, blocks - done), 0, place + done)
            for done in range(0, blocks, _MAX_EXTENT)
        ]
        if len(extents) <= 4:
            return _extent_node(extents, 4, 0), 0
        indexes = []
        for first in range(0, len(extents), _PER_LEAF):
            leaf = self._take(1)
            self.own_blocks.append((leaf, _extent_node(extents[first : first + _PER_LEAF], _PER_LEAF, 0)))
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
        parts = [_padded(bytes(1024) + self._superblock(), BLOCK)]
        parts.append(_padded(b"".join(descriptors), self._descriptor_blocks * BLOCK))
        parts += [*block_bits, *inode_bits]
        table = bytearray(self._groups * self._table_blocks * BLOCK)
        for number, inode in self._inodes.items():
            table[(number - 1) * _INODE : number * _INODE] = inode
        return b"".join([*parts, table])

    def _superblock(self) -> bytes:
        inodes = self._groups * self._inodes_per_group
        free = self.blocks - self._next
        counts = (inodes, self.blocks, 0, free, inodes - self._used_inodes, 0, 2, 2)
        sizes = (_PER_GROUP, _PER_GROUP, self._inodes_per_group, 0, 0)
        states = (0, 0xFFFF, 0xEF53, 1, 1, 0)
        revision = (0, 0, 0, 1)
        features = (0x208, 0x242, 0x62)  # attributes, no copies; types in names, extents, groups together; large files
        block = bytearray(1024)
        _SUPERBLOCK.pack_into(
            block, 0, *counts, *sizes, *states, *revision, 0, 0, _FIRST, _INODE, 0, *features, _UUID, b"skerry"
        )
        block[236:253] = _UUID + b"\x01"  # the seed of hashes of names, and which hash
        struct.pack_into("<HHI", block, 348, 32, 32, 2)
        block[372] = max(1, (self._groups - 1).bit_length())
        return bytes(block)


def _own_content(node: Node) -> bytes | None:
    if stat.S_ISREG(node.mode):
        return None
    return _folder_content(node) if node.is_folder else node.target


def _blocks_of(node: Node, content: bytes | None) -> int:
    size = node.size if content is None else len(content)
    blocks = 0 if stat.S_ISLNK(node.mode) and size < 60 else -(-size // BLOCK)
    extents = -(-blocks // _MAX_EXTENT)
    leaves = -(-extents // _PER_LEAF) if extents > 4 else 0
    return blocks + leaves + bool(ext4_xattrs.packed(node.xattrs, _INODE - 160, BLOCK)[1])


def _folder_content(folder: Node) -> bytes:
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
    return _padded(b"".join(joined), BLOCK)


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
    return _padded(head + _EXTRA.pack(32, 0, 0, 0, 0, mtime, 0, 0, 0) + inside, _INODE)


def _extent_node(items: list[bytes], most: int, depth: int) -> bytes:
    return struct.pack("<HHHHI", 0xF30A, len(items), most, depth, 0) + b"".join(items)


def _bits(used: int, there: int) -> bytes:
    """A bitmap of one block; what is behind its end counts as used."""
    bits = (1 << used) - 1 | ((1 << (8 * BLOCK)) - (1 << there))
    return bits.to_bytes(BLOCK, "little")


def _padded(content: bytes, size: int) -> bytes:
    return content + bytes(size - len(content))


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
