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

from skerry.errors import Conflict, ProviderError
from skerry.host import disks, folders, sparse
from skerry.model.spec import SandboxId
from skerry.providers.base import log

_LABELS = "labels.json"


class Homes:
    """Home folders on disks of their own; only for a daemon that shares our files, and only for root."""

    def __init__(self, state_dir: Path, cache: Path) -> None:
        self._state_dir = state_dir
        self._cache = cache

    def point(self, id: SandboxId) -> Path:
        return disks.MOUNTS / id / "home"

    def reserve(self, id: SandboxId, labels: Mapping[str, str]) -> None:
        """Make an empty folder with the labels of the box before anything else, so that an orphan can be found."""
        folder = self._state_dir / id
        with _translating_errors():
            try:
                folders.make(self._state_dir)
                folder.mkdir(mode=0o700)
            except FileExistsError:
                raise Conflict(f"there is a box {id} already") from None
            (folder / _LABELS).write_bytes(msgspec.json.encode(dict(labels)))
            self._make_point(id)

    def make(self, id: SandboxId, size: int, uid: int, gid: int) -> None:
        """Make the disk of a new box, empty and the user's."""
        with _translating_errors():
            sparse.copy(self._template(size), self._image(id))
            self.attach(id)
            (self.point(id) / "lost+found").rmdir()
            os.chown(self.point(id), uid, gid)

    def attach(self, id: SandboxId) -> None:
        """Mount it, unless it is: the host may have been restarted since."""
        if self._image(id).exists():
            point = self._make_point(id)
            if not disks.is_mounted(point):
                disks.mount(self._image(id), point)
                log.debug("mounted the disk of sandbox %s", id)

    def _make_point(self, id: SandboxId) -> Path:
        """Only the daemon, which is root, has to find its way there."""
        disks.make_folder(id)
        self.point(id).mkdir(mode=0o700, exist_ok=True)
        return self.point(id)

    def remove(self, id: SandboxId) -> None:
        """Remove however much there is of it; another program may do the same."""
        point, folder = self.point(id), self._state_dir / id
        if os.geteuid() == 0:
            if point.parent.exists():
                with suppress(FileNotFoundError):
                    disks.unmount(point, time.monotonic() + 10.0)
                    point.rmdir()
            with suppress(FileNotFoundError):
                point.parent.rmdir()
        while folder.exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def all(self) -> dict[SandboxId, dict[str, str]]:
        """The boxes that have one, with their labels."""
        return {id: _labels(self._state_dir / id) for id in folders.ids_in(self._state_dir)}

    def _image(self, id: SandboxId) -> Path:
        return self._state_dir / id / "home.ext4"

    def _template(self, size: int) -> Path:
        """The empty image to copy: making a file system takes longer than copying its few blocks."""
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
    except (OSError, msgspec.DecodeError) as error:
        log.debug("the labels of sandbox %s cannot be read: %s", folder.name, error)
        return {}


@contextmanager
def _translating_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ProviderError(f"the disk of a box could not be made{where}: {error.strerror}") from error
