"""Work folders that are bounded and outlive a stop: one disk image for each box, mounted on the host, bound into it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from skerry.errors import Conflict, InvalidSpec, ProviderError
from skerry.providers import disks
from skerry.spec import SandboxId, parse_id

_REMOVE_TIMEOUT_S = 10.0
_LABELS = "labels.json"


class Homes:
    """Only for a daemon that shares our files, and only where we are root."""

    def __init__(self, state_dir: Path, cache: Path) -> None:
        self._state_dir = state_dir
        self._cache = cache

    def point(self, id: SandboxId) -> Path:
        return disks.MOUNTS / id / "home"

    def reserve(self, id: SandboxId, labels: Mapping[str, str]) -> None:
        """What it is comes before it is, so that it can be found: an empty folder that an engine can be told of."""
        folder = self._state_dir / id
        with _told():
            try:
                folder.mkdir(mode=0o700, parents=True)
            except FileExistsError:
                raise Conflict(f"there is a box {id} already") from None
            (folder / _LABELS).write_bytes(msgspec.json.encode(dict(labels)))
            self.point(id).mkdir(mode=0o711, parents=True, exist_ok=True)

    def make(self, id: SandboxId, size: int, uid: int, gid: int) -> None:
        """The disk of a new box, empty and the user's."""
        with _told():
            _copy_sparse(self._template(size), self._image(id))
            self.attach(id)
            (self.point(id) / "lost+found").rmdir()
            os.chown(self.point(id), uid, gid)

    def attach(self, id: SandboxId) -> None:
        """Mount it, unless it is: the host may have been restarted since."""
        point = self.point(id)
        if self._image(id).exists():
            point.mkdir(mode=0o711, parents=True, exist_ok=True)
            if not disks.is_mounted(point):
                disks.mount(self._image(id), point)

    def remove(self, id: SandboxId) -> None:
        """However much there is of it; another program may be at the same."""
        point, folder = self.point(id), self._state_dir / id
        if os.geteuid() == 0:
            with suppress(FileNotFoundError):
                disks.unmount(point, time.monotonic() + _REMOVE_TIMEOUT_S)
                point.rmdir()
            with suppress(FileNotFoundError):
                point.parent.rmdir()
        while folder.exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def all(self) -> dict[SandboxId, dict[str, str]]:
        """The boxes that have one, with their labels."""
        found = {}
        if self._state_dir.is_dir():
            for folder in self._state_dir.glob("*-*-*-*-*"):
                with suppress(InvalidSpec):  # it is none of ours
                    found[parse_id(folder.name)] = _labels(folder)
        return found

    def _image(self, id: SandboxId) -> Path:
        return self._state_dir / id / "home.ext4"

    def _template(self, size: int) -> Path:
        """An empty image that others are copies of: making a file system takes longer than copying the few blocks."""
        template = self._cache / f"home-{size}.ext4"
        if not template.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self._cache) as aside:
                made = Path(aside, template.name)
                disks.make(made, size, 0, 0)
                made.rename(template)
        return template


def _labels(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / _LABELS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ProviderError(f"the disk of a box could not be made{where}: {error.strerror}") from error


def _copy_sparse(source: Path, target: Path) -> None:
    """Only what is written, at its place."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size)
        at = 0
        while True:
            try:
                at = os.lseek(reader.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but holes from here on
                return
            end = os.lseek(reader.fileno(), at, os.SEEK_HOLE)
            os.lseek(writer.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(writer.fileno(), reader.fileno(), at, end - at)  # also to another file system
