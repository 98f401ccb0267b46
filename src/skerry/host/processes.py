"""Host processes by identity: a pid alone may be another's by now; pid, start time and boot together may not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True):
    pid: int
    start: int
    """Clock ticks from boot to its start."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        start = _start_time(pid)
        return None if start is None else cls(pid, start)

    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def kill_and_wait(processes: Iterable[Process], timeout_s: float) -> bool:
    """SIGKILL them and wait until all are dead; False if some are not by then."""
    pidfds = [pidfd for process in processes if (pidfd := _open_same(process)) is not None]
    try:
        for pidfd in pidfds:
            _send_kill(pidfd)
        return _wait_until_dead(pidfds, time.monotonic() + timeout_s)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def wait_until_dead(process: Process, timeout_s: float) -> bool:
    """False if it is not by then."""
    pidfd = _open_same(process)
    if pidfd is None:
        return True
    try:
        return _wait_until_dead([pidfd], time.monotonic() + timeout_s)
    finally:
        os.close(pidfd)


def find_by_arguments(tail: tuple[str, ...], count: int) -> Iterator[Process]:
    """Our own or, for root, anyone's processes whose last `count` arguments begin with `tail`, word for word."""
    words = [word.encode() for word in tail]
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            arguments = _read_bytes(f"/proc/{entry}/cmdline").split(b"\0")[:-1]
            if len(arguments) >= count and arguments[-count:][: len(words)] == words:
                process = Process.of(int(entry))
                if process is not None:
                    yield process


def find_by_uid(uid: int) -> Iterator[Process]:
    marker = f"\nUid:\t{uid}\t".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and marker in _read_bytes(f"/proc/{entry}/status"):
            process = Process.of(int(entry))
            if process is not None:
                yield process


def _start_time(pid: int) -> int | None:
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


def _send_kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _wait_until_dead(pidfds: list[int], deadline: float) -> bool:
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    waiting = len(pidfds)
    while waiting:
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            return False
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            waiting -= 1
    return True
