"""Files in a sandbox: any name, any size, in bounded memory."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

import msgspec

from skerry import transfers
from skerry.agent.call import Call
from skerry.errors import (
    AgentProtocolError,
    CallTimeout,
    InvalidSpec,
    LimitReached,
    PathNotFound,
)
from skerry.processes import Connect
from skerry.results import FileEvent, FileInfo, FileType
from skerry.transfers import PATIENCE_S

T = TypeVar("T")

_LONG_S = 3600.0
_CHUNK = 1 << 20
MAX_ENTRIES = 1_000_000
MAX_LISTED = 1 << 28
MAX_READ = 1 << 30
MAX_DOWNLOAD = 16 << 30


class Readable(Protocol):
    """An open file, or anything else that gives bytes."""

    def read(self, size: int, /) -> bytes | None: ...


AnyPath = str | bytes | os.PathLike[str]


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Written(msgspec.Struct):
    size: Count


class _Sent(msgspec.Struct):
    bytes_sent: Count


class _Entry(msgspec.Struct):
    type: FileType
    size: Count
    mode: int
    uid: int
    gid: int
    mtime: float
    name: str | None = None
    name64: str | None = None
    path: str | None = None
    path64: str | None = None
    target: str | None = None
    target64: str | None = None

    def info(self) -> FileInfo:
        name, path = _name(self.name, self.name64) or "", _name(self.path, self.path64) or ""
        if "/" in name or "\0" in name or name in (".", "..") or (not name and path != "/"):
            raise AgentProtocolError(f"the agent told of a file called {name!r}. Destroy this sandbox")
        return FileInfo(
            name=name,
            path=path,
            type=self.type,
            size=self.size,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            mtime=self.mtime,
            target=_name(self.target, self.target64),
        )


class _Event(msgspec.Struct):
    event: str
    path: str | None = None
    path64: str | None = None
    dir: bool = False


def _name(text: str | None, encoded: str | None) -> str | None:
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


class AsyncFiles:
    """The files of a sandbox. Relative paths start at its home folder."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def _call(self, method: str, **params: Any) -> None:
        client = await self._connect()
        await client.call(method, params, type=dict[str, Any])

    # contents

    async def read(
        self, path: AnyPath, *, offset: int = 0, length: int | None = None, max_bytes: int = MAX_READ
    ) -> bytes:
        """A file, or a range of it. More than `max_bytes` is an error: take `iter_chunks` or `download` for that."""
        buffer = io.BytesIO()
        await self._read_to(path, offset, length, max_bytes, buffer.write)
        return buffer.getvalue()

    async def read_text(self, path: AnyPath) -> str:
        """A file as UTF-8."""
        return (await self.read(path)).decode()

    async def _read_to(
        self, path: AnyPath, offset: int, length: int | None, max_bytes: int, write: Callable[[memoryview], object]
    ) -> None:
        """A file's content to `write`, as it comes; what the sandbox sends beyond the bound is not taken."""
        client = await self._connect()
        count = 0

        def on_data(fd: int, data: memoryview) -> None:
            nonlocal count
            count += len(data)
            if fd != 1 or (length is not None and count > length):
                call.stop(AgentProtocolError("the agent sent what was not asked for. Destroy this sandbox"))
            elif count > max_bytes:
                call.stop(LimitReached(f"{os.fsdecode(path)} is larger than {max_bytes} bytes"))
            else:
                write(data)

        call = client.open("read_file", {**path_params(path), "offset": offset, "length": length}, on_data=on_data)
        try:
            sent = await call.patiently(PATIENCE_S).result(_Sent)
        finally:
            call.abandon()
        _check_whole(sent, count)

    async def iter_chunks(self, path: AnyPath, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """A file piece by piece, as fast as the pieces are taken."""
        client = await self._connect()
        call = client.open("read_file", {**path_params(path), "offset": offset, "length": length})
        count = 0
        try:
            async for fd, data in call.chunks():
                count += len(data)
                if fd != 1 or (length is not None and count > length):
                    raise AgentProtocolError("the agent sent what was not asked for. Destroy this sandbox")
                yield data
            _check_whole(await call.result(_Sent), count)
        finally:
            call.abandon()

    async def write(
        self,
        path: AnyPath,
        data: bytes | bytearray | memoryview | str | Readable,
        *,
        mode: int | None = None,
        atomic: bool = True,
        parents: bool = True,
    ) -> int:
        """Write a whole file and return its size. Until all of it is there, the old one stays (unless not `atomic`)."""
        return await self._write(path, data, {"mode": mode, "atomic": atomic, "parents": parents})

    async def append(self, path: AnyPath, data: bytes | str) -> int:
        """Add to the end of a file and return its size; it is made if missing."""
        return await self._write(path, data, {"append": True})

    async def write_at(self, path: AnyPath, offset: int, data: bytes | str) -> int:
        """Write into the middle of a file, in place, and return its size."""
        return await self._write(path, data, {"offset": offset})

    async def _write(self, path: AnyPath, data: Any, options: dict[str, Any]) -> int:
        client = await self._connect()
        call = client.open("write_file", {**path_params(path), **options}).patiently(PATIENCE_S)
        try:
            if isinstance(data, str):
                data = data.encode()
            if isinstance(data, bytes | bytearray | memoryview):
                await call.send(data)
            else:
                await _send_all(call, data.read)
            call.end()
            return (await call.result(_Written)).size
        finally:
            call.abandon()

    # folders and trees

    async def stat(self, path: AnyPath, *, follow: bool = True) -> FileInfo:
        """What a file is; a link is followed unless told otherwise."""
        client = await self._connect()
        return (await client.call("stat", {**path_params(path), "follow": follow}, type=_Entry)).info()

    async def exists(self, path: AnyPath) -> bool:
        """Whether there is something of that name, a dangling link included."""
        try:
            await self.stat(path, follow=False)
        except PathNotFound:
            return False
        return True

    async def list(self, path: AnyPath = ".", *, depth: int = 1) -> list[FileInfo]:
        """What is in a folder, sorted, parents before children."""
        found = []
        letters = 0
        async for info in self.iter_list(path, depth=depth):
            found.append(info)
            letters += len(info.path) + len(info.name) + len(info.target or "")
            if len(found) > MAX_ENTRIES or letters > MAX_LISTED:
                raise LimitReached(f"more than {MAX_ENTRIES} entries, or very long names; use iter_list")
        return found

    async def iter_list(self, path: AnyPath = ".", *, depth: int = 1) -> AsyncIterator[FileInfo]:
        """As `list`, for folders of any size."""
        client = await self._connect()
        call = client.open("list_dir", {**path_params(path), "depth": depth}).patiently(PATIENCE_S)
        try:
            async for entry in _records(call, _Entry):
                yield entry.info()
        finally:
            call.abandon()

    async def make_dir(self, path: AnyPath, *, mode: int = 0o777, parents: bool = True) -> None:
        """Make a folder, and with `parents` all above it; then one that is there already is fine."""
        await self._call("make_dir", **path_params(path), mode=mode, parents=parents)

    async def move(self, path: AnyPath, to: AnyPath, *, overwrite: bool = True) -> None:
        """Rename a file or folder, also to another filesystem."""
        await self._call("move", **path_params(path), **path_params(to, "to"), overwrite=overwrite)

    async def remove(self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, an empty folder, or with `recursive` a folder of any depth."""
        client = await self._connect()
        params = {**path_params(path), "recursive": recursive, "missing_ok": missing_ok}
        await client.call("remove", params, type=dict[str, Any], timeout_s=_LONG_S)

    async def chmod(self, path: AnyPath, mode: int) -> None:
        """Change the permission bits."""
        await self._call("chmod", **path_params(path), mode=mode)

    async def chown(self, path: AnyPath, uid: int, gid: int) -> None:
        """Change the owner, where the box allows it; -1 keeps one."""
        await self._call("chown", **path_params(path), uid=uid, gid=gid)

    async def symlink(self, path: AnyPath, target: str) -> None:
        """Make `path` a link that points to `target`."""
        await self._call("symlink", **path_params(path), target=target)

    async def watch(self, path: AnyPath = ".", *, recursive: bool = True) -> AsyncWatch:
        """Changes below a folder, from now on: `async with await files.watch(...) as events: async for ...`."""
        client = await self._connect()
        call = client.open("watch", {**path_params(path), "recursive": recursive})
        return await AsyncWatch.begin(call)

    # between host and sandbox

    async def upload(self, local: str | os.PathLike[str], remote: AnyPath) -> None:
        """Copy a file or a folder of the host into the sandbox."""
        local = Path(local)
        if local.is_dir():
            await transfers.upload_tree(await self._connect(), local, path_params(remote))
            return
        with local.open("rb") as file:
            await self.write(remote, file, mode=os.fstat(file.fileno()).st_mode & 0o777)

    async def download(self, remote: AnyPath, local: str | os.PathLike[str], *, max_bytes: int = MAX_DOWNLOAD) -> None:
        """Copy a file or a folder of the sandbox to the host, at most `max_bytes`. A file appears whole or not at
        all; a folder's content cannot leave `local`, whatever the sandbox put into it."""
        local = Path(local)
        info = await self.stat(remote)
        if info.is_dir:
            await transfers.download_tree(await self._connect(), path_params(remote), local, max_bytes)
            return
        if local.is_dir():  # named by us: the sandbox has no say in what our files are called
            local = local / transfers.own_name(os.fsdecode(remote))
        with transfers.whole_or_not_at_all(local, info.mode) as write:
            await self._read_to(remote, 0, None, max_bytes, write)

    async def read_tar(self, path: AnyPath) -> AsyncIterator[bytes]:
        """A folder's content as a tar stream, piece by piece."""
        call = (await self._connect()).open("tree_download", path_params(path)).patiently(PATIENCE_S)
        try:
            async for _, data in call.chunks():
                yield data
            await call.result(dict[str, Any])
        finally:
            call.abandon()

    async def write_tar(self, path: AnyPath, tar: Readable) -> None:
        """Unpack a tar stream into a folder, which is made if missing."""
        call = (await self._connect()).open("tree_upload", path_params(path)).patiently(PATIENCE_S)
        try:
            await _send_all(call, tar.read)
            call.end()
            await call.result(dict[str, Any])
        finally:
            call.abandon()


class AsyncWatch:
    """Changes as they happen. Leaving the `with` ends it."""

    def __init__(self, call: Call, records: AsyncIterator[_Event]) -> None:
        self._call = call
        self._records = records

    @classmethod
    async def begin(cls, call: Call) -> Self:
        """Wait until the kernel watches, so that nothing that happens after is missed."""
        records = _records(call, _Event)
        try:
            async with asyncio.timeout(30):
                await anext(records)
        except StopAsyncIteration:
            raise AgentProtocolError("the agent ended a watch before it began. Destroy this sandbox") from None
        except TimeoutError:
            call.abandon()
            raise CallTimeout("the agent did not begin to watch within 30 s") from None
        except BaseException:
            call.abandon()
            raise
        return cls(call, records)

    async def __aiter__(self) -> AsyncIterator[FileEvent]:
        async for event in self._records:
            yield FileEvent(event=event.event, path=_name(event.path, event.path64) or "", dir=event.dir)

    async def close(self) -> None:
        """Stop watching."""
        self._call.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _check_whole(sent: _Sent, count: int) -> None:
    if sent.bytes_sent != count:
        raise AgentProtocolError(f"the agent sent {count} bytes and says {sent.bytes_sent}. Destroy this sandbox")


async def _send_all(call: Call, read: Callable[[int], bytes | None]) -> None:
    while not call.done:
        data = await asyncio.to_thread(read, _CHUNK)
        if not data:
            return
        await call.send(data)


async def _records(call: Call, type: type[T]) -> AsyncIterator[T]:
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
        if len(rest) > _CHUNK:
            raise AgentProtocolError("the agent sent a record without end. Destroy this sandbox")
    if rest:
        raise AgentProtocolError("the agent's last record is cut off. Destroy this sandbox")
