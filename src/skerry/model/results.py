"""Results of calls. A command that fails is a result; only a sandbox that fails is an error."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

from skerry.errors import SkerryError
from skerry.model.spec import SandboxId

# Most of these numbers are an agent's, who may tell anything: one that no 64 bits hold breaks whatever prints it.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""A uid, a pid, the bits of a mode."""
Measure = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
Time = Annotated[float, msgspec.Meta(ge=-(2.0**63), le=2.0**63)]
ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]
Signal = Annotated[int, msgspec.Meta(ge=1, le=64)]


class Outcome(msgspec.Struct, frozen=True):
    """Result for one sandbox among many."""

    id: SandboxId
    error: SkerryError | None = None


class NotStarted(StrEnum):
    NOT_FOUND = "not_found"
    """There is no such program."""
    CANNOT_RUN = "cannot_run"
    """There is one, and the kernel does not run it: it is not executable, a folder, for another machine, ..."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of a command. `exit_code` follows the shell: 128+n for death by signal n, 124 for a timeout."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """More output came than was kept; the command was not held up by it. What was left out is told in its place."""
    stdout_cut: int = 0
    """Bytes that were left out of the middle of standard output."""
    stderr_cut: int = 0
    timed_out: bool = False
    signal: int | None = None
    duration_s: float = 0.0
    not_started: NotStarted | None = None
    """Why its program was not started: then the exit code, 127 or 126, is ours and no program's."""

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

    @property
    def output(self) -> bytes:
        """Both outputs: as they were written, if the command was run with `combined`; else one after the other."""
        return self.stdout + self.stderr


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
    size: Count
    mode: Id
    uid: Id
    gid: Id
    mtime: Time
    target: str | None = None
    """Target of a symbolic link."""

    @property
    def is_dir(self) -> bool:
        return self.type is FileType.DIR


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a symbolic link leads to, through all others."""

    path: str
    type: FileType
    mode: Id


class FileDetails(FileInfo, frozen=True, kw_only=True):
    """A file with what takes longer to find out."""

    owner: str
    """The name of its user, or the number where there is none."""
    group: str
    leads_to: LinkEnd | None = None
    """Of a symbolic link; None if that is nowhere."""
    xattrs: dict[str, bytes] = {}


class FileEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change below a watched folder; `overflow` means that some were missed: look again."""

    event: str
    path: str
    dir: bool = False


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the agent started, running or ended."""

    process: Count
    pid: Id
    argv: list[str]
    running: bool
    background: bool = False
    pty: bool = False
    tag: str | None = None
    started: Time = 0.0
    exit_code: ExitCode | None = None
    signal: Signal | None = None
    output_bytes: Count = 0
    """How much it has said so far; 0 if its agent is too old to tell."""


class DiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    total: Count
    used: Count
    free: Count


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Use of resources by a box, measured by its agent."""

    uptime_s: Measure
    cpu_percent: Measure
    cpu_s: Measure
    memory_bytes: Count
    disk: DiskUsage
    processes: Count
    load: Measure = 0.0

    @property
    def memory_mb(self) -> float:
        return self.memory_bytes / 2**20


class ServiceState(StrEnum):
    RUNNING = "running"
    WAITING = "waiting"
    """It has ended, and is started again in a while."""
    EXITED = "exited"
    """It has ended, and its restart policy leaves it at that."""
    FAILED = "failed"
    """It was started again and again and never ran for long, so that it was given up."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a sandbox's command, as its agent tells it."""

    state: ServiceState
    healthy: bool
    """It runs, and something listens on each of the sandbox's ports."""
    process: Count | None = None
    pid: Id | None = None
    restarts: Count = 0
    exit_code: ExitCode | None = None
    """Of its last end, as `signal` is."""
    signal: Signal | None = None
    started: Time = 0.0
    listening: list[Annotated[int, msgspec.Meta(ge=1, le=65535)]] = []
    """Those of the sandbox's ports on which something listens."""


class Progress(msgspec.Struct, frozen=True):
    """One step of long work; `done` and `total` are bytes or parts, where they are known."""

    message: str
    done: int | None = None
    total: int | None = None


OnProgress = Callable[[Progress], None]
