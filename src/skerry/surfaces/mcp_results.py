"""What the tools give back: data by a schema, and the same as text; never more than a model can take."""

from __future__ import annotations

import base64
import codecs
from typing import Literal

from pydantic import BaseModel, Field

from skerry.records import Record
from skerry.results import ExecResult, FileInfo


class Answer(BaseModel):
    def text(self) -> str:
        """The same for whoever reads text only."""
        raise NotImplementedError


class SandboxInfo(Answer):
    id: str = Field(description="What the other tools take as `sandbox`")
    name: str | None
    state: str
    provider: str
    created_at: float = Field(description="Seconds since 1970")
    ends_at: float | None = Field(description="When it ends by itself, in seconds since 1970; null is never")
    kept: bool = Field(description="False: it ends with this server")

    @classmethod
    def of(cls, record: Record) -> SandboxInfo:
        return cls(
            id=record.id,
            name=record.name,
            state=record.state.value,
            provider=record.spec.provider,
            created_at=record.created_at,
            ends_at=record.ends_at,
            kept=not record.ephemeral,
        )

    def text(self) -> str:
        named = f" ({self.name})" if self.name else ""
        return f"{self.id}{named}: {self.state}, {self.provider}"


class SandboxList(Answer):
    sandboxes: list[SandboxInfo]

    def text(self) -> str:
        return "\n".join(each.text() for each in self.sandboxes) or "There is no sandbox."


class Destroyed(Answer):
    id: str

    def text(self) -> str:
        return f"{self.id} is destroyed."


class Execution(Answer):
    exit_code: int = Field(description="As in a shell: 124 for a timeout, 127 for no such program, 128+n for signal n")
    stdout: str
    stderr: str
    stdout_cut: int = Field(description="Bytes left out of the middle of stdout")
    stderr_cut: int = Field(description="Bytes left out of the middle of stderr")
    timed_out: bool
    signal: int | None = Field(description="The signal that ended it")
    duration_s: float

    def text(self) -> str:
        ended = "ended by its timeout" if self.timed_out else f"exit code {self.exit_code}"
        parts = [f"{ended} after {self.duration_s:.2f} s"]
        parts += [f"--- {name} ---\n{text}" for name in ("stdout", "stderr") if (text := getattr(self, name))]
        return "\n".join(parts)


class FileContent(Answer):
    path: str
    encoding: Literal["utf-8", "base64"] = Field(description="base64: the file is not text")
    content: str
    offset: int
    size: int = Field(description="Bytes of the whole file")
    next_offset: int | None = Field(description="Where to read on; null at the end")

    @classmethod
    def of(cls, path: str, data: bytes, *, offset: int, size: int, limit: int) -> FileContent:
        """`data` is one byte longer than the limit if there is more to read."""
        at_end = len(data) <= limit
        data = data[:limit]
        content = None if b"\0" in data else _decoded(data, at_end)
        text, used = content if content is not None else (base64.b64encode(data).decode(), len(data))
        return cls(
            path=path,
            encoding="utf-8" if content is not None else "base64",
            content=text,
            offset=offset,
            size=size,
            next_offset=None if at_end else offset + used,
        )

    def text(self) -> str:
        if self.encoding == "utf-8" and self.next_offset is None:
            return self.content
        more = "" if self.next_offset is None else f", goes on at offset {self.next_offset}"
        return f"[{self.path}: {self.size} bytes, as {self.encoding}{more}]\n{self.content}"


class Written(Answer):
    path: str
    size: int

    def text(self) -> str:
        return f"{self.path}: {self.size} bytes written."


class Entry(BaseModel):
    path: str
    type: str
    size: int


class Listing(Answer):
    path: str
    entries: list[Entry]
    more: bool = Field(description="There are more entries than these")

    def text(self) -> str:
        lines = [f"{each.type:<8}{each.size:>12}  {each.path}" for each in self.entries]
        return "\n".join([*lines, *(["[there are more]"] if self.more else [])]) or "The folder is empty."


class Kept:
    """The beginning and the end of an output of any length, and how much came between."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._count = 0

    def add(self, data: bytes) -> None:
        self._count += len(data)
        room = self._head_room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_room + 65536:
            self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_room)]

    @property
    def cut(self) -> int:
        return max(0, self._count - self._head_room - self._tail_room)

    def text(self) -> str:
        self._trim()
        head, tail = printed(bytes(self._head)), printed(bytes(self._tail))
        return f"{head}\n[... {self.cut} bytes left out ...]\n{tail}" if self.cut else printed(self._whole())

    def _whole(self) -> bytes:
        return bytes(self._head + self._tail)


def execution(result: ExecResult, stdout: Kept, stderr: Kept) -> Execution:
    return Execution(
        exit_code=result.exit_code,
        stdout=stdout.text(),
        stderr=stderr.text(),
        stdout_cut=stdout.cut,
        stderr_cut=stderr.cut,
        timed_out=result.timed_out,
        signal=result.signal,
        duration_s=result.duration_s,
    )


def entry(info: FileInfo) -> Entry:
    return Entry(path=printed_name(info.path or info.name), type=info.type.value, size=info.size)


def printed(data: bytes) -> str:
    return data.decode(errors="replace")


def printed_name(name: str) -> str:
    """A file's name as JSON can carry it; what is no UTF-8 is replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _decoded(data: bytes, at_end: bool) -> tuple[str, int] | None:
    """Text, and how many bytes it is: a character that was cut in two is left for the next read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data, final=at_end)
    except UnicodeDecodeError:
        return None
    return text, len(data) - len(decoder.getstate()[0])
