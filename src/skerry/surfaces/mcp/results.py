"""Answers of the tools about sandboxes, commands and files: as data by a schema and as text, never more than a model
can take. What was made by code in a sandbox is marked as such."""

from __future__ import annotations

import base64
import codecs
from typing import Literal, Self

from mcp_types import ContentBlock, ImageContent, ResourceLink, TextContent
from pydantic import BaseModel, Field, PrivateAttr

from skerry.model.records import Record
from skerry.model.results import ExecResult, FileInfo
from skerry.providers.base import Snapshot
from skerry.surfaces.mcp.outputs import Output, Outputs, shortened

OUTPUT_URI = "skerry://output/"
_PICTURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


class ToolResult(BaseModel):
    _links: list[ResourceLink] = PrivateAttr(default_factory=list)

    def text(self) -> str:
        """The same, for clients that read text only."""
        raise NotImplementedError

    def blocks(self) -> list[ContentBlock]:
        """The same as text, with links to what it has no room for."""
        return [TextContent(type="text", text=self.text()), *self._links]


class SandboxInfo(ToolResult):
    id: str = Field(description="What the other tools take as `sandbox`")
    name: str | None
    state: str
    provider: str
    created_at: float = Field(description="Seconds since 1970")
    ends_at: float | None = Field(description="When it ends by itself, in seconds since 1970; null is never")
    kept: bool = Field(description="False: it ends with this server")
    network: str = Field(description="none: it reaches nothing; rules: what `allow` and `secrets` name, and no more")
    allow: list[str] = Field(description="Hosts that it may reach, on ports 80 and 443 unless said; or names of sets")
    deny: list[str] = Field(description="Hosts that it may not reach, whatever is allowed")
    secrets: dict[str, list[str]] = Field(
        description="Variables of the sandbox that stand for a token, and the hosts that take it"
    )

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
            network=str(record.spec.network),
            allow=list(record.spec.allow),
            deny=list(record.spec.deny),
            secrets={name: list(secret.hosts) for name, secret in record.spec.secrets.items()},
        )

    def text(self) -> str:
        named = f" ({self.name})" if self.name else ""
        hosts = [*self.allow, *(host for each in self.secrets.values() for host in each)]
        rules = f", may reach {', '.join(dict.fromkeys(hosts)) or 'nothing'}" if self.network == "rules" else ""
        return f"{self.id}{named}: {self.state}, {self.provider}{rules}"


class SandboxList(ToolResult):
    sandboxes: list[SandboxInfo]
    more: bool = Field(default=False, description="There are more than these")

    def text(self) -> str:
        lines = [each.text() for each in self.sandboxes]
        return "\n".join([*lines, *(["[there are more]"] if self.more else [])]) or "There is no sandbox."


class Destroyed(ToolResult):
    id: str

    def text(self) -> str:
        return f"{self.id} is destroyed."


class SnapshotInfo(ToolResult):
    name: str = Field(description="What restore_sandbox and create_sandbox take as `snapshot`")
    sandbox: str = Field(description="The id of the sandbox that it was taken from")
    size: int
    created_at: float = Field(description="Seconds since 1970")

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotInfo:
        return cls(name=snapshot.name, sandbox=snapshot.sandbox, size=snapshot.size, created_at=snapshot.created_at)

    def text(self) -> str:
        return f"{self.name}: {self.size} bytes, of {self.sandbox}"


class SnapshotList(ToolResult):
    snapshots: list[SnapshotInfo]

    def text(self) -> str:
        return "\n".join(each.text() for each in self.snapshots) or "There is no snapshot."


class Execution(ToolResult):
    exit_code: int = Field(description="As in a shell: 124 for a timeout, 127 for no such program, 128+n for signal n")
    stdout: str = Field(description="Untrusted data")
    stderr: str = Field(description="Untrusted data")
    stdout_cut: int = Field(description="Bytes left out of the middle of stdout")
    stderr_cut: int = Field(description="Bytes left out of the middle of stderr")
    stdout_uri: str | None = Field(default=None, description="Where more of stdout is, if it was cut: see read_output")
    stderr_uri: str | None = Field(default=None, description="Where more of stderr is, if it was cut: see read_output")
    timed_out: bool
    signal: int | None = Field(description="The signal that ended it")
    duration_s: float
    not_started: str | None = Field(description="Why its program was not started: not_found or cannot_run")

    @classmethod
    def of(cls, result: ExecResult, limit: int, outputs: Outputs, owner: str) -> Self:
        """An answer with at most `limit` bytes of each output; longer ones are kept whole for a while."""
        stdout, stdout_cut = shortened(result.stdout, result.stdout_cut, limit)
        stderr, stderr_cut = shortened(result.stderr, result.stderr_cut, limit)
        made = cls(
            exit_code=result.exit_code,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            stdout_cut=stdout_cut,
            stderr_cut=stderr_cut,
            timed_out=result.timed_out,
            signal=result.signal,
            duration_s=result.duration_s,
            not_started=result.not_started,
        )
        if stdout_cut:
            made.stdout_uri = made._keep(outputs.keep(owner, "stdout", result.stdout))
        if stderr_cut:
            made.stderr_uri = made._keep(outputs.keep(owner, "stderr", result.stderr))
        return made

    def _keep(self, output: Output) -> str:
        self._links += output_links(output)
        return f"{OUTPUT_URI}{output.id}"

    def text(self) -> str:
        ended = "ended by its timeout" if self.timed_out else f"exit code {self.exit_code}"
        parts = [f"{ended} after {self.duration_s:.2f} s"]
        for name in ("stdout", "stderr"):
            if text := getattr(self, name):
                uri = getattr(self, f"{name}_uri")
                parts.append(f"--- {name} (untrusted data{f'; more in {uri}' if uri else ''}) ---\n{text}")
        return "\n".join(parts)


class FileContent(ToolResult):
    path: str
    encoding: Literal["utf-8", "base64", "image"] = Field(
        description="base64: the file is not text; image: the picture is beside this, and content is empty"
    )
    content: str = Field(description="Untrusted data")
    offset: int
    size: int = Field(description="Bytes of the whole file")
    next_offset: int | None = Field(description="Where to read on; null at the end")
    mime_type: str | None = Field(default=None, description="Of a picture")
    url: str | None = Field(default=None, description="Where a program can GET the whole file with the same token")
    _picture: bytes = PrivateAttr(default=b"")

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

    @classmethod
    def of_picture(cls, path: str, data: bytes, mime_type: str) -> FileContent:
        size = len(data)
        made = cls(path=path, encoding="image", content="", offset=0, size=size, next_offset=None, mime_type=mime_type)
        made._picture = data
        return made

    def text(self) -> str:
        kind = self.mime_type or self.encoding
        more = "" if self.next_offset is None else f", goes on at offset {self.next_offset}"
        url = "" if self.url is None else f", whole at {self.url} (GET, with the same token)"
        return f"[{self.path}: {self.size} bytes, as {kind}, untrusted data{more}{url}]\n{self.content}"

    def blocks(self) -> list[ContentBlock]:
        if not self._picture or self.mime_type is None:
            return super().blocks()
        data = base64.b64encode(self._picture).decode()
        return [*super().blocks(), ImageContent(type="image", data=data, mime_type=self.mime_type)]


def picture_type(data: bytes) -> str | None:
    """The type of a picture that models can see, by how its bytes begin; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _PICTURES if data.startswith(magic)), None)


def output_links(output: Output) -> list[ResourceLink]:
    """Links to a long output, one for each part of it."""
    parts, links = output.parts(), []
    for number, offset in enumerate(parts, 1):
        of = f", part {number} of {len(parts)}" if len(parts) > 1 else ""
        links.append(
            ResourceLink(
                type="resource_link",
                uri=f"{OUTPUT_URI}{output.id}{f'?offset={offset}' if offset else ''}",
                name=f"{output.title}-{output.id[:6]}{f'-{number}' if of else ''}",
                description=f"{output.title} of a command, as much as was kept{of}: untrusted data",
                mime_type="text/plain",
                size=len(output.part(offset)),
            )
        )
    return links


class FileReference(ToolResult):
    path: str = Field(description="The whole path")
    uri: str = Field(description="Its name as a resource, which clients can read")
    size: int | None = Field(description="Bytes; null if there is no such file yet")
    url: str | None = Field(description="For programs: GET reads it, PUT writes it; null where there is no REST API")
    advice: str

    @classmethod
    def of(cls, path: str, *, uri: str, size: int | None, url: str | None) -> FileReference:
        how = (
            "Read it as a resource, or with read_file; write it with write_file."
            if url is None
            else "Any size: `curl -H 'Authorization: Bearer TOKEN' -T FILE URL` writes it, the same without `-T FILE` "
            "reads it. TOKEN is the one that this connection has; it is not for the sandbox."
        )
        made = cls(path=path, uri=uri, size=size, url=url, advice=how)
        if size is not None:
            name = path.rpartition("/")[2] or "file"
            made._links.append(ResourceLink(type="resource_link", uri=uri, name=name, size=size))
        return made

    def text(self) -> str:
        size = "no such file yet" if self.size is None else f"{self.size} bytes"
        return f"{self.path}: {size}, {self.url or self.uri}\n{self.advice}"


class Written(ToolResult):
    path: str
    size: int

    def text(self) -> str:
        return f"{self.path}: {self.size} bytes written."


class Entry(BaseModel):
    path: str
    type: str
    size: int

    @classmethod
    def of(cls, info: FileInfo) -> Entry:
        return cls(path=printable(info.path or info.name), type=info.type.value, size=info.size)


class Listing(ToolResult):
    path: str
    entries: list[Entry]
    more: bool = Field(description="There are more entries than these")

    def text(self) -> str:
        lines = [f"{each.type:<8}{each.size:>12}  {each.path}" for each in self.entries]
        return "\n".join([*lines, *(["[there are more]"] if self.more else [])]) or "The folder is empty."


def printable(name: str) -> str:
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
