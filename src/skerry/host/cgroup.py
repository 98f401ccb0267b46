"""Limits by control group, v1 or v2, wherever this host lets us make groups: found by making one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.errors import ProviderError

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_TRY = "skerry-try-"


class Limits(msgspec.Struct, frozen=True):
    memory: int
    pids: int
    cpus: float | None

    def knobs(self, controller: str, version: int) -> Mapping[str, str]:
        """The files of a controller and what is written to them, in this order."""
        quota = int((self.cpus or 0) * _PERIOD_US)
        tables: Mapping[tuple[str, int], Mapping[str, str]] = {
            ("memory", 1): {
                "memory.limit_in_bytes": str(self.memory),
                "memory.memsw.limit_in_bytes": str(self.memory),
            },
            ("memory", 2): {"memory.max": str(self.memory), "memory.swap.max": "0"},
            ("pids", 1): {"pids.max": str(self.pids)},
            ("pids", 2): {"pids.max": str(self.pids)},
            ("cpu", 1): {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)},
            ("cpu", 2): {"cpu.max": f"{quota} {_PERIOD_US}"},
        }
        return tables[controller, version]

    def controllers(self) -> tuple[str, ...]:
        return CONTROLLERS if self.cpus is not None else ("memory", "pids")


# a kernel built without swap accounting lacks these, and then has no swap to limit
_OPTIONAL_KNOBS = {"memory.memsw.limit_in_bytes", "memory.swap.max"}


class Parent(NamedTuple):
    """A folder in which groups can be made, for one controller."""

    path: Path
    version: int


class Hierarchies(NamedTuple):
    """Where each controller can be used, and why one cannot."""

    parents: Mapping[str, Parent]
    why_not: Mapping[str, str]

    def groups(self, name: str, limits: Limits) -> list[Path]:
        """The groups that a box of this name gets; made by `make`."""
        paths = {self.parents[c].path / name: None for c in limits.controllers() if c in self.parents}
        return list(paths)

    def make(self, name: str, limits: Limits) -> None:
        for controller in limits.controllers():
            if controller in self.parents:
                parent = self.parents[controller]
                _make_group(parent.path / name, limits.knobs(controller, parent.version))

    def confine(self, pid: int, name: str, limits: Limits) -> None:
        """Make the groups, and put a process into them. What cleans up after others on a host may take a group away
        that is still empty: then once more."""
        for is_last in (False, False, True):
            try:
                self.make(name, limits)
                place(self.groups(name, limits), pid)
                break
            except ProviderError as error:
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise


def find(proc: Path = Path("/proc/self")) -> Hierarchies:
    """What this process may use, by effect: a group is made and removed again in each candidate."""
    mounts = _mounts((proc / "mountinfo").read_text())
    own = _own_groups((proc / "cgroup").read_text())
    parents: dict[str, Parent] = {}
    why_not: dict[str, str] = {}
    for controller in CONTROLLERS:
        reason = "the kernel offers no such cgroup controller here"
        for parent in _candidates(controller, mounts, own):
            problem = _try_out(parent, controller)
            if problem is None:
                parents[controller] = parent
                break
            reason = f"no cgroup can be made in {parent.path}: {problem}"
        else:
            why_not[controller] = reason
    return Hierarchies(parents, why_not)


def place(groups: Iterable[Path], pid: int) -> None:
    """Put a process into the groups, and read back that it is there."""
    for group in groups:
        try:
            (group / "cgroup.procs").write_text(str(pid))
            members = (group / "cgroup.procs").read_text().split()
        except OSError as error:
            raise ProviderError(f"process {pid} cannot be put into the cgroup {group}: {error.strerror}") from error
        if str(pid) not in members:
            raise ProviderError(f"process {pid} is not in the cgroup {group} although it was put there")


def members(groups: Iterable[Path]) -> set[int]:
    """The processes in any of the groups."""
    pids: set[int] = set()
    for group in groups:
        try:
            pids.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        except OSError:
            continue  # it was never made, or is gone already
    return pids


def remove(groups: Iterable[Path], timeout_s: float) -> None:
    """Remove groups whose processes are dead; the kernel may need a moment to let go of them."""
    deadline = time.monotonic() + timeout_s
    for group in groups:
        delay_s = 0.001
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ProviderError(f"the cgroup {group} cannot be removed: {error.strerror}") from error
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 0.05)


def _mounts(mountinfo: str) -> list[tuple[str, str, Path, set[str]]]:
    """(type, root within the hierarchy, mount point, options) of each cgroup mount."""
    found = []
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ")[:3]
        if kind in ("cgroup", "cgroup2"):
            root, point = fields.split(" ")[3:5]
            found.append((kind, root, Path(point), set(options.split(","))))
    return found


def _own_groups(text: str) -> dict[str, str]:
    """Controller to this process's path; v2 is under the empty name."""
    own: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    return own


def _candidates(controller: str, mounts: list[tuple[str, str, Path, set[str]]], own: dict[str, str]) -> list[Parent]:
    """v1: below our own group, so that limits set on us bind the box too. v2: the highest group above us that we may
    use, for a group with processes cannot have limited children, and what is below a login dies with it."""
    found: list[Parent] = []
    for kind, root, point, options in mounts:
        path = own.get(controller if kind == "cgroup" else "", "")
        inside = path == root or path.startswith(root.rstrip("/") + "/")
        here = point / path[len(root.rstrip("/")) :].lstrip("/") if inside else point
        if kind == "cgroup" and controller in options:
            found.append(Parent(here, 1))
        elif kind == "cgroup2" and controller in _words(point / "cgroup.controllers"):
            chain = [here, *(above for above in here.parents if above == point or point in above.parents)]
            found.extend(Parent(above, 2) for above in reversed(chain))
    return found


def _try_out(parent: Parent, controller: str) -> str | None:
    """None if a group with this controller works there, else what is wrong."""
    group = parent.path / f"{_TRY}{os.getpid()}-{controller}"
    _sweep(parent.path)
    try:
        if parent.version == 2:
            _enable(parent.path, controller)
            if not os.access(parent.path / "cgroup.procs", os.W_OK):
                return "processes may not be moved there"
        group.mkdir()
    except OSError as error:
        return error.strerror or str(error)
    try:
        for file, value in Limits(memory=64 << 20, pids=16, cpus=0.5).knobs(controller, parent.version).items():
            _write_knob(group / file, value)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        group.rmdir()
    return None


def _sweep(parent: Path) -> None:
    """Remove what a process left that was killed while it tried a group out."""
    for group in parent.glob(f"{_TRY}*"):
        if not os.path.exists(f"/proc/{group.name.removeprefix(_TRY).partition('-')[0]}"):
            with contextlib.suppress(OSError):
                group.rmdir()


def _enable(path: Path, controller: str) -> None:
    control = path / "cgroup.subtree_control"
    if controller not in _words(control):
        control.write_text(f"+{controller}")


def _make_group(path: Path, knobs: Mapping[str, str]) -> None:
    try:
        path.mkdir(exist_ok=True)
        for file, value in knobs.items():
            _write_knob(path / file, value)
    except OSError as error:
        raise ProviderError(f"the cgroup {path} cannot be set up: {error.strerror}") from error


def _write_knob(path: Path, value: str) -> None:
    if path.exists() or path.name not in _OPTIONAL_KNOBS:
        # not opened for creation: in a folder that is no cgroup a limit must fail, not become a file
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def ran_out_of_memory(groups: Iterable[Path]) -> bool:
    """Whether the kernel has killed something in one of these groups for want of memory."""
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            try:
                counts = dict(line.split() for line in (group / name).read_text().splitlines())
            except OSError:
                continue
            if counts.get("oom_kill", "0") != "0":
                return True
    return False
