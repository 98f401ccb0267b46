"""A jail of Firecracker's own jailer: a folder that is the whole file system of the machine's process.

Everything that the process opens is linked into it, or copied where another file system has it. What machines share is
only read and stays ours; what is the machine's own becomes its uid's. The limits and the network are not the jailer's
matter here: the machine's warden holds them, and the process inherits them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from skerry.errors import ProviderError
from skerry.host import folders
from skerry.vm import sparse
from skerry.vm.firecracker.checks import check_jail_id

_BASE = "jail"
_CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


class Jail:
    """The jail of one machine, in the machine's folder. `program` is the real path of Firecracker's binary, for the
    jailer names a folder by it."""

    def __init__(self, folder: Path, id: str, program: Path) -> None:
        check_jail_id(id)
        self.id = id
        self._folder = folder
        self._program = program
        self.base = folder / _BASE
        self.root = self.base / program.name / id / "root"

    @property
    def pid_file(self) -> str:
        """Where the jailer says whom it has started, from the machine's folder on."""
        return str((self.root / f"{self._program.name}.pid").relative_to(self._folder))

    def argv(self, jailer: Path, uid: int, options: Sequence[str]) -> list[str]:
        """`options` are Firecracker's own, with paths as they are in the jail."""
        who = ["--id", self.id, "--uid", str(uid), "--gid", str(uid)]
        where = ["--exec-file", str(self._program), "--chroot-base-dir", str(self.base)]
        # It makes no group, as none is asked for; but it looks for the old kind unless told, which not every host has.
        groups = ["--cgroup-version", "2" if _CGROUP_V2.exists() else "1"]
        return [str(jailer), *who, *where, *groups, "--new-pid-ns", "--", *options]

    def make(self) -> None:
        self.root.mkdir(mode=0o755, parents=True)
        self.base.chmod(0o711)

    def link(self, name: str, source: Path) -> None:
        """A file of ours that the machine only reads. Its mode must let everybody read it: the jail's folders are what
        keeps others away."""
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
        """A file that the machine writes to: the same file, or its writes would be lost."""
        target = self.root / name
        os.link(source, target, follow_symlinks=False)
        if not stat.S_ISREG(target.lstat().st_mode):
            raise ProviderError(f"{source} cannot be a drive: it is no file")
        os.chown(target, uid, uid)
        target.chmod(0o600)

    def show(self, name: str) -> None:
        """Let a socket of the jail be found in the machine's folder."""
        shown = self._folder / name
        with contextlib.suppress(FileNotFoundError):
            shown.unlink()
        shown.symlink_to((self.root / name).relative_to(self._folder))

    def let_in(self, name: str) -> None:
        """Let a socket that we listen on in the machine's folder be found from the jail, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.link(self._folder / name, self.root / name, follow_symlinks=False)


def remove(folder: Path) -> None:
    """Whatever jail there is in a machine's folder."""
    folders.remove(folder / _BASE)


def why_no_devices(folder: Path) -> str | None:
    """The jailer makes devices in the jail, which not every file system has."""
    while not folder.exists():
        folder = folder.parent
    if os.statvfs(folder).f_flag & os.ST_NODEV:
        return f"{folder} is on a file system that has no devices"
    return None
