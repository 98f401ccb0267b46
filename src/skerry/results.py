"""What calls give back. A command that fails is a result; only a sandbox that fails is an error."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `exit_code` follows the shell: 128+n for death by signal n, 124 for a timeout."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """More output came than was kept; the command was not held up by it."""
    timed_out: bool = False
    signal: int | None = None
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr.decode(errors="replace")


class FileType(StrEnum):
    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR = "char"
    BLOCK = "block"


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the box sees it. Names that are not UTF-8 hold surrogate escapes, as `os.fsdecode` makes them."""

    name: str
    path: str
    type: FileType
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    """What a symbolic link points to."""

    @property
    def is_dir(self) -> bool:
        return self.type is FileType.DIR


class FileEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change below a watched folder; `overflow` means that some were missed: look again."""

    event: str
    path: str
    dir: bool = False


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the agent started, running or ended."""

    process: int
    pid: int
    argv: list[str]
    running: bool
    background: bool = False
    pty: bool = False
    tag: str | None = None
    started: float = 0.0
    exit_code: int | None = None
    signal: int | None = None


class DiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    used: int
    free: int


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the box uses, measured by its agent."""

    uptime_s: float
    cpu_percent: float
    cpu_s: float
    memory_bytes: int
    disk: DiskUsage
    processes: int
    load: float = 0.0

    @property
    def memory_mb(self) -> float:
        return self.memory_bytes / 2**20
