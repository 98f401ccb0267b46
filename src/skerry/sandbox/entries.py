"""What an agent tells of files, in the form of the wire, each part of it checked."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from skerry.agent.call import Call
from skerry.errors import AgentProtocolError, InvalidSpec
from skerry.model.results import Count, FileDetails, FileEvent, FileInfo, FileType, Id, LinkEnd, Time

T = TypeVar("T")
AnyPath = str | bytes | os.PathLike[str]
_LONGEST = 1 << 20


class Entry(msgspec.Struct):
    type: FileType
    size: Count
    mode: Id
    uid: Id
    gid: Id
    mtime: Time
    name: str | None = None
    name64: str | None = None
    path: str | None = None
    path64: str | None = None
    target: str | None = None
    target64: str | None = None

    def info(self) -> FileInfo:
        return FileInfo(**self._fields())

    def _fields(self) -> dict[str, Any]:
        name, path = name_of(self.name, self.name64) or "", name_of(self.path, self.path64) or ""
        if "/" in name or "\0" in name or name in (".", "..") or (not name and path != "/"):
            raise AgentProtocolError(f"the agent told of a file called {name!r}. Destroy this sandbox")
        same = {key: getattr(self, key) for key in ("type", "size", "mode", "uid", "gid", "mtime")}
        return {"name": name, "path": path, "target": name_of(self.target, self.target64), **same}


class _End(msgspec.Struct):
    type: FileType
    mode: Id
    path: str | None = None
    path64: str | None = None


class Detailed(Entry, kw_only=True):
    owner: str
    group: str
    leads_to: _End | None = None
    xattrs: dict[str, str] = {}

    def details(self) -> FileDetails:
        end = self.leads_to
        known = LinkEnd(path=name_of(end.path, end.path64) or "", type=end.type, mode=end.mode) if end else None
        xattrs = {name: _decoded(value) for name, value in self.xattrs.items()}
        return FileDetails(**self._fields(), owner=self.owner, group=self.group, leads_to=known, xattrs=xattrs)


def _decoded(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise AgentProtocolError("the agent told of an attribute that is no base64. Destroy this sandbox") from None


class Event(msgspec.Struct):
    event: str
    path: str | None = None
    path64: str | None = None
    dir: bool = False

    def event_of(self) -> FileEvent:
        return FileEvent(event=self.event, path=name_of(self.path, self.path64) or "", dir=self.dir)


class Kept(msgspec.Struct):
    """A watch that the agent keeps."""

    watch: Count


def name_of(text: str | None, encoded: str | None) -> str | None:
    try:
        return os.fsdecode(base64.b64decode(encoded)) if encoded is not None else text
    except ValueError:
        raise AgentProtocolError("the agent told of a file whose name is no name. Destroy this sandbox") from None


def path_params(path: AnyPath, key: str = "path") -> dict[str, Any]:
    """A path for the wire; one that is not UTF-8 goes as base64 of its bytes."""
    raw = os.fsencode(path)
    if not raw or b"\0" in raw:
        raise InvalidSpec(f"{key}: {path!r} cannot be the path of a file", field=key)
    try:
        return {key: raw.decode()}
    except UnicodeDecodeError:
        return {f"{key}64": base64.b64encode(raw).decode()}


async def records(call: Call, type: type[T]) -> AsyncIterator[T]:
    """The JSON lines of a call's stream, each checked."""
    decode = msgspec.json.Decoder(type).decode
    rest = b""
    async for _, data in call.chunks():
        *lines, rest = (rest + data).split(b"\n")
        try:
            for line in lines:
                yield decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AgentProtocolError(f"the agent sent a record of the wrong form: {error}") from None
        if len(rest) > _LONGEST:
            raise AgentProtocolError("the agent sent a record without end. Destroy this sandbox")
    if rest:
        raise AgentProtocolError("the agent's last record is cut off. Destroy this sandbox")
