"""Limits that sandboxes are measured against: bare processes and bare boxes, started by a small program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

UNPRIVILEGED = 0x70000001 if os.geteuid() == 0 else -1
"""As whom a bare box starts: like ours, never as root."""
IN_PYTHON = (sys.executable, "-I", "-S", str(Path(__file__).with_name("spawner.py")))


class Spawner:
    """Starts one program again and again, and tells how long each took from start to end."""

    def __init__(self, *argv: str, uid: int = -1, by: Sequence[str] = IN_PYTHON) -> None:
        pipe = subprocess.PIPE
        self._argv = [*by, str(uid), *argv]
        # apart, so that Ctrl-C in a terminal is ours alone
        self._process = subprocess.Popen(self._argv, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)

    def once(self) -> float:
        """Seconds that one took. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b".")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._argv} ended with code {self._process.wait()}")
        return int(line) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def bare_box(by: Sequence[str] = IN_PYTHON) -> Spawner | None:
    """`bwrap true` with the namespaces of a `local` box, and nothing else; None where there is no bubblewrap."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return None
    links = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    namespaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    mounts = ["--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return Spawner(bwrap, *namespaces, *mounts, "/usr/bin/true", uid=UNPRIVILEGED, by=by)


def bare_process(by: Sequence[str] = IN_PYTHON) -> Spawner:
    return Spawner("/bin/true", by=by)
