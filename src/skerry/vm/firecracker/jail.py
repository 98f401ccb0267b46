"""Home of a machine's process: the machine's folder, or a jail in it that is the whole file system of the process.

All that it opens has the same name in every machine, jailed or not: a clone finds its drives where its template had
them. Files are linked into a jail, or copied from another file system. What machines share is only read and stays ours;
what is the machine's own becomes its uid's. Limits and network are the warden's matter: the process inherits them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from skerry.errors import InvalidSpec, ProviderError
from skerry.host import folders, sparse, uids
from skerry.vm import kvm, launch
from skerry.vm.base import CHANNEL, READY_PORT, Machine
from skerry.vm.firecracker.probe import Programs
from skerry.vm.folder import VmFolder, is_its_own
from skerry.vm.launch import Launch

_log = logging.getLogger("skerry.vm")

API = "api.sock"
_OPTIONS = ("--api-sock", API, "--level", "Warning")
"""Its own words are on the guest's console, which would be full of all that we ask it."""
_BASE = "jail"
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


def drive_path(name: str) -> str:
    """Name of a drive for the process."""
    return f"drive-{name}"


Home = tuple[Launch, str]
"""Process to launch, and the folder in the machine's that has its socket and its files."""


def prepare(folder: VmFolder, machine: Machine, files: Mapping[str, Path], programs: Programs) -> Home:
    """Prepare the home of a process; `files` are what it reads beside its drives, by the names that it gives them."""
    clear(folder)
    reason = why_no_jail(folder.path, programs)
    if programs.jailer is not None and reason is None:
        return _jailed(folder, machine, files, programs.firecracker, programs.jailer)
    _log.debug("no jail for the machine in %s: %s", folder.path, reason)
    return _plain(folder, machine, files, programs.firecracker)


def why_no_jail(folder: Path, programs: Programs) -> str | None:
    """Reason why machines in this folder run without a jail; None if they have one."""
    if programs.jailer is None:
        return "there is no jailer"
    if not uids.are_available():
        return "only root can make one"
    return why_not_there(folder)


def why_not_there(folder: Path) -> str | None:
    """Reason why no jail can be made there, as the jailer makes a device and a program in it; None if one can."""
    while not folder.exists():
        folder = folder.parent
    flags = os.statvfs(folder).f_flag
    for flag, lack in ((os.ST_NODEV, "has no devices"), (os.ST_NOEXEC, "runs no programs")):
        if flags & flag:
            return f"{folder} is on a file system that {lack}"
    return None


def clear(folder: VmFolder) -> None:
    """Remove what `prepare` made; drives stay."""
    with os.scandir(folder.path) as entries:
        links = [each.path for each in entries if stat.S_ISLNK(each.stat(follow_symlinks=False).st_mode)]
    for path in links:
        Path(path).unlink(missing_ok=True)
    folders.remove(folder.path / _BASE)


def _plain(folder: VmFolder, machine: Machine, files: Mapping[str, Path], program: Path) -> Home:
    """Home with links to what it may read: its uid may not walk to where that is."""
    shared = {**files, **{drive_path(each.name): Path(each.path) for each in machine.drives if "/" in each.path}}
    for number, name in enumerate(shared):
        folder.file(name).symlink_to(launch.file(number))
    for drive in machine.drives:
        if "/" not in drive.path:
            folder.file(drive_path(drive.name)).symlink_to(drive.path)
    started = Launch(
        argv=[str(program), *_OPTIONS, "--id", _id(folder)],
        files=tuple(shared.values()),
        own=tuple(drive.path for drive in machine.drives if not drive.read_only),
        publish=machine.publish,
        device_groups=kvm.access() or (),
    )
    return started, "."


def _jailed(folder: VmFolder, machine: Machine, files: Mapping[str, Path], program: Path, jailer: Path) -> Home:
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
    made.let_in(f"{CHANNEL}_{READY_PORT}")
    started = Launch(
        argv=made.argv(jailer, uid, _OPTIONS),
        publish=machine.publish,
        jail=launch.JailedProcess(uid=uid, pid_file=made.pid_file),
    )
    return started, str(made.root.relative_to(folder.path))


def _id(folder: VmFolder) -> str:
    """Id from the folder's path, which may have characters that an id cannot have."""
    return f"vm-{hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]}"


class Jail:
    """Jail in a machine's folder. `program` is Firecracker's real path, for the jailer names a folder by it."""

    def __init__(self, folder: Path, id: str, program: Path) -> None:
        if not _ID.fullmatch(id):
            raise InvalidSpec(f"the jail {id!r}: only letters, digits and - will do, and 64 of them", field="id")
        self.id = id
        self._folder = folder
        self._program = program
        self.base = folder / _BASE
        self.root = self.base / program.name / id / "root"

    @property
    def pid_file(self) -> str:
        """File with the pid of the process, from the machine's folder on."""
        return str((self.root / f"{self._program.name}.pid").relative_to(self._folder))

    def argv(self, jailer: Path, uid: int, options: Sequence[str]) -> list[str]:
        """`options` are Firecracker's own, with paths as they are in the jail."""
        who = ["--id", self.id, "--uid", str(uid), "--gid", str(uid)]
        where = ["--exec-file", str(self._program), "--chroot-base-dir", str(self.base)]
        # of the second version it would leave our group for one that is called as the program, if there is any
        return [str(jailer), *who, *where, "--cgroup-version", "1", "--new-pid-ns", "--", *options]

    def make(self) -> None:
        self.root.mkdir(mode=0o755, parents=True)
        self.base.chmod(0o711)

    def link(self, name: str, source: Path) -> None:
        """Link a file of ours that the machine only reads; everybody may: the jail's folders keep others away."""
        target = self.root / name
        try:
            if not source.stat().st_mode & 0o004:
                raise OSError(errno.EXDEV, "not readable for all")
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
                raise
            sparse.copy(source, target)
            target.chmod(0o444)

    def link_own(self, name: str, source: Path, uid: int) -> None:
        """Link a file that the machine writes to: a copy would lose its writes. Raises ProviderError."""
        target = self.root / name
        is_first = VmFolder(self._folder).read() is None
        found = source.lstat()
        if not (stat.S_ISREG(found.st_mode) if is_first else is_its_own(found)):
            raise ProviderError(f"{source} cannot be a drive: it is no file of the machine's own")
        os.link(source, target, follow_symlinks=False)
        os.chown(target, uid, uid)
        target.chmod(0o600)

    def show(self, name: str) -> None:
        """Show a socket of the jail in the machine's folder."""
        shown = self._folder / name
        shown.unlink(missing_ok=True)
        shown.symlink_to((self.root / name).relative_to(self._folder))

    def let_in(self, name: str) -> None:
        """Show a socket that we listen on in the machine's folder in the jail, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.link(self._folder / name, self.root / name, follow_symlinks=False)
