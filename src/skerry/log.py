"""Logging of the command line: the levels of our loggers, and one line on stderr for each record.

Each package logs under its own name, such as `skerry.manager`. A program that uses skerry configures `logging` itself;
nothing here is called for it.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from skerry.errors import ConfigError, printable

ROOT = "skerry"
OFF = "off"
_LEVELS = {
    OFF: logging.CRITICAL + 1,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
FIELDS: ContextVar[dict[str, Any] | None] = ContextVar("skerry-log-fields", default=None)
"""What belongs to every line of the work that is done here, such as the id of a request."""
_configured: set[str] = set()
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^@]*(?=@)")


def configure(setting: str, *, as_json: bool = False) -> None:
    """Log to stderr as a setting says, and no longer as the one before. Raises ConfigError."""
    levels = {ROOT: _LEVELS[OFF], **parse(setting)}
    for name in {*_configured, *levels}:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    _configured.clear()
    _configured.update(levels)
    root = logging.getLogger(ROOT)
    handlers = [handler for handler in root.handlers if isinstance(handler, _StderrHandler)]
    if not handlers:
        handlers = [_StderrHandler()]
        root.addHandler(handlers[0])
    for handler in handlers:
        handler.as_json = as_json


def parse(setting: str) -> dict[str, int]:
    """Levels by logger of `LEVEL`, `LOGGER=LEVEL` or several of them with commas between. Raises ConfigError."""
    levels = {}
    for part in setting.split(","):
        name, equals, level = part.strip().rpartition("=")
        name = name if equals else ROOT
        if level not in _LEVELS or not f"{name}.".startswith(f"{ROOT}."):
            raise ConfigError(
                f"log is {setting!r}; it must be {', '.join(_LEVELS)}, or such a level for one logger, "
                f"e.g. warning,skerry.manager=debug"
            )
        levels[name] = _LEVELS[level]
    return levels


def is_on() -> bool:
    """Whether `configure` was told to write lines, which leave no room for a table that is redrawn."""
    return any(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in _configured)


def hide_passwords(text: str) -> str:
    """Text with `***` for the passwords of its URLs."""
    return _PASSWORD.sub(r"\1:***", text)


class _StderrHandler(logging.Handler):
    """Writes to the stderr of the moment. A reader that has gone is no error."""

    as_json = False

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger and message on one line, which nothing in it can end; as JSON also what `FIELDS` and the
        record's `fields` have."""
        time = datetime.datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        if self.as_json:
            line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
            more = {**(FIELDS.get() or {}), **getattr(record, "fields", {})}
            return json.dumps({**line, "message": hide_passwords(text), **more}, default=str)
        return f"{time} {record.levelname:<7} {record.name}: {printable(hide_passwords(text))}"

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO | None = sys.stderr
        if stream is None:
            return
        try:
            end = "\r\n" if stream.isatty() else "\n"  # a terminal in raw mode stays in its column at \n
            stream.write(self.format(record) + end)
            stream.flush()
        except (OSError, ValueError):
            return
