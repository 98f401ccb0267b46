"""Progress of an engine at an image, told as one JSON object a line, with steps, bytes and errors."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from skerry.errors import ImageNotFound, NotFound, ProviderError, ProviderUnavailable, SkerryError
from skerry.providers.base import OnProgress, Progress
from skerry.providers.dockerapi.api import Engine

_SILENCE_S = 1800.0
"""A step of a build may say nothing for long, and an engine says nothing while it unpacks."""
_LONGEST_S = 86400.0
_MAX_LINE = 2000
_STEP = re.compile(r"step (\d{1,4})/(\d{1,4}) ?: ?(.*)", re.IGNORECASE)
_RUN = re.compile(r": ?RUN\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ABSENT = re.compile(r"manifest unknown|not found|does not exist|denied|unauthorized|no such image", re.IGNORECASE)
_UNREACHED = re.compile(r"dial|lookup|no such host|connection|timeout|i/o|TLS|EOF", re.IGNORECASE)


class _Detail(msgspec.Struct):
    current: int | None = None
    total: int | None = None
    message: str = ""


class Line(msgspec.Struct, rename="camel"):
    """Line of an engine; its fields depend on the work."""

    stream: str | None = None
    status: str | None = None
    id: str | None = None
    error: str | None = None
    error_detail: _Detail | None = None
    progress_detail: _Detail | None = None
    aux: dict[str, Any] | None = None


class EngineWork:
    """A piece of work of an engine: takes its lines, and knows what its failure means."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_line(self, line: Line) -> None:
        """A line that is no error."""

    def failure(self, reason: str) -> SkerryError:
        return ProviderError(f"{self.what} failed: {reason}")


class BuildWork(EngineWork):
    """Steps of a Dockerfile and what they print."""

    def __init__(self, name: str, on_progress: OnProgress, hint: str) -> None:
        """`hint` is what to think of when a RUN step fails."""
        super().__init__(f"the build of {name}")
        self._hint = hint
        self.id: str | None = None
        self._on_progress = on_progress
        self._step: Progress | None = None
        self._tail: deque[str] = deque(maxlen=20)
        self._open = ""

    def on_line(self, line: Line) -> None:
        if line.aux and isinstance(line.aux.get("ID"), str):
            self.id = line.aux["ID"]
        *whole, self._open = (self._open + (line.stream or "")).split("\n")
        self._open = self._open[-_MAX_LINE:]
        if line.status:  # the layers of what it builds on
            whole.append(" ".join(filter(None, (line.id, line.status))))
        for text in whole:
            self.on_text(text)

    def on_text(self, text: str) -> None:
        """Take a line of text."""
        text = _COLOUR.sub("", text).rstrip()[:_MAX_LINE]
        if step := _STEP.match(text):
            self._step = Progress(text, int(step[1]), int(step[2]))
            self._tail.clear()
        elif text.strip():
            self._tail.append(text)
        else:
            return
        done, total = (self._step.done, self._step.total) if self._step else (None, None)
        self._on_progress(Progress(text, done, total))

    def failure(self, reason: str) -> SkerryError:
        at = f" at {self._step.message}" if self._step else ""
        tail = "".join(f"\n  {text}" for text in (*self._tail, *filter(None, [_COLOUR.sub("", self._open).strip()])))
        hint = f"\n{self._hint}" if self._step and _RUN.search(self._step.message) else ""
        return ProviderError(f"{self.what} failed{at}: {reason}{tail}{hint}")


class PullWork(EngineWork):
    """Bytes of layers, which come side by side."""

    def __init__(self, name: str, provider: str, on_progress: OnProgress) -> None:
        super().__init__(f"the pull of {name}")
        self._name = name
        self._provider = provider
        self._on_progress = on_progress
        self._layers: dict[str, tuple[int, int]] = {}

    def on_line(self, line: Line) -> None:
        detail = line.progress_detail
        if line.id and detail and detail.total and line.status == "Downloading":
            self._layers[line.id] = (detail.current or 0, detail.total)
        elif line.id in self._layers and line.status in ("Download complete", "Pull complete"):
            total = self._layers[line.id][1]
            self._layers[line.id] = (total, total)
        done = sum(layer[0] for layer in self._layers.values())
        total = sum(layer[1] for layer in self._layers.values())
        text = " ".join(filter(None, (line.id, line.status or (line.stream or "").strip())))
        self._on_progress(Progress(text[:_MAX_LINE], done if total else None, total or None))

    def failure(self, reason: str) -> SkerryError:
        other = "or make the image here with `skerry image build` or `skerry image import`"
        if _ABSENT.search(reason) and not _UNREACHED.search(reason):
            return ImageNotFound(f"no registry has an image {self._name!r} for us ({reason}). Check its name, {other}")
        fix = f"see that {self._provider} reaches the registry (network, proxy, name), {other}"
        return ProviderUnavailable(self._provider, f"{self._name} cannot be pulled: {reason}", fix=fix)


async def follow(
    engine: Engine, path: str, query: dict[str, Any], work: EngineWork, body: AsyncIterator[bytes] | None = None
) -> None:
    """Send, and read to the end. Raises the failure of `work`, and ProviderError after a long silence."""
    async with _silence_limit(work.what) as alive:
        sent = None if body is None else _each(body, alive)
        failed = None
        try:
            async with engine.stream("POST", path, query=query, body=sent, timeout_s=_LONGEST_S) as answer:
                async for text in answer.lines():
                    alive()
                    failed = failed or _read_line(work, text)
        except ProviderUnavailable:
            raise
        except (NotFound, ProviderError) as error:
            failed = failed or error.message
    if failed:
        raise work.failure(failed)


def _read_line(work: EngineWork, text: bytes) -> str | None:
    """Take one line; return the failure that it tells, if any."""
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # what we do not know is nothing that we need
    detail = line.error_detail.message if line.error_detail else ""
    if line.error or detail:
        return str(line.error or detail).strip()
    work.on_line(line)
    return None


async def _each(body: AsyncIterator[bytes], alive: Callable[[], None]) -> AsyncIterator[bytes]:
    async for piece in body:
        alive()
        yield piece


@asynccontextmanager
async def _silence_limit(what: str) -> AsyncIterator[Callable[[], None]]:
    """A deadline that every sign of life moves on, but not for ever: a step of a build may talk without an end."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _LONGEST_S

    def alive() -> None:
        if not deadline.expired():
            deadline.reschedule(min(loop.time() + _SILENCE_S, end))

    try:
        async with asyncio.timeout(_SILENCE_S) as deadline:
            yield alive
    except TimeoutError:
        why = f"it takes longer than {_LONGEST_S:g} s" if loop.time() >= end else f"no life for {_SILENCE_S:g} s"
        raise ProviderError(f"{what} was given up: {why}") from None
