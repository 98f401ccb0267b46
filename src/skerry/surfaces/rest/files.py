"""Files of a sandbox: contents and trees are streamed both ways, and nothing is ever whole in memory."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import quote

import msgspec

from skerry.errors import CallInterrupted, InvalidSpec, PathIsFolder, PathNotFile, PathNotFolder, PathNotFound
from skerry.model.results import FileInfo, FileType
from skerry.model.tenants import Scope
from skerry.sandbox.files import AsyncFiles
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import BYTES, EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import Upload, closing, comment, frame, send_bytes, send_events
from skerry.surfaces.rest.views import Page

routes = Routes("files")

TAR = "application/x-tar"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
"""Permission bits, as a decimal number: 420 is 0644."""
Id = Annotated[int, msgspec.Meta(ge=-1, lt=2**32 - 1)]
"""Number of a user or a group; -1 stays as it is."""


class PathQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file. A relative path starts where commands do, `~` is the home folder."""

    path: str | None = None
    path64: str | None = None
    """Base64 of the bytes of a path that is no UTF-8, in the place of `path`."""

    @property
    def named(self) -> str | bytes:
        """The path. Raises InvalidSpec."""
        return _path(self.path, self.path64, "path")


class StatQuery(PathQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    follow: bool = True
    """Follow a symbolic link."""


class WriteQuery(PathQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Mode | None = None
    append: bool = False
    """Add to the end of what is there. If that is cut short, a part of it may have been added."""
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    """Write into the file as it is, from that byte on; what is before and after it stays."""


class FolderQuery(PathQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder; without a path, the one where commands start."""

    @property
    def named(self) -> str | bytes:
        return "." if self.path is None and self.path64 is None else _path(self.path, self.path64, "path")


class ListQuery(FolderQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    depth: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after: str = ""
    """The `next` of the page before."""


class RemoveQuery(PathQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recursive: bool = False


class WatchQuery(FolderQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recursive: bool = True


class MakeFolder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | None = None
    path64: str | None = None
    mode: Mode = 0o777


class MoveFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | None = None
    path64: str | None = None
    to: str | None = None
    to64: str | None = None
    overwrite: bool = True


class ChangeMode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Mode
    path: str | None = None
    path64: str | None = None


class ChangeOwner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | None = None
    path64: str | None = None
    uid: Id = -1
    gid: Id = -1


class MakeSymlink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: str
    """What it leads to, which need not be there."""
    path: str | None = None
    path64: str | None = None


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the box sees it. A name that is no UTF-8 has marks in the place of what is none."""

    name: str
    path: str
    path64: str | None
    """Base64 of the path, if it is no UTF-8."""
    type: FileType
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None
    """Target of a symbolic link."""
    etag: str
    """What its content is known by."""

    @classmethod
    def of(cls, info: FileInfo) -> FileView:
        path, path64 = _texts(info.path)
        return cls(
            name=_texts(info.name)[0],
            path=path,
            path64=path64,
            type=info.type,
            size=info.size,
            mode=info.mode,
            uid=info.uid,
            gid=info.gid,
            mtime=info.mtime,
            target=None if info.target is None else _texts(info.target)[0],
            etag=etag_of(info),
        )


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change below a watched folder; `overflow` means that some were missed: look again."""

    event: str
    path: str
    path64: str | None
    dir: bool


class Written(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    """Of the file, now."""


@routes.get("/sandboxes/{id}/files", Scope.FILES)
async def list(call: Call, id: str, query: ListQuery) -> Page[FileView]:
    """Files in a folder, sorted, parents before children."""
    files = await _files(call, id)
    after = _decoded(query.after, "after") if query.after else None
    page, last = Page[FileView]([]), ""
    async with closing(files.iter_list(query.named, depth=query.depth)) as entries:
        async for info in entries:
            if after is not None:
                after = None if os.fsencode(info.path) == after else after
            elif len(page.items) == query.limit:
                return Page(page.items, last)
            else:
                page.items.append(FileView.of(info))
                last = _encoded(os.fsencode(info.path))
    if after is not None:
        raise InvalidSpec("after: that page is gone; begin again without it", field="after")
    return page


@routes.delete("/sandboxes/{id}/files", Scope.FILES)
async def remove(call: Call, id: str, query: RemoveQuery) -> None:
    """Remove a file, an empty folder, or with `recursive` a folder of any depth."""
    await (await _files(call, id)).remove(query.named, recursive=query.recursive)


@routes.get("/sandboxes/{id}/files/stat", Scope.FILES)
async def stat(call: Call, id: str, query: StatQuery) -> FileView:
    """Type, size, owner and times of a file."""
    return FileView.of(await (await _files(call, id)).stat(query.named, follow=query.follow))


@routes.get(
    "/sandboxes/{id}/files/content",
    Scope.FILES,
    content_type=BYTES,
    headers=("Range", "If-None-Match"),
    also=(206, 304),
)
async def read(call: Call, id: str, query: PathQuery) -> Streamed:
    """The content of a file, or with `Range` a part of it (206). Its ETag changes with its size and time. If it becomes
    shorter meanwhile, the answer breaks off."""
    files = await _files(call, id)
    info = await files.stat(query.named)
    if info.is_dir:
        raise PathIsFolder(f"{_texts(info.path)[0]} is a folder: take its tree")
    if info.type is not FileType.FILE:
        raise PathNotFile(f"{_texts(info.path)[0]} is no file: {info.type}")
    tag = etag_of(info)
    headers = {"etag": tag, "accept-ranges": "bytes", "content-disposition": _disposition(info)}
    if _is_among(tag, call.header("if-none-match")):
        return Streamed(chunks=_nothing(), status=304, headers={"etag": tag})
    wanted = _range(call, info.size, tag)
    if wanted is not None:
        first, length = wanted
        headers["content-range"] = f"bytes {first}-{first + length - 1}/{info.size}"
    elif info.size:
        first, length = 0, info.size
    else:  # files of /proc have content and no size
        return await send_bytes(call, _content(files, query.named, 0, None), headers=headers)
    headers["content-length"] = str(length)
    status = 200 if wanted is None else 206
    return await send_bytes(call, _content(files, query.named, first, length), headers=headers, status=status)


@routes.put("/sandboxes/{id}/files/content", Scope.FILES, takes=BYTES, headers=("If-Match",))
async def write(call: Call, id: str, query: WriteQuery) -> Written:
    """Write a whole file, whose folders are made. Until all of it has come, what was there stays; if it never comes
    whole, that stays for good. With `If-Match` it has to be as it was when it was read."""
    files = await _files(call, id)
    await _match(call, files, query.named)
    if query.append or query.offset is not None:
        if query.mode is not None or (query.append and query.offset is not None):
            raise InvalidSpec("append, offset and mode exclude each other", field="mode")
        if query.offset is None:
            return Written(size=await files.append(query.named, Upload(call)))
        return Written(size=await files.write_at(query.named, query.offset, Upload(call)))
    return Written(size=await files.write(query.named, Upload(call), mode=query.mode))


@routes.post("/sandboxes/{id}/files/folder", Scope.FILES, status=204)
async def make_folder(call: Call, id: str, body: MakeFolder) -> None:
    """Make a folder and all above it; one that is there already is fine."""
    await (await _files(call, id)).make_dir(_path(body.path, body.path64, "path"), mode=body.mode)


@routes.post("/sandboxes/{id}/files/move", Scope.FILES, status=204)
async def move(call: Call, id: str, body: MoveFile) -> None:
    """Rename a file or folder, also to another file system."""
    path, to = _path(body.path, body.path64, "path"), _path(body.to, body.to64, "to")
    await (await _files(call, id)).move(path, to, overwrite=body.overwrite)


@routes.post("/sandboxes/{id}/files/mode", Scope.FILES, status=204)
async def change_mode(call: Call, id: str, body: ChangeMode) -> None:
    """Change the permission bits of a file or folder."""
    await (await _files(call, id)).chmod(_path(body.path, body.path64, "path"), body.mode)


@routes.post("/sandboxes/{id}/files/owner", Scope.FILES, status=204)
async def change_owner(call: Call, id: str, body: ChangeOwner) -> None:
    """Change the owner of a file or folder, where the box allows it."""
    await (await _files(call, id)).chown(_path(body.path, body.path64, "path"), body.uid, body.gid)


@routes.post("/sandboxes/{id}/files/link", Scope.FILES, status=204)
async def make_symlink(call: Call, id: str, body: MakeSymlink) -> None:
    """Make a symbolic link."""
    await (await _files(call, id)).symlink(_path(body.path, body.path64, "path"), body.target)


@routes.get("/sandboxes/{id}/files/tree", Scope.FILES, content_type=TAR)
async def read_tree(call: Call, id: str, query: PathQuery) -> Streamed:
    """A folder with all that is in it, as a tar. If it cannot be read to its end, the answer breaks off."""
    files = await _files(call, id)
    info = await files.stat(query.named)
    if not info.is_dir:
        raise PathNotFolder(f"{_texts(info.path)[0]} is no folder: take its content")

    return await send_bytes(call, files.read_tar(query.named), content_type=TAR)


@routes.put("/sandboxes/{id}/files/tree", Scope.FILES, status=204, takes=TAR)
async def write_tree(call: Call, id: str, query: PathQuery) -> None:
    """Unpack a tar into a folder, which is made if missing. What it names is replaced, all else stays. If it is cut
    short, what came before is there."""
    await (await _files(call, id)).write_tar(query.named, Upload(call))


@routes.get("/sandboxes/{id}/files/watch", Scope.FILES, content_type=EVENTS)
async def watch(call: Call, id: str, query: WatchQuery) -> Streamed:
    """Changes below a folder, as events `change`. What happens after the first line of the answer is not missed."""
    files = await _files(call, id)

    async def pieces() -> AsyncIterator[bytes]:
        async with await files.watch(query.named, recursive=query.recursive) as changes:
            yield comment("watches")
            async with closing(aiter(changes)) as each:
                async for change in each:
                    path, path64 = _texts(change.path)
                    yield frame("change", FileChange(event=change.event, path=path, path64=path64, dir=change.dir))

    return await send_events(call, pieces())


def etag_of(info: FileInfo) -> str:
    """What a file's content is known by: its time and its size."""
    return f'"{int(info.mtime * 1e6):x}-{info.size:x}"'


async def _files(call: Call, id: str) -> AsyncFiles:
    return (await call.sandbox(id)).files


async def _content(files: AsyncFiles, path: str | bytes, offset: int, length: int | None) -> AsyncIterator[bytes]:
    """A part of a file. The last piece is given when it is known that all was well: an agent tells at the end of a file
    that became shorter meanwhile, and those who have as many bytes as they were promised would not listen."""
    count, held = 0, b""
    async with closing(files.iter_chunks(path, offset=offset, length=length)) as pieces:
        async for piece in pieces:
            count += len(piece)
            if held:
                yield held
            held = piece
    if length is not None and count != length:
        raise CallInterrupted(f"the file changed while it was read: {count} bytes of {length} came")
    if held:
        yield held


async def _nothing() -> AsyncIterator[bytes]:
    for piece in tuple[bytes, ...]():
        yield piece


async def _match(call: Call, files: AsyncFiles, path: str | bytes) -> None:
    """Raise Refused for a file that is not as `If-Match` says."""
    wanted = call.header("if-match")
    if wanted is None:
        return
    try:
        tag = etag_of(await files.stat(path))
    except PathNotFound:
        tag = None
    if tag is None or not _is_among(tag, wanted):
        raise Refused(412, "the file is not as it was", "precondition_failed")


def _is_among(tag: str, header: str | None) -> bool:
    if header is None:
        return False
    names = [name.strip().removeprefix("W/") for name in header.split(",")]
    return "*" in names or tag in names


def _range(call: Call, size: int, tag: str) -> tuple[int, int] | None:
    """First byte and length of the part that is asked for; None is the whole. Raises Refused for one that the file does
    not have. What is no range, or several of them, is the whole, as HTTP has it."""
    found = _RANGE.fullmatch((call.header("range") or "").replace(" ", ""))
    if found is None or found.groups() == ("", "") or call.header("if-range") not in (None, tag):
        return None
    begin, end = found.groups()
    first = max(0, size - int(end)) if not begin else int(begin)
    last = size - 1 if not begin or not end else min(int(end), size - 1)
    if begin and end and int(end) < int(begin):
        return None
    if first > last:
        raise Refused(416, f"the file has {size} bytes", "no_such_range", {"content-range": f"bytes */{size}"})
    return first, last - first + 1


def _disposition(info: FileInfo) -> str:
    """A name for those who save it. Nothing of the box is shown as a page of ours."""
    return f"attachment; filename*=UTF-8''{quote(os.fsencode(info.name), safe='')}"


def _path(path: str | None, path64: str | None, field: str) -> str | bytes:
    """The path that a request names. Raises InvalidSpec."""
    if (path is None) == (path64 is None):
        raise InvalidSpec(f"{field}: give it, as text or as {field}64", field=field)
    return path if path is not None else _decoded(path64 or "", f"{field}64")


def _decoded(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSpec(f"{field}: it is no base64", field=field) from None


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()


def _texts(name: str) -> tuple[str, str | None]:
    """A name as text that can be sent, and base64 of it where that is not all of it."""
    raw = os.fsencode(name)
    try:
        return raw.decode(), None
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), _encoded(raw)
