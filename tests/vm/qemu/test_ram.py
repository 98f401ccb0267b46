"""A machine's memory is taken out of the stream of its migration, however that is cut, and nothing else is believed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from struct import pack

import pytest

from skerry.errors import ProviderError
from skerry.vm.qemu.ram import MemoryReader

PAGE = 4096
SIZE = 64 * PAGE
HEAD = b"QEVM\0\0\0\3\x07\0\0\0\x09microvm-1"
BEGIN = b"\x01" + pack(">I", 2) + b"\x03ram" + pack(">II", 0, 4)
FOOTER = b"\x7e" + pack(">I", 2)
DEVICES = b"\x04" + bytes(range(256)) * 40


def sizes(ram: int = SIZE, rom: int = 2 * PAGE) -> bytes:
    blocks = b"".join(bytes([len(name)]) + name + pack(">QQ", size, 0) for name, size in ((b"ram", ram), (b"rom", rom)))
    return pack(">Q", (ram + rom) | 4) + blocks


def page(number: int, data: bytes | None, block: bytes | None = None) -> bytes:
    """One page; without data, one of zeros; in the block of the page before, if none is named."""
    flags = (8 if data else 2) | (0 if block else 0x20)
    name = b"" if block is None else bytes([len(block)]) + block
    return pack(">Q", number * PAGE | flags) + name + (data or b"\0")


def over() -> bytes:
    return pack(">Q", 0x10) + FOOTER


def section(kind: int, *records: bytes) -> bytes:
    return bytes([kind]) + pack(">I", 2) + b"".join(records) + over()


ONE, TWO, ROM = (bytes([value]) * PAGE for value in (1, 2, 3))
FIRST = HEAD + BEGIN + sizes() + over()
STREAM = (
    FIRST
    + section(2, page(0, ONE, b"ram"), page(1, None), page(2, TWO), page(0, ROM, b"rom"), page(1, None))
    + section(2, page(60, ONE, b"ram"), page(61, ONE), page(2, None))
    + section(3, page(63, TWO, b"ram"))
    + DEVICES
)


def read(path: Path, *pieces: bytes) -> tuple[bytes, bytes]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        reader = MemoryReader(fd, SIZE)
        for piece in pieces:
            reader.feed(piece)
        return path.read_bytes(), reader.finish()
    finally:
        os.close(fd)


def test_pages_go_to_their_places_and_all_else_is_kept_in_its_order(tmp_path: Path) -> None:
    memory, state = read(tmp_path / "memory", STREAM)
    expected = bytearray(SIZE)
    for number, data in ((0, ONE), (60, ONE), (61, ONE), (63, TWO)):
        expected[number * PAGE : (number + 1) * PAGE] = data
    assert memory == expected, "a page that was sent again, as zeros, is zeros"
    kept = section(2, page(0, ROM, b"rom"), page(1, None)) + section(2) + section(3)
    assert state == FIRST + kept + DEVICES
    assert (tmp_path / "memory").stat().st_blocks * 512 < SIZE


@pytest.mark.parametrize("seed", range(20))
def test_it_does_not_matter_where_the_stream_is_cut(tmp_path: Path, seed: int) -> None:
    cuts = sorted(random.Random(seed).sample(range(len(STREAM)), 30))
    pieces = [STREAM[start:end] for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert read(tmp_path / "memory", *pieces) == read(tmp_path / "again", STREAM)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(FIRST + section(2, page(64, ONE, b"ram")), id="a page beyond the end"),
        pytest.param(FIRST + section(2, page(1 << 40, ONE, b"ram")), id="a page far beyond the end"),
        pytest.param(HEAD + BEGIN + sizes(ram=2 * SIZE) + over(), id="a memory of another size"),
        pytest.param(HEAD + BEGIN + pack(">Q", SIZE | 4) + b"\x03rom" + pack(">QQ", 2 * SIZE, 0), id="sizes that lie"),
        pytest.param(HEAD + BEGIN + pack(">Q", 0x40), id="a record of no known kind"),
        pytest.param(FIRST + b"\x01" + bytes(8), id="another section in between"),
        pytest.param(HEAD + BEGIN + pack(">Q", 0x10) + b"\x7e" + pack(">I", 9), id="the end of another section"),
        pytest.param(bytes(1 << 18), id="no memory at all"),
        pytest.param(FIRST + section(2, page(0, ONE, b"ram")), id="an end before the end"),
    ],
)
def test_what_no_qemu_sends_is_refused(tmp_path: Path, stream: bytes) -> None:
    with pytest.raises(ProviderError):
        read(tmp_path / "memory", *(stream[at : at + 4096] for at in range(0, len(stream), 4096)))
    assert (tmp_path / "memory").stat().st_size == SIZE


def test_any_change_of_a_byte_is_harmless_or_refused(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(300):
        broken = bytearray(STREAM)
        for _ in range(3):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            read(tmp_path / "memory", bytes(broken))
        except ProviderError:
            """As it should be."""
        assert (tmp_path / "memory").stat().st_size == SIZE
