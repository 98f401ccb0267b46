"""Control groups, v1 or v2, wherever this host lets us make them: found by making one."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry import aio
from skerry.errors import ProviderError
from skerry.host.processes import Process

_log = logging.getLogger("skerry.host")

_Mount = tuple[str, str, Path, set[str]]
"""Type, root within the hierarchy, mount point and options of a cgroup mount."""
CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_TRY = "skerry-try-"
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN, errno.EINTR}
"""Errors of a host that has run out of something now, which say nothing of what it offers."""


class GroupLimits(msgspec.Struct, frozen=True):
    """Limits of a box: bytes, processes and, if it has one, processor time."""

    memory: int
    pids: int
    cpus: float | None

    def knobs(self, controller: str, version: int) -> Mapping[str, str]:
        """The files of a controller and their values, in the order in which they are written."""
        memory, quota = str(self.memory), int((self.cpus or 0) * _PERIOD_US)
        tables: Mapping[tuple[str, int], Mapping[str, str]] = {
            ("memory", 1): {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
            ("memory", 2): {"memory.max": memory, "memory.swap.max": "0"},
            ("pids", 1): {"pids.max": str(self.pids)},
            ("pids", 2): {"pids.max": str(self.pids)},
            ("cpu", 1): {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)},
            ("cpu", 2): {"cpu.max": f"{quota} {_PERIOD_US}"},
        }
        return tables[controller, version]

    def controllers(self) -> tuple[str, ...]:
        return CONTROLLERS if self.cpus is not None else ("memory", "pids")

    def are_held_by(self, group: Path, controller: str, version: int) -> bool:
        """Whether the kernel says that this group allows no more; of a missing group or file it says nothing."""
        try:
            if controller == "cpu":
                files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = " ".join((group / file).read_text() for file in files).split()
                # engines count in hundredths of a processor
                return _number(quota) <= ((self.cpus or 0) + 0.01) * int(period)
            return all(
                _number((group / file).read_text()) <= int(most)
                for file, most in self.knobs(controller, version).items()
                if (group / file).exists() or file not in _OPTIONAL_KNOBS
            )
        except FileNotFoundError:
            return False


# a kernel built without swap accounting lacks these, and then has no swap to limit
_OPTIONAL_KNOBS = {"memory.memsw.limit_in_bytes", "memory.swap.max"}


class Parent(NamedTuple):
    """A folder in which groups can be made, for one controller."""

    path: Path
    version: int


class Hierarchies(NamedTuple):
    """Parents of groups for each controller, and the reasons for those that have none."""

    parents: dict[str, Parent]
    why_not: dict[str, str]

    def groups(self, name: str, limits: GroupLimits) -> list[Path]:
        """Groups of a box of this name; made by `make`."""
        return list(dict.fromkeys(group for _, group, _ in self._by_controller(name, limits)))

    def _by_controller(self, name: str, limits: GroupLimits) -> Iterator[tuple[str, Path, int]]:
        for controller in limits.controllers():
            if parent := self.parents.get(controller):
                yield controller, parent.path / name, parent.version

    def make(self, name: str, limits: GroupLimits, only: int | None = None) -> None:
        """Make the groups and set their limits; `only` those of one version. Raises ProviderError."""
        for controller, group, version in self._by_controller(name, limits):
            if only not in (None, version):
                continue
            try:
                group.mkdir(exist_ok=True)
                for file, value in limits.knobs(controller, version).items():
                    _write_knob(group / file, value)
            except OSError as error:
                raise ProviderError(f"the cgroup {group} cannot be set up: {error.strerror}") from error

    def confine(self, pid: int, name: str, limits: GroupLimits) -> None:
        """Make the groups, and put a process into them. Retries, as what cleans up after others on a host may take a
        group away that is still empty. Raises ProviderError."""
        for is_last in (False, False, True):
            try:
                self.make(name, limits)
                place(self.groups(name, limits), pid)
                break
            except ProviderError as error:
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise
                _log.debug("%s: retrying: %s", name, error)

    @contextlib.contextmanager
    def tasks(self, name: str, limits: GroupLimits) -> Iterator[list[int]]:
        """Open files of groups of version 1: who writes 0 to them while it has one thread is in them, and waits for
        nobody. Raises ProviderError."""
        with contextlib.ExitStack() as opened:
            yield [_opened(group / "tasks", os.O_WRONLY, opened) for group in self._groups_of(1, name, limits)]

    @contextlib.contextmanager
    def folder(self, name: str, limits: GroupLimits) -> Iterator[int | None]:
        """Open the group of version 2, if there is one, for a process to be forked into. Raises ProviderError."""
        with contextlib.ExitStack() as opened:
            groups = self._groups_of(2, name, limits)
            yield _opened(groups[0], os.O_RDONLY | os.O_DIRECTORY, opened) if groups else None

    def _groups_of(self, version: int, name: str, limits: GroupLimits) -> list[Path]:
        return list(dict.fromkeys(group for _, group, each in self._by_controller(name, limits) if each == version))

    def check(self, pid: int, name: str, limits: GroupLimits) -> None:
        """Raise ProviderError unless the kernel says that the process is in its groups, and that they limit it."""
        for controller, group, version in self._by_controller(name, limits):
            if pid not in members([group]):
                raise ProviderError(f"process {pid} is not in the cgroup {group} that it was put into")
            if not limits.are_held_by(group, controller, version):
                raise ProviderError(f"the cgroup {group} does not have the limits that were set")


def find(proc: Path = Path("/proc/self")) -> Hierarchies:
    """Find what this process may use: a group is made and removed again in each candidate. Ask `scope.holder()`, which
    does this once for all threads. Raises OSError where the host has run out of something."""
    mounts = _mounts((proc / "mountinfo").read_text())
    own = _own_groups((proc / "cgroup").read_text())
    found = Hierarchies({}, {})
    for controller in CONTROLLERS:
        reason = "the kernel offers no such cgroup controller here"
        for parent in _candidates(controller, mounts, own):
            problem = _try_out(parent, controller)
            if problem is None:
                found.parents[controller] = parent
                break
            reason = f"no cgroup can be made in {parent.path}: {problem}"
        else:
            found.why_not[controller] = reason
    return found


def place(groups: Iterable[Path], pid: int) -> None:
    """Put a process into the groups. Raises ProviderError."""
    for group in groups:
        try:
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise ProviderError(f"process {pid} cannot be put into the cgroup {group}: {error.strerror}") from error


def seen(pid: int, limits: GroupLimits, controllers: Iterable[str], proc: Path = Path("/proc")) -> dict[str, Path]:
    """Find the group that holds somebody else's process to each limit, and is not ours too; none of a controller whose
    groups cannot be seen from here. Raises ProviderError if a limit is not held."""
    try:
        mounts = _mounts((proc / "self/mountinfo").read_text())
        ours = _own_groups((proc / "self/cgroup").read_text())
        its = _own_groups((proc / str(pid) / "cgroup").read_text())
    except OSError as error:
        raise ProviderError(f"the cgroups of process {pid} cannot be read: {error.strerror}") from error
    found: dict[str, Path] = {}
    for controller in controllers:
        chain = list(_chain(controller, mounts, its))
        own = (group for group in chain if group not in set(_chain(controller, mounts, ours)))
        holding = next((path for path, version in own if limits.are_held_by(path, controller, version)), None)
        if holding is not None:
            found[controller] = holding
        elif chain:
            raise ProviderError(f"no cgroup holds process {pid} to its limit of {controller}")
    return found


def ours(controller: str, proc: Path = Path("/proc/self")) -> list[Parent]:
    """The groups of this process for one controller, its own first, as far as they are seen from here. Raises
    OSError."""
    return [*_chain(controller, _mounts((proc / "mountinfo").read_text()), _own_groups((proc / "cgroup").read_text()))]


def members(groups: Iterable[Path]) -> set[int]:
    """Processes in any of the groups."""
    pids: set[int] = set()
    for group in groups:
        with contextlib.suppress(OSError):  # it was never made, or is gone already
            pids.update(map(int, (group / "cgroup.procs").read_text().split()))
    return pids


def remove(groups: Iterable[Path], timeout_s: float) -> None:
    """Remove groups whose processes are dead; the kernel may need a moment to let go of them. Raises ProviderError."""
    deadline = time.monotonic() + timeout_s
    for group in groups:
        delays = aio.backoff(0.001, 0.05, deadline - time.monotonic())
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if (delay_s := next(delays, None)) is None:
                    raise ProviderError(f"the cgroup {group} cannot be removed: {error.strerror}") from error
                _log.debug("the cgroup %s is not removed yet: %s", group, error.strerror)
                time.sleep(delay_s)


def _mounts(mountinfo: str) -> list[_Mount]:
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
    lines = (line.split(":", 2) for line in text.splitlines())
    return {name: path for _, names, path in lines for name in names.split(",")}


def _candidates(controller: str, mounts: list[_Mount], own: dict[str, str]) -> list[Parent]:
    """v1: below our own group, so that limits set on us bind the box too. v2: the highest group above us that we may
    use, for a group with processes cannot have limited children, and what is below a login dies with it."""
    found: list[Parent] = []
    for kind, root, point, options in mounts:
        here = _below(point, root, own.get(controller if kind == "cgroup" else "", "")) or point
        if kind == "cgroup" and controller in options:
            found.append(Parent(here, 1))
        elif kind == "cgroup2" and controller in _words(point / "cgroup.controllers"):
            found.extend(Parent(each, 2) for each in reversed([*_up(here, point)]))
    return found


def _chain(controller: str, mounts: list[_Mount], own: dict[str, str]) -> Iterator[Parent]:
    """Yield the groups of a process for one controller that can be seen from here, its own first."""
    version = 1 if controller in own else 2
    for kind, root, point, options in mounts:
        if kind == ("cgroup" if version == 1 else "cgroup2") and (version == 2 or controller in options):
            here = _below(point, root, own.get(controller if version == 1 else "", ""))
            yield from () if here is None else (Parent(each, version) for each in _up(here, point))
            return


def _below(point: Path, root: str, path: str) -> Path | None:
    """Path of a group of a hierarchy whose part `root` is mounted at `point`; None if it is not in that part."""
    root = root.rstrip("/")
    is_inside = path == (root or "/") or path.startswith(f"{root}/")
    return point / path[len(root) :].lstrip("/") if is_inside and ".." not in path.split("/") else None


def _up(here: Path, point: Path) -> Iterator[Path]:
    yield here
    yield from (above for above in here.parents if above == point or point in above.parents)


def _try_out(parent: Parent, controller: str) -> str | None:
    """Use a group there for a moment; returns None or what is wrong. Retries where somebody else's sweep, which sees
    other processes, took it for a dead one's."""
    _sweep(parent.path)
    for tries_left in (2, 1, 0):
        try:
            return _use_for_a_moment(parent, controller)
        except FileNotFoundError as error:
            if not tries_left or not parent.path.exists():
                return error.strerror
            _log.debug("a trial group in %s was taken away; retrying", parent.path)
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise
            return error.strerror or str(error)
    return None


def _use_for_a_moment(parent: Parent, controller: str) -> str | None:
    me = Process.of(os.getpid())
    group = parent.path / f"{_TRY}{os.getpid()}-{me.start if me else 0}-{controller}-{secrets.token_hex(4)}"
    if parent.version == 2:
        control = parent.path / "cgroup.subtree_control"
        if controller not in _words(control):
            control.write_text(f"+{controller}")
        if not os.access(parent.path / "cgroup.procs", os.W_OK):
            return "processes may not be moved there"
    group.mkdir()
    try:
        for file, value in GroupLimits(memory=64 << 20, pids=16, cpus=0.5).knobs(controller, parent.version).items():
            _write_knob(group / file, value)
    finally:
        with contextlib.suppress(FileNotFoundError):
            group.rmdir()
    return None


def _sweep(parent: Path) -> None:
    """Remove groups of processes that were killed while they tried one out."""
    for group in parent.glob(f"{_TRY}*"):
        pid, start, *_ = (*group.name.removeprefix(_TRY).split("-"), "")
        if not (pid.isdigit() and start.isdigit() and Process(int(pid), int(start)).is_alive()):
            try:
                group.rmdir()
                _log.info("removed the abandoned trial group %s", group)
            except OSError as error:
                _log.debug("the trial group %s is not removed: %s", group, error)


def _opened(path: Path, flags: int, opened: contextlib.ExitStack) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise ProviderError(f"the cgroup {path} cannot be used: {error.strerror}") from error
    opened.callback(os.close, fd)
    return fd


def _write_knob(path: Path, value: str) -> None:
    if path.exists() or path.name not in _OPTIONAL_KNOBS:
        # not opened for creation: in a folder that is no cgroup a limit must fail, not become a file
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as file:
            file.write(value.encode())


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (FileNotFoundError, PermissionError):
        return []


def _number(text: str) -> float:
    """The value of a knob; `max` and, of a quota, -1 are no limit."""
    return math.inf if text.strip() in ("max", "-1") else int(text)


def ran_out_of_memory(groups: Iterable[Path]) -> bool:
    """Whether the kernel has killed something in one of these groups for want of memory."""
    for path in (group / name for group in groups for name in ("memory.events", "memory.oom_control")):
        with contextlib.suppress(OSError):
            if re.search(r"^oom_kill (?!0$)", path.read_text(), re.MULTILINE):
                return True
    return False
