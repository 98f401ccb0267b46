"""A snapshot is what the guest saw on its disk, and nothing of the host, whatever the disk's file says."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.vm.qemu import qcow2
from skerry.vm.qemu.qcow2 import flatten

MIB = 1 << 20
SIZE = 600 * MIB


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base.ext4"
    with open(base, "wb") as file:
        file.truncate(4 * MIB)
        file.seek(MIB)
        file.write(os.urandom(MIB))
    return base


@pytest.fixture
def overlay(tmp_path: Path, base: Path) -> Path:
    overlay = tmp_path / "disk.qcow2"
    qcow2.create(overlay, base, SIZE)
    return overlay


def put(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_an_empty_overlay_is_its_base_grown(base: Path, overlay: Path, tmp_path: Path) -> None:
    flatten(overlay, base, tmp_path / "flat", SIZE)
    assert (tmp_path / "flat").stat().st_size == 600 * MIB
    assert (tmp_path / "flat").stat().st_blocks * 512 < 3 * MIB
    with open(tmp_path / "flat", "rb") as file:
        assert file.read(4 * MIB) == base.read_bytes()


@pytest.mark.skipif(shutil.which("qemu-io") is None, reason="qemu-io is not installed")
def test_what_qemu_wrote_is_read_as_qemu_reads_it(base: Path, overlay: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    writes = [
        f"write -P {chance.randrange(1, 255)} {chance.randrange(599 * MIB) // 512 * 512} {size}"
        for size in (512, 4096, 65536, 204800) * 8
    ]
    commands = [*writes, f"write -z {MIB} {MIB // 2}", f"write -z {590 * MIB} 65536"]
    options = [option for command in commands for option in ("-c", command)]
    subprocess.run(["qemu-io", "-f", "qcow2", *options, overlay], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["qemu-img", "convert", "-O", "raw", overlay, tmp_path / "theirs"], check=True)
    flatten(overlay, base, tmp_path / "ours", SIZE)
    assert subprocess.run(["cmp", tmp_path / "theirs", tmp_path / "ours"]).returncode == 0


def test_another_name_of_what_is_below_leads_nowhere(base: Path, overlay: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the host" * 1000)
    offset, length = struct.unpack(">QI", overlay.read_bytes()[8:20])
    put(overlay, offset, os.fsencode(secret).ljust(length, b"\0")[:length])
    flatten(overlay, base, tmp_path / "flat", SIZE)
    with open(tmp_path / "flat", "rb") as file:
        assert b"of the host" not in file.read(4 * MIB)


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, b"RAW!"),
        (4, struct.pack(">I", 2)),
        (20, struct.pack(">I", 30)),
        (24, struct.pack(">Q", 1 << 60)),
        (24, struct.pack(">Q", SIZE + 1)),
        (32, struct.pack(">I", 1)),
        (36, struct.pack(">I", 0xFFFFFFFF)),
        (72, struct.pack(">Q", 1 << 2)),
    ],
    ids=[
        "magic",
        "version",
        "clusters",
        "size",
        "a little more than it may have",
        "encrypted",
        "tables",
        "data elsewhere",
    ],
)
def test_a_disk_that_is_not_as_we_made_it_is_refused(
    base: Path, overlay: Path, tmp_path: Path, at: int, data: bytes
) -> None:
    put(overlay, at, data)
    with pytest.raises(ProviderError, match="not as it was made"):
        flatten(overlay, base, tmp_path / "flat", SIZE)


def test_a_link_in_the_place_of_a_disk_is_not_followed(base: Path, overlay: Path, tmp_path: Path) -> None:
    overlay.rename(tmp_path / "elsewhere")
    overlay.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        flatten(overlay, base, tmp_path / "flat", SIZE)


def test_tables_that_point_beyond_the_file_read_as_nothing(base: Path, overlay: Path, tmp_path: Path) -> None:
    (l1_at,) = struct.unpack(">Q", overlay.read_bytes()[40:48])
    put(overlay, l1_at, struct.pack(">Q", 1 << 50))
    flatten(overlay, base, tmp_path / "flat", SIZE)
    with open(tmp_path / "flat", "rb") as file:
        assert file.read(4 * MIB) == base.read_bytes()
