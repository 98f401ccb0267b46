"""Tars of hostile images: little to send, much to take in."""

from __future__ import annotations

import gzip
import tarfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from threading import Event

import pytest

from skerry.errors import InvalidSpec
from skerry.oci import roots, stores


def header(name: str, type: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = type, link
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(headers: dict[str, str], type: bytes = tarfile.XHDTYPE) -> bytes:
    made: bytes = tarfile.TarInfo._create_pax_generic_header(headers, type, "utf-8")  # type: ignore[attr-defined]
    return made


def with_attributes_for_all() -> Iterable[bytes]:
    """tarfile copies them for each entry."""
    yield pax({f"{number:x}": "" for number in range(100_000)}, tarfile.XGLTYPE)
    for number in range(500):
        yield header(f"f{number}")


def with_long_attributes() -> Iterable[bytes]:
    attribute = pax({"SCHILY.xattr.user.x": "a" * (7 << 20)})
    for number in range(100):
        yield attribute + header(f"f{number}")


def with_a_map_without_end() -> Iterable[bytes]:
    member = bytearray(header("s", tarfile.GNUTYPE_SPARSE))
    member[482] = 1
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    yield bytes(member)
    for _ in range(100):
        yield (b"00000000001\0" * 42 + b"\1" + bytes(7)) * 1000


def with_headers_without_end() -> Iterable[bytes]:
    yield pax({"comment": "x"}) * 2000


def with_a_long_path() -> Iterable[bytes]:
    yield pax({"path": "a/" * (1 << 20)}) + header("x")


BOMBS = [
    with_attributes_for_all,
    with_long_attributes,
    with_a_map_without_end,
    with_headers_without_end,
    with_a_long_path,
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_tar_that_would_fill_memory_or_time_is_refused(bomb: object, tmp_path: Path) -> None:
    source = tmp_path / "bomb.tar.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        for piece in bomb():  # type: ignore[operator]
            file.write(piece)
        file.write(bytes(1024))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidSpec), stores.reading(source), stores.opened(source, Event()):
            pass
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


def test_links_to_what_is_not_there_are_not_each_looked_for_in_the_whole_layer(tmp_path: Path) -> None:
    """Twenty thousand of them among as many files took minutes; the test's own deadline tells."""
    source = tmp_path / "links.tar"
    with source.open("wb") as file:
        for number in range(20_000):
            file.write(header(f"f{number}") + header(f"l{number}", tarfile.LNKTYPE, f"gone{number}"))
        file.write(bytes(1024))
    with stores.reading(source), stores.opened(source, Event()) as layer:
        assert isinstance(layer, stores.TarStore)
        assert len(roots.merge([layer], lambda _: None)) == 40_000
