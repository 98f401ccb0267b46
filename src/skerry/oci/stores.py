"""Files of a source of an image, in a folder or a tar, compressed or not. None is trusted."""

from __future__ import annotations

import bz2
import errno
import gzip
import importlib
import io
import lzma
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO, Protocol, cast

from skerry.errors import InvalidSpec
from skerry.oci import packing

MAX_BYTES = 1 << 36
"""No image is larger than 64 GiB; what says it is means harm, or is a mistake."""
MAX_ENTRIES = 2_000_000
MAX_TEXT = 1 << 22
"""Of a manifest or a configuration."""
_MAX_READ = 1 << 23
_MAX_NAMES = 1 << 28
"""Of all names and attributes of a tar, which are kept in memory."""
_MAX_PATH = 4096
_PER_ATTRIBUTE = 100
_STEP = 1 << 24
_ZSTD = b"\x28\xb5\x2f\xfd"
ZSTD_MODULES = ("compression.zstd", "backports.zstd")


class ImageFiles(Protocol):
    """Files by their names, wherever they lie."""

    def size(self, name: str) -> int:
        """Bytes of a file, or -1 if there is none of that name."""

    def place(self, name: str) -> int:
        """Order of a file among the others in which reading is the cheapest."""

    def open(self, name: str) -> BinaryIO: ...


class FolderStore:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def size(self, name: str) -> int:
        try:
            found = os.lstat(self._folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return -1
        return found.st_size if stat.S_ISREG(found.st_mode) else -1

    def place(self, name: str) -> int:
        return 0

    def open(self, name: str) -> BinaryIO:
        return packing.open_regular(str(self._folder / name))


class TarStore:
    """The files of a tar, whose entries are known after one pass over it."""

    def __init__(self, path: Path, tar: tarfile.TarFile) -> None:
        self._path = path
        self._tar = tar
        self.members = list(self._scan())
        self._files = self._by_name()

    def _scan(self) -> Iterator[tarfile.TarInfo]:
        total = named = 0
        bounded = cast("_Bounded", self._tar.fileobj)
        for number, member in enumerate(self._tar):
            total += member.size
            named += len(member.name) + len(member.linkname)
            named += sum(_PER_ATTRIBUTE + len(key) + len(value) for key, value in member.pax_headers.items())
            if total > MAX_BYTES or member.size < 0 or number >= MAX_ENTRIES or named > _MAX_NAMES:
                raise InvalidSpec(f"{self._path} claims to have more in it than any image has; it was not imported")
            if len(member.name) > _MAX_PATH or len(member.linkname) > _MAX_PATH:
                raise InvalidSpec(f"{self._path} has a path that is too long: {member.name[:60]!r}...")
            bounded.left_of_header = _MAX_READ
            yield member
        bounded.left_of_header = None

    def _by_name(self) -> dict[str, tarfile.TarInfo]:
        """Links that lead to another file of the tar stand for it: older engines write a layer once that way."""
        named = {posixpath.normpath(member.name): member for member in self.members}
        files = {name: member for name, member in named.items() if member.isreg()}
        for name, member in named.items():
            if member.issym() or member.islnk():
                folder = posixpath.dirname(name) if member.issym() else ""
                target = files.get(posixpath.normpath(posixpath.join(folder, member.linkname)))
                if target is not None:
                    files[name] = target
        return files

    def size(self, name: str) -> int:
        member = self._files.get(name)
        return -1 if member is None else member.size

    def place(self, name: str) -> int:
        return self._files[name].offset

    def open(self, name: str) -> BinaryIO:
        return self.content(self._files[name])

    def content(self, member: tarfile.TarInfo) -> BinaryIO:
        return cast("BinaryIO", self._tar.extractfile(member))


class _Bounded(io.RawIOBase):
    """A file with bounded reads: tarfile takes a header of any length into memory, at once or in pieces."""

    def __init__(self, file: BinaryIO, stop: Event) -> None:
        self._file = file
        self._stop = stop
        self.left_of_header: int | None = _MAX_READ
        """None once all headers are read, and content may be."""

    def read(self, size: int = -1) -> bytes:
        self._go_on()
        if self.left_of_header is not None:
            self.left_of_header -= size
        if not 0 <= size <= _MAX_READ or (self.left_of_header or 0) < 0:
            raise tarfile.ReadError("an entry with a header that is too long")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        at = self._file.tell()
        at = at if at <= offset else 0
        while offset - at > _STEP:  # all that lies before may have to be inflated
            self._go_on()
            at = self._file.seek(at + _STEP)
        return self._file.seek(offset, whence)

    def seekable(self) -> bool:
        return True

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")

    def tell(self) -> int:
        return self._file.tell()


def inflated(file: BinaryIO) -> BinaryIO:
    """Inflate a file if it is compressed. To go back in it costs, as all before has to be inflated again."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    if start.startswith(b"\xfd7zXZ\x00"):
        return cast("BinaryIO", lzma.LZMAFile(file))
    if start.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(file))
    if not start.startswith(_ZSTD):
        return file
    for name in ZSTD_MODULES:
        with suppress(ImportError):
            return cast("BinaryIO", importlib.import_module(name).ZstdFile(file))
    raise InvalidSpec(
        "it is compressed with zstd, which this Python cannot read: "
        "`pip install backports.zstd`, or inflate it with `zstd -d` first"
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise InvalidSpec as `packing.reading` does, also for what is damaged: tarfile raises anything then."""
    try:
        with packing.reading(path):
            yield
    except Exception as error:
        known = (zlib.error, lzma.LZMAError, ValueError, LookupError, ArithmeticError, RecursionError)
        if not isinstance(error, known) and type(error).__name__ != "ZstdError":
            raise
        raise InvalidSpec(f"{path} is damaged: {error}"[:500]) from error


@contextmanager
def opened(source: Path, stop: Event) -> Iterator[FolderStore | TarStore]:
    """Open a folder or a tar. To look through a long tar takes its time, which `stop` cuts short."""
    if source.is_dir():
        yield FolderStore(source)
        return
    with open(source, "rb") as file, _tar(source, file, stop) as tar:
        yield TarStore(source, tar)


@contextmanager
def layer(store: ImageFiles, name: str, stop: Event) -> Iterator[TarStore]:
    """Open a tar that is a file of another store."""
    with store.open(name) as file, tarfile.open(fileobj=_Bounded(inflated(file), stop), mode="r:", errorlevel=2) as tar:
        yield TarStore(Path(name), tar)


def _tar(source: Path, file: BinaryIO, stop: Event) -> tarfile.TarFile:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise InvalidSpec(f"{source} is neither a file nor a folder")
    try:
        return tarfile.open(fileobj=_Bounded(inflated(file), stop), mode="r:", errorlevel=2)
    except tarfile.ReadError as error:
        raise InvalidSpec(
            f"{source} is no tar ({error}): an image archive, an OCI layout or a root file system is imported"
        ) from error


def text(store: ImageFiles, name: str) -> bytes:
    """Read a small file whole. Raises InvalidSpec if it is missing or too large."""
    size = store.size(name)
    if not 0 <= size <= MAX_TEXT:
        raise InvalidSpec(f"{name} is missing" if size < 0 else f"{name} is too large: {size} bytes")
    with store.open(name) as file:
        return file.read(size)
