"""What a host has left for boxes, as files of the kernel tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from skerry.host import room

M = 1 << 20
MEMINFO = "MemTotal:       8388608 kB\nMemFree:          100000 kB\nMemAvailable:   4194304 kB\n"
CPU = "some avg10=42.66 avg60=66.41 avg300=63.40 total=465423036\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
MEMORY = "some avg10=9.00 avg60=0.04 avg300=1.14 total=12295690\nfull avg10=7.50 avg60=0.02 avg300=0.61 total=6783167\n"


class Kernel:
    """Files of /proc and of control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "cgroup"
        self.write("proc/meminfo", MEMINFO)

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def place(self, own: str, version: int) -> None:
        """Say that we are in a group."""
        kind, options = ("cgroup", "rw,memory") if version == 1 else ("cgroup2", "rw")
        self.write(f"proc/{os.getpid()}/mountinfo", f"31 30 0:26 / {self.groups} rw - {kind} none {options}\n")
        self.write(f"proc/{os.getpid()}/cgroup", f"4:memory:{own}\n0::/\n" if version == 1 else f"0::{own}\n")

    def bound(self, group: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.write(f"cgroup/{group}/{name}", f"{text}\n")

    def memory(self) -> tuple[int | None, int | None]:
        found = room.look("/", proc=self.proc)
        return found.memory_bytes, found.memory_free_bytes


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_host_tells_its_memory_pressure_and_disk(kernel: Kernel, tmp_path: Path) -> None:
    kernel.write("proc/pressure/cpu", CPU)
    kernel.write("proc/pressure/memory", MEMORY)
    found = room.look(str(tmp_path), proc=kernel.proc)
    assert (found.memory_bytes, found.memory_free_bytes) == (8192 * M, 4096 * M)
    assert (found.cpu_pressure, found.memory_pressure) == (42.66, 7.5)
    assert found.disk_free_bytes is not None
    assert room.look(str(tmp_path), cpu=False, memory=False, proc=kernel.proc).cpu_pressure is None


def test_what_a_host_does_not_tell_is_unknown(tmp_path: Path) -> None:
    assert room.look(str(tmp_path / "none"), proc=tmp_path) == room.Room()


@pytest.mark.parametrize("text", ["", "MemTotal: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n", "MemTotal:"])
def test_files_that_make_no_sense_tell_nothing(kernel: Kernel, text: str) -> None:
    kernel.write("proc/meminfo", text)
    kernel.write("proc/pressure/cpu", text)
    kernel.write("proc/pressure/memory", "full avg10=")
    found = room.look("/", proc=kernel.proc)
    assert (found.memory_bytes, found.memory_free_bytes, found.cpu_pressure, found.memory_pressure) == (None,) * 4


V1 = {"memory.limit_in_bytes": str(1024 * M), "memory.usage_in_bytes": str(900 * M)}
V2 = {"memory.max": str(1024 * M), "memory.current": str(900 * M)}


def test_a_group_of_v1_has_less_than_its_host(kernel: Kernel) -> None:
    kernel.place("/we", 1)
    kernel.bound("", {"memory.limit_in_bytes": str((1 << 63) - 4096)})
    kernel.bound("we", {**V1, "memory.stat": f"inactive_file 7\ntotal_inactive_file {100 * M}"})
    assert kernel.memory() == (1024 * M, 224 * M)


def test_a_container_of_v2_has_less_than_its_host(kernel: Kernel) -> None:
    kernel.place("/", 2)
    kernel.bound("", {**V2, "memory.stat": f"anon 5\ninactive_file {100 * M}\nactive_file 1"})
    assert kernel.memory() == (1024 * M, 224 * M)


def test_a_group_of_v2_bounds_boxes_if_they_are_below_it(kernel: Kernel) -> None:
    kernel.place("/user/service", 2)
    kernel.bound("user/service", {**V2, "memory.max": str(M), "memory.stat": "inactive_file 0"})
    kernel.bound("user", {"memory.max": "max"})
    assert kernel.memory() == (8192 * M, 4096 * M)


def test_a_group_of_v2_above_ours_bounds_boxes(kernel: Kernel) -> None:
    kernel.place("/user/service", 2)
    kernel.bound("user", {**V2, "memory.current": str(2048 * M), "memory.stat": "inactive_file 0"})
    assert kernel.memory() == (1024 * M, 0)


def test_the_limit_of_a_group_follows_its_changes(kernel: Kernel) -> None:
    kernel.place("/", 2)
    kernel.bound("", {**V2, "memory.stat": "inactive_file 0"})
    assert kernel.memory() == (1024 * M, 124 * M)
    kernel.bound("", {"memory.max": "max"})
    assert kernel.memory() == (8192 * M, 4096 * M)
    kernel.bound("", {"memory.max": str(2048 * M)})
    assert kernel.memory() == (2048 * M, 1148 * M)
