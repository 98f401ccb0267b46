from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.host import cgroup, scope
from skerry.host.cgroup import GroupLimits

LIMITS = GroupLimits(memory=64 << 20, pids=32, cpus=0.5)
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


def needs_groups() -> cgroup.Hierarchies:
    found = cgroup.find()
    if found.why_not:
        pytest.skip(f"this host lets us make no cgroups: {found.why_not}")
    return found


def test_threads_that_find_out_at_once_all_find_the_same_and_leave_nothing() -> None:
    expected = needs_groups()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            together = threading.Barrier(8)
            found = threads.map(lambda _, barrier=together: (barrier.wait(), cgroup.find())[1], range(8))
            assert {str(each) for each in found} == {str(expected)}
    left = [path for parent in expected.parents.values() for path in parent.path.glob(f"skerry-try-{os.getpid()}-*")]
    assert left == []


def test_it_is_found_out_once_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    together = threading.Barrier(8)

    def find() -> cgroup.Hierarchies:
        asked.append(threading.get_ident())
        return cgroup.Hierarchies({}, {})

    monkeypatch.setattr(cgroup, "find", find)
    monkeypatch.setattr(scope, "_found", {})
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: (together.wait(), scope.holder())[1], range(8)))
    assert len(asked) == 1
    assert len({id(each) for each in found}) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_fork_does_not_wait_for_what_another_thread_was_finding_out() -> None:
    with scope._finding:
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(0 if scope._finding.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("groups_like_the_kernels")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ENOSPC])
def test_a_host_that_has_run_out_of_something_is_not_taken_for_one_without_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kernel = FakeKernel(tmp_path, "/")

    def fail(path: Path, _: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cgroup, "_write_knob", fail)
    monkeypatch.setattr(scope, "_found", {})
    find = cgroup.find
    monkeypatch.setattr(cgroup, "find", lambda: find(kernel.proc))
    with pytest.raises(ProviderError, match="cannot be told"):
        scope.holder()
    monkeypatch.undo()
    assert scope.holder() == scope.holder()


@pytest.mark.usefixtures("groups_like_the_kernels")
def test_a_trial_that_somebody_else_swept_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(tmp_path, "/")
    write = cgroup._write_knob
    swept: list[Path] = []

    def sweep_first(path: Path, value: str) -> None:
        if not swept:
            swept.append(path.parent)
            path.parent.rmdir()
        write(path, value)

    monkeypatch.setattr(cgroup, "_write_knob", sweep_first)
    assert cgroup.find(kernel.proc).why_not == {}
    assert not list(kernel.root.glob("skerry-*"))


def test_what_was_loosened_or_left_is_seen(child: int) -> None:
    found = needs_groups()
    name = f"skerry-test-{os.getpid()}"
    groups = found.groups(name, LIMITS)
    try:
        found.confine(child, name, LIMITS)
        found.check(child, name, LIMITS)
        assert set(cgroup.seen(child, LIMITS, LIMITS.controllers())) == set(LIMITS.controllers())
        with pytest.raises(ProviderError, match="is not in the cgroup"):
            found.check(os.getpid(), name, LIMITS)
        (found.parents["pids"].path / name / "pids.max").write_text("33")
        with pytest.raises(ProviderError, match="does not have the limits"):
            found.check(child, name, LIMITS)
        with pytest.raises(ProviderError, match="no cgroup holds process"):
            cgroup.seen(child, LIMITS, ["pids"])
    finally:
        os.kill(child, 9)
        cgroup.remove(groups, 5)


@pytest.mark.parametrize(
    ("group", "knobs", "is_held"),
    [
        ("/box/inner", {"box": {"memory.max": "67108864", "memory.swap.max": "0"}}, True),
        ("/box", {"box": {"memory.max": "67108864", "memory.swap.max": "max"}}, False),
        ("/box", {"box": {"memory.max": "67112960"}}, False),
        ("/box", {"box": {"memory.max": "max"}}, False),
        ("/ours/box", {"ours": {"memory.max": "4096"}}, False),
        ("/box", {}, False),
    ],
    ids=["by a group above", "with swap", "by too much", "by nothing", "with us", "in a group without files"],
)
def test_another_s_process_is_held_by_a_group_that_is_not_ours_too(
    tmp_path: Path, group: str, knobs: dict[str, dict[str, str]], is_held: bool
) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    for name, own in (("self", "/ours"), ("7", group)):
        (proc / name).mkdir(parents=True)
        (proc / name / "cgroup").write_text(f"0::{own}\n")
        (root / own.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (proc / "self/mountinfo").write_text(f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw\n")
    for name, files in knobs.items():
        for file, value in files.items():
            (root / name / file).write_text(value)
    if is_held:
        assert cgroup.seen(7, LIMITS, ["memory"], proc) == {"memory": root / "box"}
    else:
        with pytest.raises(ProviderError, match="no cgroup holds process 7 to its limit of memory"):
            cgroup.seen(7, LIMITS, ["memory"], proc)


@pytest.mark.parametrize("group", ["/../other", "/elsewhere"])
def test_nothing_is_said_of_a_process_whose_groups_are_not_to_be_seen(tmp_path: Path, group: str) -> None:
    for name in ("self", "7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup").write_text(f"4:memory:{group}\n")
    (tmp_path / "self/mountinfo").write_text(f"30 20 0:26 /docker {tmp_path} rw - cgroup cgroup rw,memory\n")
    assert cgroup.seen(7, LIMITS, ["memory"], tmp_path) == {}
