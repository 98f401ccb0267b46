"""Answers of the tools, as data by a schema and as text, never more than a model can take; errors with advice."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Mapping
from typing import Literal

import msgspec
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel, Field

from skerry.errors import SkerryError
from skerry.model.records import Record
from skerry.model.results import ExecResult, FileInfo


class ToolResult(BaseModel):
    def text(self) -> str:
        """The same, for clients that read text only."""
        raise NotImplementedError


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

    def text(self) -> str:
        return "\n".join(each.text() for each in self.sandboxes) or "There is no sandbox."


class Destroyed(ToolResult):
    id: str

    def text(self) -> str:
        return f"{self.id} is destroyed."


class Execution(ToolResult):
    exit_code: int = Field(description="As in a shell: 124 for a timeout, 127 for no such program, 128+n for signal n")
    stdout: str
    stderr: str
    stdout_cut: int = Field(description="Bytes left out of the middle of stdout")
    stderr_cut: int = Field(description="Bytes left out of the middle of stderr")
    timed_out: bool
    signal: int | None = Field(description="The signal that ended it")
    duration_s: float
    not_started: str | None = Field(description="Why its program was not started: not_found or cannot_run")

    @classmethod
    def of(cls, result: ExecResult) -> Execution:
        return cls(**{**msgspec.structs.asdict(result), "stdout": result.text, "stderr": result.error_text})

    def text(self) -> str:
        ended = "ended by its timeout" if self.timed_out else f"exit code {self.exit_code}"
        parts = [f"{ended} after {self.duration_s:.2f} s"]
        parts += [f"--- {name} ---\n{text}" for name in ("stdout", "stderr") if (text := getattr(self, name))]
        return "\n".join(parts)


class FileContent(ToolResult):
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


_REPLACE = "Destroy this sandbox and create another; what was in it is lost."
_TELL = "You cannot mend this: tell the user what the message says."
_STORE = (
    "store_error",
    "store_full",
    "store_read_only",
    "store_corrupt",
    "store_too_new",
    "ledger_error",
    "ledger_full",
)
_NO_FILE = ("path_invalid", "path_is_folder", "path_not_folder", "path_not_file")

ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("error", "config_error", "provider_unavailable", *_STORE), _TELL),
    "invalid_spec": "Correct the argument that the message names and call again.",
    "invalid_fleet": "Correct the lines that the message names and call again.",
    "user_not_found": "Use a user that the sandbox has, or leave it out.",
    "arguments_too_long": "Write it to a file with write_file, or give it as stdin.",
    "unsupported": "Leave out the argument that the message names, or give it another value.",
    "not_found": "Call list_sandboxes for those that exist, or create_sandbox for a new one.",
    "image_not_found": "Use an image that the host has; a person can build, import or pull one with `skerry image`.",
    "wrong_state": "Call list_sandboxes to see its state; one that is not ready cannot be used: create another.",
    "conflict": "Choose another name, or use the sandbox that has this one.",
    "port_taken": "Choose another port of the host, or leave it out.",
    "limit_reached": "Destroy a sandbox that you no longer need, or ask for less, and call again.",
    "too_large": "Take a part of it: read_file with an offset, or execute_command with head, tail or grep.",
    "provider_error": "Call again once; if it fails again, tell the user what the message says.",
    "create_failed": "Call again once; if it fails again, ask for less or tell the user what the message says.",
    "agent_error": "Call again once; if it fails again, destroy this sandbox and create another.",
    "agent_unreachable": _REPLACE,
    "agent_protocol": _REPLACE,
    "sandbox_gone": "It has ended, and what was in it is lost: create another with create_sandbox.",
    "call_timeout": "Give the command a longer timeout_s or less to do; if simple calls fail too, create another one.",
    "call_interrupted": "It is not known how much was done: look (list_directory, read_file), then call again.",
    "gate_unavailable": "Call again once; if it fails again, tell the user that the network of sandboxes is down.",
    "interpreter_not_found": "Use a language that the sandbox has, or install the interpreter with execute_command.",
    "store_unavailable": "Wait some seconds and call again.",
    "file_error": "Look at the path with list_directory and call again with another.",
    "path_not_found": "Look at its folder with list_directory; a relative path starts where commands do.",
    "path_exists": "Choose another path, or remove what is there with execute_command.",
    **dict.fromkeys(("path_denied", "path_read_only"), "Choose a path below the home folder or /tmp."),
    **dict.fromkeys(_NO_FILE, "Choose a path that is a file (read, write) or a folder (list)."),
    "path_not_empty": "Remove what is in the folder first, with execute_command.",
    "path_too_long": "Choose a shorter name.",
    "disk_full": "Remove files with execute_command, or create a sandbox with a larger disk.",
}


def error_result(error: SkerryError) -> CallToolResult:
    """The error of a tool, for a model that reads and for a program that parses."""
    advice = ADVICE[error.code]
    told = {"code": error.code, "message": error.message, "retryable": error.retryable, "advice": advice}
    text = f"{error.code}: {error.message}\nWhat to do: {advice}"
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content={"error": told}, is_error=True
    )
