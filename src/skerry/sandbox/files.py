"""Files in a sandbox: any name, any size, in bounded memory."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from skerry.agent import transfers
from skerry.agent.call import Call
from skerry.agent.transfers import PATIENCE_S
from skerry.errors import AgentProtocolError, CallTimeout, PathNotFound, TooLarge
from skerry.host.folders import whole_or_not_at_all
from skerry.model.results import Count, FileDetails, FileInfo
from skerry.sandbox.connection import Connect
from skerry.sandbox.entries import AnyPath, Detailed, Entry, Kept, path_params, records
from skerry.sandbox.watches import AsyncKeptWatch, AsyncWatch
from skerry.units import format_size

T = TypeVar("T")

_LONG_S = 3600.0
_CHUNK = 1 << 20
MAX_ENTRIES = 1_000_000
MAX_LISTED = 1 << 28
MAX_READ = 1 << 30
MAX_DOWNLOAD = 4 << 30
"""Of a sandbox that may hold any amount."""


class Readable(Protocol):
    """An open file, or anything else that gives bytes; its `read` may be a coroutine function."""

    def read(self, size: int, /) -> bytes | Awaitable[bytes] | None: ...


class _Written(msgspec.Struct):
    size: Count


class _Sent(msgspec.Struct):
    bytes_sent: Count

    def check(self, count: int) -> None:
        if self.bytes_sent != count:
            raise AgentProtocolError(f"the agent sent {count} bytes and says {self.bytes_sent}. Destroy this sandbox")


class AsyncFiles:
    """The files of a sandbox. Relative paths start where its commands do, in the work folder or the spec's `cwd`
    (`Sandbox.cwd` tells); `~` is the home folder."""

    def __init__(
        self,
        connect: Connect,
        holds: Callable[[], int | None] = lambda: None,
        timeout_s: Callable[[], float | None] = lambda: None,
        moved: Callable[[str, str, int], None] = lambda way, path, size: None,
    ) -> None:
        """`holds` tells how much the sandbox may hold, `timeout_s` how long a call may take, if they have a bound.
        `moved` hears of what came in or went out, and how many bytes that were."""
        self._connect = connect
        self._holds = holds
        self._timeout_s = timeout_s
        self._moved = moved

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise CallTimeout for what takes longer than any operation in this sandbox may."""
        timeout_s = self._timeout_s() or None
        try:
            async with asyncio.timeout(timeout_s) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise CallTimeout(f"it took longer than {timeout_s:g} s, as the sandbox's timeout says") from None

    def _bound(self, path: AnyPath, asked: int | None, most: int | None = None) -> tuple[int, str]:
        """The most bytes that the host takes, and the message if there are more."""
        name = os.fsdecode(path)
        if asked is not None:
            return asked, f"{name} is larger than {asked} bytes"
        holds = self._holds()
        bound = min(each for each in (holds or MAX_DOWNLOAD, most) if each is not None)
        why = "which is all that this sandbox can have written" if bound == holds else "the most that is taken unasked"
        advice = "say how much may come (max_bytes, --max-size)"
        return bound, f"{name} is larger than {format_size(bound)}, {why}: {advice}"

    async def _call(self, method: str, **params: Any) -> None:
        async with self._in_time():
            await (await self._connect()).call(method, params, type=dict[str, Any])

    @asynccontextmanager
    async def _open(
        self, method: str, path: AnyPath, on_data: Callable[[int, memoryview], None] | None = None, **params: Any
    ) -> AsyncIterator[Call]:
        call = (await self._connect()).open(method, {**path_params(path), **params}, on_data=on_data)
        try:
            yield call
        finally:
            call.abandon()

    async def read(
        self, path: AnyPath, *, offset: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> bytes:
        """A file, or a range of it. Raises TooLarge for more than `max_bytes`: take `iter_chunks` or `download` for
        that. If nothing is said, that is what the sandbox can have written, and 1 GiB at most."""
        buffer = io.BytesIO()
        await self._read_to(path, offset, length, self._bound(path, max_bytes, MAX_READ), buffer.write)
        return buffer.getvalue()

    async def read_text(self, path: AnyPath) -> str:
        """A file as UTF-8."""
        return (await self.read(path)).decode()

    async def _read_to(
        self,
        path: AnyPath,
        offset: int,
        length: int | None,
        bound: tuple[int, str],
        write: Callable[[memoryview], object],
    ) -> None:
        """A file's content to `write`, as it comes; what the sandbox sends beyond the bound is not taken."""
        count = 0
        max_bytes, too_much = bound

        def on_data(fd: int, data: memoryview) -> None:
            nonlocal count
            count += len(data)
            if fd != 1 or (length is not None and count > length):
                call.stop(AgentProtocolError("the agent sent what was not asked for. Destroy this sandbox"))
            elif count > max_bytes:
                call.stop(TooLarge(too_much))
            else:
                write(data)

        try:
            async with self._in_time(), self._open("read_file", path, on_data, offset=offset, length=length) as call:
                sent = await call.patiently(PATIENCE_S).result(_Sent)
        finally:
            self._moved("out", os.fsdecode(path), count)
        sent.check(count)

    async def iter_chunks(self, path: AnyPath, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """A file piece by piece, as fast as the pieces are taken."""
        count = 0
        try:
            async with self._open("read_file", path, offset=offset, length=length) as call:
                async for fd, data in call.chunks():
                    count += len(data)
                    if fd != 1 or (length is not None and count > length):
                        raise AgentProtocolError("the agent sent what was not asked for. Destroy this sandbox")
                    yield data
                (await call.result(_Sent)).check(count)
        finally:
            self._moved("out", os.fsdecode(path), count)

    async def write(
        self,
        path: AnyPath,
        data: bytes | bytearray | memoryview | str | Readable,
        *,
        mode: int | None = None,
        atomic: bool = True,
        parents: bool = True,
        own: bool = False,
    ) -> int:
        """Write a whole file and return its size. Until all of it is there, the old one stays (unless not `atomic`).
        With `own` it becomes the agent's user's, where that may be. Raises PathDenied for one that may not be written,
        also where its folder would let it be replaced."""
        return await self._write(path, data, mode=mode, atomic=atomic, parents=parents, own=own)

    async def append(self, path: AnyPath, data: bytes | str | Readable) -> int:
        """Add to the end of a file and return its size; it is made if missing."""
        return await self._write(path, data, append=True)

    async def write_at(self, path: AnyPath, offset: int, data: bytes | str | Readable) -> int:
        """Write into the middle of a file, in place, and return its size."""
        return await self._write(path, data, offset=offset)

    async def _write(self, path: AnyPath, data: Any, **options: Any) -> int:
        async with self._in_time(), self._open("write_file", path, **options) as call:
            count = await _send_all(call.patiently(PATIENCE_S), data)
            size = (await call.result(_Written)).size
        self._moved("in", os.fsdecode(path), count)
        return size

    async def stat(self, path: AnyPath, *, follow: bool = True) -> FileInfo:
        """Type, size, owner and times of a file; a link is followed unless told otherwise."""
        async with self._in_time():
            client = await self._connect()
            return (await client.call("stat", {**path_params(path), "follow": follow}, type=Entry)).info()

    async def exists(self, path: AnyPath) -> bool:
        """Whether there is something of that name, a dangling link included."""
        try:
            await self.stat(path, follow=False)
        except PathNotFound:
            return False
        return True

    async def list(self, path: AnyPath = ".", *, depth: int = 1) -> list[FileInfo]:
        """The files in a folder, sorted, parents before children."""
        found = []
        letters = 0
        async with self._in_time():
            async for info in self.iter_list(path, depth=depth):
                found.append(info)
                letters += len(info.path) + len(info.name) + len(info.target or "")
                if len(found) > MAX_ENTRIES or letters > MAX_LISTED:
                    raise TooLarge(f"more than {MAX_ENTRIES} entries, or very long names; use iter_list")
        return found

    async def iter_list(self, path: AnyPath = ".", *, depth: int = 1) -> AsyncIterator[FileInfo]:
        """As `list`, for folders of any size."""
        async with self._open("list_dir", path, depth=depth) as call:
            async for entry in records(call.patiently(PATIENCE_S), Entry):
                yield entry.info()

    async def make_dir(
        self, path: AnyPath, *, mode: int = 0o777, parents: bool = True, exist_ok: bool | None = None
    ) -> None:
        """Make a folder, and with `parents` all above it; then one that is there already is fine, unless not
        `exist_ok`."""
        new = exist_ok is False
        await self._call("make_dir", **path_params(path), mode=mode, parents=parents, new=new)

    async def move(self, path: AnyPath, to: AnyPath, *, overwrite: bool = True) -> None:
        """Rename a file or folder, also to another filesystem."""
        await self._call("move", **path_params(path), **path_params(to, "to"), overwrite=overwrite)

    async def remove(self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, an empty folder, or with `recursive` a folder of any depth."""
        params = {**path_params(path), "recursive": recursive, "missing_ok": missing_ok}
        async with self._in_time():
            await (await self._connect()).call("remove", params, type=dict[str, Any], timeout_s=_LONG_S)

    async def chmod(self, path: AnyPath, mode: int) -> None:
        """Change the permission bits."""
        await self._call("chmod", **path_params(path), mode=mode)

    async def chown(self, path: AnyPath, uid: int, gid: int) -> None:
        """Change the owner, where the box allows it; -1 keeps one."""
        await self._call("chown", **path_params(path), uid=uid, gid=gid)

    async def details(self, path: AnyPath, *, xattrs: str | None = None) -> FileDetails:
        """What is known of a file and not only told by `stat`: its owners by name, where a link leads in the end, and
        the extended attributes whose names begin with `xattrs`."""
        params = {**path_params(path), "details": True, "xattrs": xattrs}
        async with self._in_time():
            return (await (await self._connect()).call("stat", params, type=Detailed)).details()

    async def iter_details(
        self, path: AnyPath = ".", *, depth: int = 1, xattrs: str | None = None
    ) -> AsyncIterator[FileDetails]:
        """As `iter_list`, with the details of each."""
        async with self._open("list_dir", path, depth=depth, details=True, xattrs=xattrs) as call:
            async for entry in records(call.patiently(PATIENCE_S), Detailed):
                yield entry.details()

    async def set_xattrs(self, path: AnyPath, new: Mapping[str, bytes], *, replace: str | None = None) -> None:
        """Set extended attributes of a file; all others whose names begin with `replace` are removed. Raises
        Unsupported where the file system has none."""
        values = {name: base64.b64encode(value).decode() for name, value in new.items()}
        await self._call("xattr", **path_params(path), set=values, replace=replace)

    async def symlink(self, path: AnyPath, target: str) -> None:
        """Make `path` a link that points to `target`."""
        await self._call("symlink", **path_params(path), target=target)

    async def watch(self, path: AnyPath = ".", *, recursive: bool = True, exact: bool = False) -> AsyncWatch:
        """Changes below a folder, from now on: `async with await files.watch(...) as events: async for ...`. One that
        is `exact` tells both sides of a move, `moved_from` and `moved_to`."""
        params = {**path_params(path), "recursive": recursive, "exact": exact}
        return await AsyncWatch.begin((await self._connect()).open("watch", params))

    async def keep_watch(self, path: AnyPath = ".", *, recursive: bool = True, exact: bool = False) -> AsyncKeptWatch:
        """A watch that the sandbox itself keeps, for those who come back and ask. Of more than 64 the one that nobody
        has asked for longest ends."""
        params = {**path_params(path), "recursive": recursive, "exact": exact, "keep": True}
        kept = await (await self._connect()).call("watch", params, type=Kept)
        return AsyncKeptWatch(self._connect, kept.watch)

    def kept_watch(self, number: int) -> AsyncKeptWatch:
        """A watch that was kept, by its number."""
        return AsyncKeptWatch(self._connect, number)

    async def upload(self, local: str | os.PathLike[str], remote: AnyPath) -> None:
        """Copy a file or a folder of the host into the sandbox."""
        local = Path(local)
        if local.is_dir():
            async with self._in_time():
                count = await transfers.upload_tree(await self._connect(), local, path_params(remote))
            self._moved("in", os.fsdecode(remote), count)
            return
        with local.open("rb") as file:
            await self.write(remote, file, mode=os.fstat(file.fileno()).st_mode & 0o777)

    async def download(self, remote: AnyPath, local: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        """Copy a file or a folder of the sandbox to the host, whole or not at all: at most `max_bytes`, or as much as
        the sandbox can have written (4 GiB where that has no bound). A folder that is there gets the content beside
        what it has; that cannot leave `local`, whatever the sandbox put into it."""
        local = Path(local)
        info = await self.stat(remote)
        if info.is_dir:
            bound = self._bound(remote, max_bytes)
            async with self._in_time():
                count = await transfers.download_tree(await self._connect(), path_params(remote), local, *bound)
            self._moved("out", os.fsdecode(remote), count)
            return
        if local.is_dir():  # named by us: the sandbox has no say in what our files are called
            local = local / transfers.own_name(os.fsdecode(remote))
        with whole_or_not_at_all(local, info.mode) as write:
            await self._read_to(remote, 0, None, self._bound(remote, max_bytes), write)

    async def read_tar(self, path: AnyPath) -> AsyncIterator[bytes]:
        """A folder's content as a tar stream, piece by piece."""
        count = 0
        try:
            async with self._open("tree_download", path) as call:
                async for _, data in call.patiently(PATIENCE_S).chunks():
                    count += len(data)
                    yield data
                await call.result(dict[str, Any])
        finally:
            self._moved("out", os.fsdecode(path), count)

    async def write_tar(self, path: AnyPath, tar: Readable) -> None:
        """Unpack a tar stream into a folder, which is made if missing."""
        async with self._in_time(), self._open("tree_upload", path) as call:
            count = await _send_all(call.patiently(PATIENCE_S), tar)
            await call.result(dict[str, Any])
        self._moved("in", os.fsdecode(path), count)


async def _send_all(call: Call, data: bytes | bytearray | memoryview | str | Readable) -> int:
    """Send all of it; how many bytes that were."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        count = len(data)
        await call.send(data)
    else:
        count = 0
        while not call.done and (piece := await _read(data)):
            count += len(piece)
            await call.send(piece)
    call.end()
    return count


async def _read(source: Readable) -> bytes | None:
    """The next piece; what blocks is read in a thread."""
    found = source.read(_CHUNK) if iscoroutinefunction(source.read) else await asyncio.to_thread(source.read, _CHUNK)
    return await found if isinstance(found, Awaitable) else found
