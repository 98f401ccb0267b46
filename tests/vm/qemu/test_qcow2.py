"""Overlays as we write them, in the eyes of QEMU's own tool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import ProviderError
from skerry.vm.qemu import qcow2

needs_tool = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


def qemu_img(*arguments: object) -> Any:
    tool = ["qemu-img", *map(str, arguments)]
    return json.loads(subprocess.run(tool, check=True, capture_output=True, timeout=30).stdout or "null")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.raw"
    path.write_bytes(b"the beginning".ljust(1 << 20, b"\0"))
    return path


@needs_tool
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 512, 10 << 30, 5 << 40])
def test_an_overlay_is_whole_and_has_the_size_that_was_asked_for(base: Path, tmp_path: Path, size: int) -> None:
    overlay = tmp_path / "disk.qcow2"
    qcow2.create(overlay, base, size)
    checked = qemu_img("check", "--output=json", overlay)
    assert (checked["check-errors"], checked.get("leaks", 0), checked.get("corruptions", 0)) == (0, 0, 0)
    info = qemu_img("info", "--output=json", overlay)
    assert info["virtual-size"] == size
    assert (info["full-backing-filename"], info["backing-filename-format"]) == (str(base), "raw")
    assert qcow2.size_of(overlay) == size
    assert overlay.stat().st_blocks * 512 < 1 << 20


@needs_tool
def test_an_overlay_begins_as_its_base_and_may_lie_on_another(base: Path, tmp_path: Path) -> None:
    lower, upper, flat = tmp_path / "lower.qcow2", tmp_path / "upper.qcow2", tmp_path / "flat"
    qcow2.create(lower, base, 1 << 20)
    qcow2.create(upper, lower, 2 << 20)
    subprocess.run(["qemu-img", "convert", "-O", "raw", upper, flat], check=True, timeout=30)
    assert flat.read_bytes() == base.read_bytes() + bytes(1 << 20)
    assert qcow2.layers(upper) == [upper, lower, base]


@needs_tool
def test_what_the_tool_made_is_understood(base: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "disk.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", overlay, "3M"]
    subprocess.run(command, check=True, timeout=30)
    assert qcow2.read(overlay) == (3 << 20, base)


def test_a_disk_is_what_its_name_says_and_not_what_a_guest_wrote_into_it(tmp_path: Path, base: Path) -> None:
    qcow2.create(tmp_path / "made.qcow2", base, 1 << 20)
    disguised = tmp_path / "data.raw"
    (tmp_path / "made.qcow2").rename(disguised)
    assert qcow2.layers(disguised) == [disguised]
    assert qcow2.size_of(disguised) == disguised.stat().st_size


def test_a_damaged_overlay_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.qcow2"
    broken.write_bytes(b"QFI")
    with pytest.raises(ProviderError, match=r"broken\.qcow2 is not a qcow2 disk"):
        qcow2.size_of(broken)


def test_layers_that_lead_back_to_themselves_are_refused(tmp_path: Path) -> None:
    circle = tmp_path / "circle.qcow2"
    qcow2.create(circle, circle, 1 << 20)
    with pytest.raises(ProviderError, match="layers"):
        qcow2.layers(circle)


def test_nothing_is_written_over_a_disk_that_is_there(tmp_path: Path, base: Path) -> None:
    with pytest.raises(FileExistsError):
        qcow2.create(base, base, 1 << 20)
