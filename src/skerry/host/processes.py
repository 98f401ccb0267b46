"""Host processes by identity: a pid alone may be another's by now; pid, start time and boot together may not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator

import msgspec

from skerry import mac


class Process(msgspec.Struct, frozen=True):
    """Identity of a process within one boot."""

    pid: int
    start: int
    """Clock ticks from boot to its start."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        start = _start_time(pid)
        return None if start is None else cls(pid, start)

    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start


def wait_until_dead(processes: Iterable[Process], timeout_s: float, *, kill: bool = False) -> bool:
    """Wait until all are dead, by SIGKILL if `kill`; False if some are not by then."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    pidfds = [pidfd for process in processes if (pidfd := _open_same(process)) is not None]
    waiting = len(pidfds)
    try:
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        while waiting:
            ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ended:
                return False
            for pidfd, _ in ended:
                poll.unregister(pidfd)
                waiting -= 1
        return True
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def send(process: Process, number: signal.Signals) -> bool:
    """Send it a signal; False if it has ended."""
    pidfd = _open_same(process)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)


def is_halted(process: Process) -> bool:
    """Whether a signal has stopped it, with each of its threads."""
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")
    except OSError:
        return False
    states = (_read_bytes(f"/proc/{process.pid}/task/{each}/stat").rpartition(b")")[2].split() for each in threads)
    return all(state[:1] == [b"T"] for state in states) and process.is_alive()


def find_by_arguments(tail: tuple[str, ...], count: int) -> Iterator[Process]:
    """Find our own or, for root, anyone's processes whose last `count` arguments begin with `tail`, word for word."""
    words = [word.encode() for word in tail]
    for pid in _pids():
        arguments = _read_bytes(f"/proc/{pid}/cmdline").split(b"\0")[:-1]
        if len(arguments) >= count and arguments[-count:][: len(words)] == words and (process := Process.of(pid)):
            yield process


def find_by_uid(uid: int) -> Iterator[Process]:
    marker = f"\nUid:\t{uid}\t".encode()
    for pid in _pids():
        if marker in _read_bytes(f"/proc/{pid}/status") and (process := Process.of(pid)):
            yield process


def children(pid: int) -> list[int]:
    """The living children of a process that has one thread. Raises OSError if it is gone, or the kernel does not
    tell."""
    with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
        return [child for child in map(int, file.read().split()) if _start_time(child) is not None]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _start_time(pid: int) -> int | None:
    if sys.platform == "darwin":
        return mac.start_time(pid)
    fields = _read_bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    # a zombie has ended: only its parent has not looked yet
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _open_same(process: Process) -> int | None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.is_alive():
        return pidfd
    os.close(pidfd)
    return None
