"""What a gate says of itself to whoever looks after it: how it is, and its log, of which nobody else sees a line."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from skerry.errors import SkerryError
from skerry.log import ROOT

_MOST_LINES = 200
"""Lines that are kept for one who does not take them; the oldest are lost first."""
_MOST_TEXT = 500
_log = logging.getLogger("skerry.gate")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the gate's log."""

    level: int
    text: str


class Pulse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the gate is, told in short intervals: who hears none knows that it is stuck."""

    pid: int
    sandboxes: int = 0
    up: int = 0
    """Sandboxes whose network is up."""
    connections: int = 0
    log: list[LogLine] = []
    """What it has logged since the last one."""


class Journal(logging.Handler):
    """Log of a gate, for several who take its lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._readers: list[deque[LogLine]] = []
        self._unread: deque[LogLine] = deque(maxlen=_MOST_LINES)
        """Lines of the time in which nobody has read any."""

    def begin(self) -> None:
        """Keep lines from now on."""
        logger = logging.getLogger(ROOT)
        logger.addHandler(self)
        logger.setLevel(self.level)

    def end(self) -> None:
        """Keep no more."""
        logger = logging.getLogger(ROOT)
        logger.removeHandler(self)
        logger.setLevel(logging.NOTSET)

    @contextmanager
    def read(self) -> Iterator[deque[LogLine]]:
        """Lines from now on, and those that nobody has read; whoever takes them takes them out."""
        lines = deque(self._unread, maxlen=_MOST_LINES)
        self._unread.clear()
        self._readers.append(lines)
        try:
            yield lines
        finally:
            self._readers.remove(lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line. Of an error only what is ours or the host's: others may name a secret."""
        text = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            says = f": {error}" if isinstance(error, SkerryError | OSError) else ""
            text = f"{text}: {type(error).__name__}{says}"
        line = LogLine(level=record.levelno, text=text[:_MOST_TEXT])
        for lines in self._readers or (self._unread,):
            lines.append(line)


def log_again(pulse: Pulse) -> None:
    """Log here what a gate has logged."""
    for line in pulse.log:
        _log.log(line.level, "%s", line.text)


def write_down(failure: BaseException, path: Path) -> None:
    """Write down what ended us, for `skerry doctor`: where, and what it says if that is an error of ours or the host's,
    which names no secret."""
    frames = traceback.extract_tb(failure.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    says = f": {failure}" if isinstance(failure, SkerryError | OSError | ImportError) else ""
    with suppress(OSError):
        path.write_text(f"{type(failure).__name__}{at}{says}\n")
        path.chmod(0o600)
