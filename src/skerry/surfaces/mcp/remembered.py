"""Answers of code that ran in a context: what it wrote, and what it showed; pictures as pictures."""

from __future__ import annotations

import base64
from typing import Self

from mcp_types import ContentBlock, ImageContent
from pydantic import Field, PrivateAttr

from skerry.model.executions import Execution as CodeExecution
from skerry.model.executions import Rich
from skerry.model.results import ExecResult
from skerry.sandbox.processes import TIMEOUT_EXIT_CODE
from skerry.surfaces.mcp.caller import Caller
from skerry.surfaces.mcp.results import Execution, picture_type

_MOST_PICTURES = 8
_MOST_VALUES = 32
_MAX_PICTURE = 4 << 20
_TEXTS = ("text/markdown", "text/latex", "text/plain", "text/html", "application/json", "image/svg+xml")


class Remembered(Execution):
    context: str | None = Field(default=None, description="The context; null for an interpreter of its own")
    execution_count: int | None = Field(default=None, description="How many runs there were in the context")
    values: list[str] = Field(
        default=[], description="What the code showed, and the value of its last expression. Untrusted data"
    )
    pictures: int = Field(default=0, description="How many pictures are beside this")
    error: str | None = Field(default=None, description="What code in a context raised, with its traceback")
    _pictures: list[tuple[str, bytes]] = PrivateAttr(default_factory=list)

    @classmethod
    def of_context(cls, done: CodeExecution, context: str, duration_s: float, caller: Caller) -> Self:
        """The answer of a run in a context. Code that raised has exit code 1, as a program of it would."""
        code = TIMEOUT_EXIT_CODE if done.timed_out else int(not done.ok)
        result = ExecResult(
            exit_code=code,
            stdout=done.stdout.encode(errors="replace"),
            stderr=done.stderr.encode(errors="replace"),
            timed_out=done.timed_out,
            duration_s=duration_s,
        )
        limit = caller.limits.output_bytes
        made = cls.of(result, limit, caller.outputs, caller.owner)
        shown = [(_picture(each), _text(each)) for each in done.results]
        made._pictures = [picture for picture, _ in shown if picture is not None][:_MOST_PICTURES]
        made.context, made.execution_count, made.pictures = context, done.execution_count, len(made._pictures)
        made.values = [text[:limit] for picture, text in shown if picture is None and text][:_MOST_VALUES]
        if done.error is not None:
            made.error = (done.error.traceback or f"{done.error.name}: {done.error.value}")[-limit:]
        return made

    def text(self) -> str:
        parts = [super().text()]
        if self.error:
            parts.append(f"--- error (untrusted data) ---\n{self.error}")
        parts += [f"--- value (untrusted data) ---\n{value}" for value in self.values]
        return "\n".join(parts)

    def blocks(self) -> list[ContentBlock]:
        pictures = [
            ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=kind)
            for kind, data in self._pictures
        ]
        return [*super().blocks(), *pictures]


def _picture(value: Rich) -> tuple[str, bytes] | None:
    """A picture that models can see, and its type; what only says that it is one is none."""
    for media in ("image/png", "image/jpeg", "image/gif", "image/webp"):
        data = value.content(media)
        if data and len(data) <= _MAX_PICTURE and picture_type(data) == media:
            return media, data
    return None


def _text(value: Rich) -> str | None:
    for media in _TEXTS:
        found = value.data.get(media)
        if found:
            return found if isinstance(found, str) else str(found)
    return None
