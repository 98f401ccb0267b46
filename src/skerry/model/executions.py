"""Results of code that an interpreter ran: what it wrote, what it showed, and how it ended."""

from __future__ import annotations

import base64
from enum import StrEnum
from typing import Any

import msgspec

from skerry.model.results import Count

_BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")


class Rich(msgspec.Struct, frozen=True, kw_only=True):
    """A value that was shown, in all the forms that it has: by media type, binary ones in base64."""

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    is_result: bool = False
    """It is the value of the last expression; all else was displayed on the way."""

    def _text(self, media: str) -> str | None:
        value = self.data.get(media)
        return value if isinstance(value, str) else None

    def content(self, media: str) -> bytes | None:
        """The bytes of one form; None if it has none, or one that is broken."""
        text = self._text(media)
        if text is None:
            return None
        try:
            return base64.b64decode(text) if media in _BINARY else text.encode()
        except ValueError:
            return None

    @property
    def text(self) -> str | None:
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        return self._text("text/html")

    @property
    def markdown(self) -> str | None:
        return self._text("text/markdown")

    @property
    def latex(self) -> str | None:
        return self._text("text/latex")

    @property
    def javascript(self) -> str | None:
        return self._text("application/javascript")

    @property
    def svg(self) -> str | None:
        return self._text("image/svg+xml")

    @property
    def png(self) -> bytes | None:
        return self.content("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self.content("image/jpeg")

    @property
    def json(self) -> Any:
        return self.data.get("application/json")


class CodeError(msgspec.Struct, frozen=True, kw_only=True):
    """What the code raised."""

    name: str
    value: str = ""
    traceback: str = ""


class EventType(StrEnum):
    STARTED = "started"
    STDOUT = "stdout"
    STDERR = "stderr"
    RESULT = "result"
    """The value of the last expression."""
    DISPLAY = "display"
    """A value that was shown on the way, such as a plot."""
    ERROR = "error"
    END = "end"
    """The last one, and the only one that knows whether something is missing."""


class ExecutionEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happens while code runs; which fields are set depends on the type."""

    type: EventType
    text: str = ""
    result: Rich | None = None
    error: CodeError | None = None
    execution_count: Count = 0
    truncated: bool = False
    timed_out: bool = False
    interrupted: bool = False


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """End of a run. Code that fails, is interrupted or takes too long is a result, and the interpreter lives on."""

    stdout: str = ""
    stderr: str = ""
    results: list[Rich] = []
    error: CodeError | None = None
    execution_count: int = 0
    truncated: bool = False
    """More was written or shown than is kept."""
    timed_out: bool = False
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.timed_out and not self.interrupted

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((each.text for each in self.results if each.is_result), None)


class InterpreterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter of a sandbox, as its agent tells it."""

    name: str
    language: str
    engine: str = "auto"
    cwd: str = ""
    started: float = 0.0
