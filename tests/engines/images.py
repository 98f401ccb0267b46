"""Images for tests, made from Debian's packages, as no registry is asked."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .api import ask
from .daemons import NotStartable, find

_PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/:/bin/sh\n"
_GROUP = b"root:x:0:\napp:x:1000:\n"
_NO_SHELL = b"root:x:0:0:root:/:/busybox\n"

_CLIENTS = "python3,python3-pip,ca-certificates,curl,git,openssh-client,nodejs,npm,postgresql-client,busybox-static,hey"
"""What programs of a box use a network with."""
_DEBIAN = [
    "mmdebstrap",
    "--quiet",
    "--variant=minbase",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
    "--customize-hook=chroot $1 useradd --uid 1000 --user-group --no-create-home app",
    "--customize-hook=rm -rf $1/var/cache/apt/* $1/var/lib/apt/lists/*",
    "bookworm",
]
_MAKE_S = 600.0


def load(address: str, name: str) -> str:
    """Import `busybox`, `debian`, `clients` or `distroless` into an engine; the name that it has there."""
    full_name = _full_name(name)
    with _TARS[name]() as tar:
        ask(address, "POST", "/images/create", {"fromSrc": "-", "repo": full_name}, body=tar, timeout_s=300)
    return full_name


def _full_name(name: str) -> str:
    return f"skerry-test/{name}"


@contextlib.contextmanager
def busybox() -> Iterator[IO[bytes]]:
    """A shell with its usual programs, and users; no Python, nothing else."""
    applets = subprocess.run([_busybox_program(), "--list"], capture_output=True, check=True, timeout=10)
    files = {"etc/passwd": _PASSWD, "etc/group": _GROUP}
    links = {f"bin/{name}": "busybox" for name in applets.stdout.decode().split() if name != "busybox"}
    yield _tar("bin/busybox", files, links)


@contextlib.contextmanager
def _distroless() -> Iterator[IO[bytes]]:
    """One static program, `/busybox APPLET ...`, and no shell where one is looked for."""
    yield _tar("busybox", {"etc/passwd": _NO_SHELL}, {})


@contextlib.contextmanager
def _debian() -> Iterator[IO[bytes]]:
    """Debian 12 with Python. Made once, which takes a minute, and kept for other runs."""
    with gzip.open(make_debian()) as tar:
        yield tar  # type: ignore[misc]


@contextlib.contextmanager
def _clients() -> Iterator[IO[bytes]]:
    """The same with all that `tests/gate` lets reach the network."""
    with gzip.open(make_debian(_CLIENTS)) as tar:
        yield tar  # type: ignore[misc]


def make_clients() -> Path:
    """The file that is kept of Debian with clients of networks."""
    return make_debian(_CLIENTS)


def make_debian(packages: str = "python3", *hooks: str) -> Path:
    """The file that is kept; `hooks` are commands that change the folder `$1` at the end."""
    more = [f"--customize-hook={hook}" for hook in hooks]
    command = [*_DEBIAN[:3], f"--include={packages}", *_DEBIAN[3:-1], *more, _DEBIAN[-1]]
    recipe = hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    kept = _cache() / f"debian-{recipe}.tar.gz"
    if kept.exists():
        return kept
    if find("mmdebstrap") is None:
        raise NotStartable("no mmdebstrap here; scripts/install brings all that the tests need")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with locked(kept.parent):
        if not kept.exists():
            _make_debian(command, kept)
    return kept


def _make_debian(command: list[str], kept: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="making-", dir=kept.parent) as folder:
        tar, packed = Path(folder, "debian.tar"), Path(folder, "debian.tar.gz")
        subprocess.run([*command, str(tar)], check=True, timeout=_MAKE_S, stdin=subprocess.DEVNULL)
        with tar.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(kept)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time makes what is kept for all: workers, and other runs of the tests."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _tar(program: str, files: dict[str, bytes], links: dict[str, str]) -> IO[bytes]:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for folder in sorted({str(Path(path).parent) for path in (program, *files, *links)} - {"."}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, content in {program: Path(_busybox_program()).read_bytes(), **files}.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path == program else 0o644
            tar.addfile(entry, io.BytesIO(content))
        for path, target in links.items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    made.seek(0)
    return made


def _busybox_program() -> str:
    program = find("busybox")
    if program is None:
        raise NotStartable("no busybox here; scripts/install brings all that the tests need")
    return program


def _cache() -> Path:
    if os.geteuid() == 0:
        return Path("/var/cache/skerry-tests")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skerry-tests"


_TARS: dict[str, Callable[[], contextlib.AbstractContextManager[IO[bytes]]]] = {
    "busybox": busybox,
    "clients": _clients,
    "debian": _debian,
    "distroless": _distroless,
}
