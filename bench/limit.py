"""The physical limits that we are measured against: bare processes and bare boxes, started by a small C program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Self

HERE = Path(__file__).parent
UNPRIVILEGED = 0x70000001 if os.geteuid() == 0 else -1
"""As whom a bare box starts: like ours, never as root."""


@cache
def _program() -> list[str]:
    compiler = shutil.which("cc")
    if compiler is None:
        return [sys.executable, "-I", "-S", str(HERE / "spawner.py")]
    binary = Path(mkdtemp(prefix="skerry-bench-"), "spawner")
    subprocess.run([compiler, "-O2", "-o", str(binary), str(HERE / "spawner.c")], check=True)
    return [str(binary)]


def clean_up() -> None:
    if _program.cache_info().currsize and len(_program()) == 1:
        shutil.rmtree(Path(_program()[0]).parent)


class Spawner:
    """Starts one program again and again, and tells how long each took from start to end."""

    def __init__(self, *argv: str, uid: int = -1) -> None:
        pipe = subprocess.PIPE
        self._argv = [*_program(), str(uid), *argv]
        self._process = subprocess.Popen(self._argv, stdin=pipe, stdout=pipe, bufsize=0)

    def once(self) -> float:
        """Seconds."""
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


def bare_box() -> Spawner:
    """`bwrap true` with the namespaces of a `local` box, and nothing else."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SystemExit("bench: bwrap is missing; install the package bubblewrap")
    links = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    namespaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    mounts = ["--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return Spawner(bwrap, *namespaces, *mounts, "/usr/bin/true", uid=UNPRIVILEGED)


def bare_process() -> Spawner:
    return Spawner("/bin/true")
