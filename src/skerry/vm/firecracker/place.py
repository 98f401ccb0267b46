"""Where a machine's process runs and what it finds there.

All that it opens has the same name in every machine, jailed or not: a clone finds its drives where the machine had
them that was saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from skerry.host import uids
from skerry.vm import kvm, launch
from skerry.vm.base import CHANNEL, READY_PORT, Machine
from skerry.vm.firecracker import jail
from skerry.vm.firecracker.jail import Jail
from skerry.vm.firecracker.programs import Programs
from skerry.vm.folder import VmFolder
from skerry.vm.launch import Launch

API = "api.sock"
_READY = f"{CHANNEL}_{READY_PORT}"
_DRIVE = "drive-"
_OPTIONS = ("--api-sock", API)


def drive_path(name: str) -> str:
    """What the process calls a drive."""
    return _DRIVE + name


class Place(NamedTuple):
    launch: Launch
    home: str
    """In the machine's folder: the folder that is the process's own, where its socket is and what it writes."""


def prepare(folder: VmFolder, machine: Machine, files: Mapping[str, Path], programs: Programs) -> Place:
    """Make all ready for the process; `files` are what it reads beside its drives, by the names that it gives them."""
    clear(folder)
    if programs.jailer is None or why_no_jail(folder.path, programs) is not None:
        return _plain(folder, machine, files, programs.firecracker)
    return _jailed(folder, machine, files, programs.firecracker, programs.jailer)


def why_no_jail(folder: Path, programs: Programs) -> str | None:
    """Why machines in this folder run without one; None if they do not."""
    if programs.jailer is None:
        return "there is no jailer"
    if not uids.are_available():
        return "only root can make one"
    return jail.why_no_devices(folder)


def clear(folder: VmFolder) -> None:
    """Remove what `prepare` made; drives stay."""
    with os.scandir(folder.path) as entries:
        links = [each.path for each in entries if stat.S_ISLNK(each.stat(follow_symlinks=False).st_mode)]
    for path in links:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    jail.remove(folder.path)


def _plain(folder: VmFolder, machine: Machine, files: Mapping[str, Path], program: Path) -> Place:
    """In the machine's folder, with links to what it may read: its uid may not walk to where that is."""
    shared = {**files, **{drive_path(each.name): Path(each.path) for each in machine.drives if "/" in each.path}}
    for number, name in enumerate(shared):
        folder.file(name).symlink_to(launch.file(number))
    for drive in machine.drives:
        if "/" not in drive.path:
            folder.file(drive_path(drive.name)).symlink_to(drive.path)
    access = kvm.access()
    started = Launch(
        argv=[str(program), *_OPTIONS, "--id", _id(folder)],
        files=tuple(shared.values()),
        own=tuple(drive.path for drive in machine.drives if not drive.read_only),
        publish=machine.publish,
        device_groups=() if access is None or access.group is None else (access.group,),
    )
    return Place(started, ".")


def _jailed(folder: VmFolder, machine: Machine, files: Mapping[str, Path], program: Path, jailer: Path) -> Place:
    uid = uids.take()
    made = Jail(folder.path, _id(folder), program)
    made.make()
    for name, path in files.items():
        made.link(name, path)
    for drive in machine.drives:
        if drive.read_only:
            made.link(drive_path(drive.name), folder.path / drive.path)
        else:
            made.link_own(drive_path(drive.name), folder.path / drive.path, uid)
    made.show(CHANNEL)
    made.let_in(_READY)
    started = Launch(
        argv=made.argv(jailer, uid, _OPTIONS),
        publish=machine.publish,
        jail=launch.Jail(uid=uid, pid_file=made.pid_file),
    )
    return Place(started, str(made.root.relative_to(folder.path)))


def _id(folder: VmFolder) -> str:
    """Of the folder's path, which may have characters that an id cannot have."""
    return f"vm-{hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]}"
