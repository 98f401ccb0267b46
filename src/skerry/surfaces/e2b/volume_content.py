"""Files of E2B's volumes, by a volume's own token: read and written in a sandbox that is there for one call."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from skerry.errors import AccessDenied, InvalidSpec, PathIsFolder, SkerryError, TooLarge
from skerry.ledger.line import ACTOR, Actor
from skerry.model.results import FileInfo, FileType
from skerry.sandbox.files import AsyncFiles
from skerry.store.documents import Document
from skerry.surfaces.e2b import answers, wire
from skerry.surfaces.e2b.envd.entries import text
from skerry.surfaces.e2b.envd.files import Body, begun
from skerry.surfaces.e2b.volumes import PLACE, KeptVolume, Volumes
from skerry.surfaces.rest.route import GONE, Streamed, read_body, whole_body
from skerry.surfaces.server.answers import StreamedAnswer

_MOST_LISTED = 10_000
_DEEPEST = 64
_MOST_BODY = 4096
_TYPES = {FileType.FILE: "file", FileType.DIR: "directory", FileType.SYMLINK: "symlink"}
_OWN_MODE = 0o7777
Handler = Callable[["Files"], Awaitable[Response]]


class Files:
    """One call about the files of a volume."""

    def __init__(self, volumes: Volumes, document: Document[KeptVolume], request: Request) -> None:
        self._volumes = volumes
        self._document = document
        self.request = request
        self.path = _path_of(request)

    def opened(self) -> Any:
        """The files, while the `with` lasts."""
        return self._volumes.files(self._document)

    def number(self, name: str, most: int, default: int | None = None) -> int | None:
        """A number of the query. Raises InvalidSpec."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > most:
            raise InvalidSpec(f"{name}: 0 to {most}", field=name)
        return int(text)

    @property
    def is_forced(self) -> bool:
        return self.request.query_params.get("force", "").lower() == "true"


class Change(msgspec.Struct, frozen=True):
    """What is to be other about a file."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None


def routes(volumes: Volumes) -> list[BaseRoute]:
    table: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "path", stat),
        ("PATCH", "path", change),
        ("DELETE", "path", remove),
        ("GET", "dir", list_dir),
        ("POST", "dir", make_dir),
        ("GET", "file", read),
        ("PUT", "file", write),
    )
    return [_route(volumes, method, f"/volumecontent/{{id}}/{kind}", handler) for method, kind, handler in table]


def _route(volumes: Volumes, method: str, path: str, handler: Handler) -> Route:
    async def endpoint(request: Request) -> Response:
        request.scope["skerry.route"] = made
        try:
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer":
                raise AccessDenied("this call needs a volume's token: Authorization: Bearer TOKEN")
            document = await volumes.shown(str(request.path_params["id"]), token.strip())
            ACTOR.set(Actor(f"e2b-volume:{document.id}", document.project))
            return await handler(Files(volumes, document, request))
        except ClientDisconnect:
            return Response(status_code=GONE)
        except SkerryError as error:
            return answers.of_error(error)

    made = Route(path, endpoint, methods=[method])
    return made


async def stat(call: Files) -> Response:
    async with call.opened() as files:
        return answers.answer(await _stat(files, call.path))


async def list_dir(call: Files) -> Response:
    depth = call.number("depth", _DEEPEST, 1) or 1
    async with call.opened() as files:
        found: list[dict[str, Any]] = []
        async for each in files.iter_list(call.path, depth=depth):
            if len(found) >= _MOST_LISTED:
                raise TooLarge(f"the folder has more than {_MOST_LISTED} entries: list less of it")
            found.append(_entry(each))
        return answers.answer(sorted(found, key=lambda entry: str(entry["path"]).split("/")))


async def make_dir(call: Files) -> Response:
    wanted = _change_of(call)
    async with call.opened() as files:
        await files.make_dir(call.path, mode=0o755, parents=call.is_forced, exist_ok=call.is_forced)
        return answers.answer(await _changed(files, call.path, wanted), 201)


async def change(call: Files) -> Response:
    wanted = read_body(Change, await whole_body(call.request, _MOST_BODY))
    _check(wanted)
    async with call.opened() as files:
        return answers.answer(await _changed(files, call.path, wanted))


async def remove(call: Files) -> Response:
    """Remove a file, or a folder with all that is in it."""
    if call.path == PLACE:
        raise InvalidSpec("path: the volume itself is removed by DELETE /volumes", field="path")
    async with call.opened() as files:
        await files.remove(call.path, recursive=True)
    return answers.answer(status=204)


async def read(call: Files) -> Response:
    return StreamedAnswer(Streamed(chunks=await begun(_chunks(call))), {})


async def _chunks(call: Files) -> AsyncIterator[bytes]:
    async with call.opened() as files:
        async for chunk in files.iter_chunks(call.path):
            yield chunk


async def write(call: Files) -> Response:
    wanted = _change_of(call)
    if call.path == PLACE:
        raise PathIsFolder("path: it is the volume itself")
    async with call.opened() as files:
        await files.write(call.path, Body(call.request.stream()), atomic=False, parents=call.is_forced)
        return answers.answer(await _changed(files, call.path, wanted), 201)


def _path_of(request: Request) -> str:
    """The path in the sandbox of what a call names. Raises InvalidSpec."""
    path = request.query_params.get("path")
    if not path or "\0" in path or len(path) > 4096:
        raise InvalidSpec("path: it is missing, or is none", field="path")
    inside = posixpath.normpath("/" + path.lstrip("/"))
    return PLACE if inside == "/" else PLACE + inside


def _change_of(call: Files) -> Change:
    return Change(
        uid=call.number("uid", 2**32 - 2), gid=call.number("gid", 2**32 - 2), mode=call.number("mode", _OWN_MODE)
    )


def _check(wanted: Change) -> None:
    for name, most in (("uid", 2**32 - 2), ("gid", 2**32 - 2), ("mode", _OWN_MODE)):
        value = getattr(wanted, name)
        if value is not None and not 0 <= value <= most:
            raise InvalidSpec(f"{name}: 0 to {most}", field=name)


async def _changed(files: AsyncFiles, path: str, wanted: Change) -> dict[str, Any]:
    """A file, once its owner and mode are as they are wanted."""
    if wanted.uid is not None or wanted.gid is not None:
        uid, gid = (-1 if each is None else each for each in (wanted.uid, wanted.gid))
        await files.chown(path, uid, gid)
    if wanted.mode is not None:
        await files.chmod(path, wanted.mode)
    return await _stat(files, path)


async def _stat(files: AsyncFiles, path: str) -> dict[str, Any]:
    return _entry(await files.stat(path, follow=False))


def _entry(file: FileInfo) -> dict[str, Any]:
    """A file in E2B's words. The agent tells one time only, that of the last change of its content."""
    path = file.path.removeprefix(PLACE) or "/"
    at = wire.instant(min(max(file.mtime, 0.0), 253402300799.0))
    found: dict[str, Any] = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(file.type, "unknown"),
        "path": path,
        "size": file.size,
        "mode": file.mode & _OWN_MODE,
        "uid": file.uid,
        "gid": file.gid,
        "atime": at,
        "mtime": at,
        "ctime": at,
    }
    if file.target is not None:
        found["target"] = file.target
    return {name: text(value) if isinstance(value, str) else value for name, value in found.items()}
