"""All that a process started, found again for a signal: children, their session, and what slipped out of both."""

from __future__ import annotations

import os

from .spawn import MARK

_ROUNDS = 20
_SIGKILL = 9


def signal_all(roots: dict[int, str], signal: int) -> None:
    """Signal processes (pid: mark) and every descendant. A kill is repeated until none is left: they may fork."""
    for _ in range(_ROUNDS if signal == _SIGKILL else 1):
        found = _find(roots)
        for each in found:
            try:
                os.kill(each, signal)
            except (ProcessLookupError, PermissionError):
                pass
        if not found:
            return


def _find(roots: dict[int, str]) -> list[int]:
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            state = _stat(name)
            if state is not None:
                parents[int(name)], sessions[int(name)] = state
    members = {pid for pid, session in sessions.items() if session in roots}
    marks = {f"{MARK}={mark}".encode() for mark in roots.values()}
    members |= {pid for pid in parents if pid not in members and _has_mark(pid, marks)}
    members |= roots.keys() & parents.keys()
    grew = True
    while grew:
        children = {pid for pid, parent in parents.items() if parent in members} - members
        members |= children
        grew = bool(children)
    return sorted(members - {os.getpid()})


def _stat(pid: str) -> tuple[int, int] | None:
    """Parent and session of a process that lives; zombies are already dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[3]))


def _has_mark(pid: int, marks: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return not marks.isdisjoint(file.read().split(b"\0"))
    except OSError:
        return False
