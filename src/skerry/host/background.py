"""Processes that outlive whoever started them: each holds a note locked while it lives, and who finds that free may
start another."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from skerry.errors import CreateFailed, ProviderError
from skerry.host import locks
from skerry.host.processes import Process, wait_until_dead

_START_S = 30.0
_END_S = 5.0
_LOOK_S = 0.01
_GLANCE_S = 0.5
"""Longer than anybody holds the lock who is no such process."""
_log = logging.getLogger("skerry.host")


def is_held(note: Path) -> bool:
    """Whether a process holds the note, and so lives."""
    try:
        fd = os.open(note, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not locks.take(fd)
    finally:
        os.close(fd)


@contextmanager
def taken(note: Path) -> Iterator[int | None]:
    """Take a note, made if there is none, to hand its descriptor to a process; also from somebody who only looks
    whether it is free. None if a process holds it, or has just ended. Raises OSError."""
    from skerry.host import folders  # the process itself starts without it

    folders.make(note.parent)
    fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _is_taken(fd) or not locks.is_in_place(fd, note):
            yield None
            return
        os.truncate(fd, 0)
        yield fd
    finally:
        os.close(fd)


def spawn(what: str, module: str, task: bytes, fds: Sequence[int], *arguments: str, env: Mapping[str, str]) -> None:
    """Start `python -m MODULE` with its task on stdin, descriptors that it inherits, and no variables but `env`. It is
    nobody's child by the time that we go on. Raises CreateFailed, which says `what` did not start."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            input=task,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env=env,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CreateFailed(f"{what} did not start: {error}") from error
    if child.returncode:
        words = child.stderr.decode(errors="replace").strip()
        raise CreateFailed(f"{what} did not start", log=words[-2000:])


def end(note: Path, what: str) -> None:
    """End the process that holds a note; quiet if there is none."""
    try:
        fd = os.open(note, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with closing(os.fdopen(fd, "rb", buffering=0)) as file:
        with suppress(FileNotFoundError):
            note.unlink()  # one that is just starting sees this, and ends
        deadline = time.monotonic() + _END_S
        while not locks.take(file.fileno()):
            process = _process(os.pread(file.fileno(), 256, 0))
            if process is not None and process.pid == os.getpid():
                return  # it is that process itself that saw the end of its work
            if process is not None:
                wait_until_dead([process], _END_S, kill=True)
            if time.monotonic() > deadline:
                _log.warning("%s ends later by itself", what)
                return
            time.sleep(_LOOK_S)


def detach() -> bytes:
    """In the process itself: read the task, and go on as nobody's child, with nothing open that was the starter's."""
    task = sys.stdin.buffer.read()
    os.chdir("/")
    if os.fork():
        os._exit(0)  # whoever started us goes on, and has no child to wait for
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    return task


@contextmanager
def holding(note: Path, fd: int) -> Iterator[None]:
    """In the process itself: write down in its note who holds that, and remove it at the end."""
    os.set_inheritable(fd, False)
    os.pwrite(fd, msgspec.json.encode(Process.of(os.getpid())), 0)
    try:
        yield
    finally:
        if locks.is_in_place(fd, note):
            note.unlink()


def holder(note: Path) -> Process | None:
    """The process that wrote itself down in a note, whether or not it lives."""
    try:
        return _process(note.read_bytes())
    except OSError:
        return None


def _is_taken(fd: int) -> bool:
    try:
        locks.wait(fd, _GLANCE_S, "a process has it")
    except ProviderError:
        return False
    return True


def _process(text: bytes) -> Process | None:
    try:
        return msgspec.json.decode(text, type=Process)
    except msgspec.DecodeError:
        return None
