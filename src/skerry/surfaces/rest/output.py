"""What commands say, in answers: text where it is text, base64 where it is not."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

from skerry.model.results import ExecResult, NotStarted
from skerry.surfaces.rest.streams import frame

_NAMES = {1: "stdout", 2: "stderr"}
_LONGEST_LETTER = 4


class ExitView(msgspec.Struct, frozen=True, kw_only=True):
    """End of a command. `exit_code` follows the shell: 128+n for death by signal n, 124 for a timeout."""

    exit_code: int
    signal: int | None
    timed_out: bool
    truncated: bool
    """More output came than was kept or sent."""
    duration_s: float
    not_started: NotStarted | None
    """Why its program was not started: then the exit code, 127 or 126, is ours and no program's."""

    @classmethod
    def of(cls, result: ExecResult) -> ExitView:
        return ExitView(**_shared(result))


class ExecView(ExitView, frozen=True, kw_only=True):
    """End of a command, and what it said."""

    stdout: str
    stderr: str
    encoding: str
    """Of both outputs: `utf-8`, or `base64` if one of them is no text."""
    stdout_cut: int
    """Bytes that were left out of the middle of standard output; a line in their place tells."""
    stderr_cut: int

    @classmethod
    def of(cls, result: ExecResult) -> ExecView:
        try:
            encoding, texts = "utf-8", [result.stdout.decode(), result.stderr.decode()]
        except UnicodeDecodeError:
            encoding, texts = "base64", [_base64(result.stdout), _base64(result.stderr)]
        return ExecView(
            **_shared(result),
            stdout=texts[0],
            stderr=texts[1],
            encoding=encoding,
            stdout_cut=result.stdout_cut,
            stderr_cut=result.stderr_cut,
        )


def _shared(result: ExecResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ExitView.__struct_fields__}


class Output:
    """Output as events `stdout` and `stderr`: `{"text": ...}`, or `{"base64": ...}` for a piece that is no text. A
    letter that is cut between two pieces comes whole with the second."""

    def __init__(self, **tags: str) -> None:
        """`tags` are in the data of each."""
        self._tags = tags
        self._rest = {1: b"", 2: b""}

    def add(self, fd: int, data: bytes) -> Iterator[bytes]:
        data = self._rest[fd] + data
        self._rest[fd] = b""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or len(data) - error.start >= _LONGEST_LETTER:
                yield frame(_NAMES[fd], {**self._tags, "base64": _base64(data)})
                return
            self._rest[fd] = data[error.start :]
            text = data[: error.start].decode()
        if text:
            yield frame(_NAMES[fd], {**self._tags, "text": text})

    def end(self) -> Iterator[bytes]:
        for fd, data in self._rest.items():
            if data:
                yield frame(_NAMES[fd], {**self._tags, "base64": _base64(data)})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
