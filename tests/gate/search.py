"""Looks for a value wherever a box, or what is kept of it, could hold it; from the host, so that looking brings it
nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PIECE = 1 << 22
_NOT_FILES = ("proc", "sys", "dev", "usr")
"""What lies below a box's root and is no file of its own."""


def processes_of(id: str) -> set[int]:
    """Every process of a box: those that bear its id, and all in their namespaces."""
    marked = {pid for pid in _pids() if id.encode() in _read(f"/proc/{pid}/cmdline")}
    spaces = {_space(pid) for pid in marked} - {_space(os.getpid()), ""}
    return {pid for pid in _pids() if _space(pid) in spaces}


def in_processes(value: bytes, pids: set[int]) -> list[str]:
    """Places of /proc that hold a value: environment, arguments, and all of the memory that can be read."""
    found = []
    for pid in pids:
        names = ("environ", "cmdline", "status", "mountinfo", "comm")
        found += [f"{pid}: {name}" for name in names if value in _read(f"/proc/{pid}/{name}")]
        found += [f"{pid}: memory" for piece in _memory(pid) if value in piece][:1]
    return found


def in_files(value: bytes, folder: str) -> list[str]:
    """Files below a folder that hold a value, in their names or their content."""
    found = []
    for at, folders, files in os.walk(folder):
        found += [f"{at}/{name}" for name in (*folders, *files) if value in os.fsencode(name)]
        found += [f"{at}/{name}" for name in files if _holds(f"{at}/{name}", value)]
    return found


def in_root_of(value: bytes, pid: int) -> list[str]:
    """Files of a box that hold a value, by the root of one of its processes."""
    root = f"/proc/{pid}/root"
    own = [name for name in os.listdir(root) if name not in _NOT_FILES and not os.path.islink(f"{root}/{name}")]
    return [place for name in own for place in in_files(value, f"{root}/{name}")]


def _holds(path: str, value: bytes) -> bool:
    with suppress(OSError):
        if not os.path.isfile(path) or os.path.islink(path):
            return False
        with open(path, "rb") as file:
            kept = b""
            while piece := file.read(_PIECE):
                if value in kept + piece:
                    return True
                kept = piece[-len(value) :]
    return False


def _memory(pid: int) -> Iterator[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if "r" in line.split()[1] and "[v" not in line and end < 1 << 63:
                with suppress(OSError, ValueError, OverflowError):
                    memory.seek(start)
                    yield memory.read(end - start)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
