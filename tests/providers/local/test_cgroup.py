from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.host import cgroup, scope
from skerry.host.cgroup import Limits

LIMITS = Limits(memory=64 << 20, pids=32, cpus=0.5)
_V2_FILES = ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.procs")


class FakeKernel:
    """A v2 tree in ordinary folders; a new group gets the files that the kernel would make."""

    def __init__(self, folder: Path, own: str, *, controllers: str = "cpu memory pids") -> None:
        self.root = folder / "cgroup"
        self.proc = folder / "proc"
        here = self.root / own.lstrip("/")
        here.mkdir(parents=True)
        self.proc.mkdir()
        for group in (here, *here.parents):
            if group == self.root or self.root in group.parents:
                (group / "cgroup.controllers").write_text(controllers)
                (group / "cgroup.subtree_control").write_text(controllers)
                (group / "cgroup.procs").write_text("")
        (self.proc / "cgroup").write_text(f"0::{own}\n")
        (self.proc / "mountinfo").write_text(
            f"20 1 8:1 / / rw - ext4 /dev/x rw\n30 20 0:26 / {self.root} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
        )


@pytest.fixture
def groups_like_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    make, remove = Path.mkdir, Path.rmdir

    def mkdir(self: Path, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        if self.name.startswith("skerry-"):
            for file in _V2_FILES:
                (self / file).touch()

    def rmdir(self: Path) -> None:
        for file in self.iterdir() if self.name.startswith("skerry-") else ():
            file.unlink()
        remove(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)


@pytest.mark.usefixtures("groups_like_the_kernels")
def test_on_v2_the_highest_usable_group_is_taken_for_all_controllers(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, "/user.slice/session-1.scope")
    found = cgroup.find(kernel.proc)
    assert found.why_not == {}
    assert set(found.parents.values()) == {cgroup.Parent(kernel.root, 2)}
    assert found.groups("skerry-x", LIMITS) == [kernel.root / "skerry-x"]


@pytest.mark.usefixtures("groups_like_the_kernels")
def test_on_v2_limits_are_written_and_a_process_is_placed_and_read_back(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, "/")
    found = cgroup.find(kernel.proc)
    found.make("skerry-x", LIMITS)
    group = kernel.root / "skerry-x"
    assert {file: (group / file).read_text() for file in _V2_FILES[:4]} == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "pids.max": "32",
        "cpu.max": "50000 100000",
    }
    cgroup.place([group], 42)
    assert cgroup.members([group, kernel.root / "none"]) == {42}
    cgroup.remove([group], 1)
    cgroup.remove([group], 1)
    assert not group.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("groups_like_the_kernels")
def test_where_no_group_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, "/")
    kernel.root.chmod(0o555)
    found = cgroup.find(kernel.proc)
    kernel.root.chmod(0o755)
    assert "Permission denied" in found.why_not["memory"]


@pytest.mark.usefixtures("groups_like_the_kernels")
def test_a_controller_that_the_kernel_does_not_offer_is_named(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, "/", controllers="memory pids")
    found = cgroup.find(kernel.proc)
    assert set(found.parents) == {"memory", "pids"}
    assert set(found.why_not) == {"cpu"}


def test_a_folder_that_is_no_cgroup_is_not_taken_for_one(tmp_path: Path) -> None:
    found = cgroup.find(FakeKernel(tmp_path, "/").proc)
    assert found.parents == {}
    assert not list(tmp_path.glob("**/skerry-*"))


def test_an_own_group_outside_the_mounted_part_falls_back_to_the_mount(tmp_path: Path) -> None:
    """In a container the path of /proc/self/cgroup may be the host's, of which only a part is mounted."""
    (tmp_path / "cgroup").write_text("4:memory:/docker/abc/inner\n")
    (tmp_path / "mountinfo").write_text(f"30 20 0:26 /docker/abc {tmp_path} rw - cgroup cgroup rw,memory\n")
    mounts, own = cgroup._mounts((tmp_path / "mountinfo").read_text()), {"memory": "/docker/abc/inner"}
    assert cgroup._candidates("memory", mounts, own) == [cgroup.Parent(tmp_path / "inner", 1)]
    assert cgroup._candidates("memory", mounts, {"memory": "/elsewhere"}) == [cgroup.Parent(tmp_path, 1)]


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_for_real_limits_are_held_by_this_hosts_kernel(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something else on the host removes groups that are empty."""
    found = cgroup.find()
    if found.why_not:
        pytest.skip(f"this host lets us make no cgroups: {found.why_not}")
    name = f"skerry-test-{os.getpid()}"
    groups = found.groups(name, LIMITS)
    place = cgroup.place

    def place_after_a_cleaner(groups: list[Path], pid: int) -> None:
        monkeypatch.setattr(cgroup, "place", place)
        cgroup.remove(groups[1:], 5)
        place(groups, pid)

    monkeypatch.setattr(cgroup, "place", place_after_a_cleaner)
    try:
        found.confine(child, name, LIMITS)
        assert cgroup.members(groups) == {child}
        parent = found.parents["pids"]
        assert (parent.path / name / "pids.max").read_text().strip() == "32"
        with pytest.raises(ProviderError, match="cannot be removed"):
            cgroup.remove(groups, 0.01)
    finally:
        os.kill(child, 9)
        cgroup.remove(groups, 5)
    assert not any(group.exists() for group in groups)


def test_a_process_that_is_gone_cannot_be_placed() -> None:
    found = cgroup.find()
    if found.why_not:
        pytest.skip(f"this host lets us make no cgroups: {found.why_not}")
    process = subprocess.Popen(["true"])
    process.wait()
    name = f"skerry-test-{os.getpid()}"
    groups = found.groups(name, LIMITS)
    found.make(name, LIMITS)
    try:
        with pytest.raises(ProviderError):
            cgroup.place(groups, process.pid)
    finally:
        cgroup.remove(groups, 5)


def test_a_scope_carries_the_limits_and_an_empty_environment() -> None:
    command = scope.command("skerry-x", LIMITS)
    assert "--unit=skerry-x" in command
    assert {f"MemoryMax={64 << 20}", "MemorySwapMax=0", "TasksMax=33", "CPUQuota=50%"} <= set(command)
    assert command[-1] == "-i"


def test_without_a_user_manager_there_is_no_scope(tmp_path: Path) -> None:
    assert scope.usable_controllers(12345, tmp_path) == set()


def test_a_user_manager_that_delegates_is_found_by_starting_a_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tmp_path / "user.slice/user-7.slice/user@7.service"
    service.mkdir(parents=True)
    (service / "cgroup.controllers").write_text("cpu io memory pids")
    tool = tmp_path / "systemd-run"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for code, expected in ((0, {"cpu", "memory", "pids"}), (1, set())):
        tool.write_text(f"#!/bin/sh\nexit {code}\n")
        tool.chmod(0o755)
        assert scope.usable_controllers(7, tmp_path) == expected


def test_what_a_killed_process_left_of_its_trial_is_removed_by_the_next() -> None:
    found = cgroup.find()
    if found.why_not:
        pytest.skip(f"this host lets us make no cgroups: {found.why_not}")
    process = subprocess.Popen(["true"])
    process.wait()
    left = found.parents["pids"].path / f"skerry-try-{process.pid}-pids"
    left.mkdir()
    cgroup.find()
    assert not left.exists()
