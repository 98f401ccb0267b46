"""Calls about files, `filesystem.Filesystem` of E2B's wire, but for watches."""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute

from skerry.errors import FileError, PathExists, PathNotFound
from skerry.sandbox.users import Account
from skerry.surfaces.e2b.envd.codes import RpcError
from skerry.surfaces.e2b.envd.connect import unary
from skerry.surfaces.e2b.envd.context import account_of, named_user, resolve
from skerry.surfaces.e2b.envd.entries import METADATA, entry

_MOST_ENTRIES = 100_000
_MOST_BYTES = 64 << 20
FOLDER_MODE = 0o755


class PathRequest(msgspec.Struct):
    path: str = ""


class ListRequest(PathRequest):
    depth: int = 1


class MoveRequest(msgspec.Struct):
    source: str = ""
    destination: str = ""


def routes() -> list[BaseRoute]:
    place = "/filesystem.Filesystem/"
    return [
        unary(place + "Stat", PathRequest, stat),
        unary(place + "MakeDir", PathRequest, make_dir),
        unary(place + "Move", MoveRequest, move),
        unary(place + "ListDir", ListRequest, list_dir),
        unary(place + "Remove", PathRequest, remove),
    ]


async def _at(request: Request, path: str) -> tuple[Account, str]:
    account = await account_of(request, named_user(request))
    return account, resolve(path, account.user.home)


async def stat(request: Request, message: PathRequest) -> dict[str, Any]:
    """Tell of a file."""
    account, path = await _at(request, message.path)
    return {"entry": entry(await account.files.details(path, xattrs=METADATA))}


async def make_dir(request: Request, message: PathRequest) -> dict[str, Any]:
    """Make a folder and all above it; one that is there is an error."""
    account, path = await _at(request, message.path)
    try:
        await account.files.make_dir(path, mode=FOLDER_MODE, exist_ok=False)
    except PathExists:
        if (await account.files.stat(path)).is_dir:
            raise RpcError("already_exists", f"directory already exists: {path}") from None
        text = f"path already exists but it is not a directory: {path}"
        raise RpcError("invalid_argument", text) from None
    return {"entry": entry(await account.files.details(path, xattrs=METADATA))}


async def move(request: Request, message: MoveRequest) -> dict[str, Any]:
    """Rename a file or a folder; folders above its new name are made."""
    account, source = await _at(request, message.source)
    target = resolve(message.destination, account.user.home)
    files = account.files
    try:
        await files.move(source, target)
    except PathNotFound:
        if not await files.exists(source):
            raise RpcError("not_found", f"source file not found: {source}") from None
        await files.make_dir(posixpath.dirname(target), mode=FOLDER_MODE)
        await files.move(source, target)
    return {"entry": entry(await files.details(target, xattrs=METADATA))}


async def list_dir(request: Request, message: ListRequest) -> dict[str, Any]:
    """List a folder so deep, each folder before what is in it."""
    account, path = await _at(request, message.path)
    if message.depth < 0:
        raise RpcError("invalid_argument", "depth should be at least 1")
    found = []
    size = 0
    async for each in account.files.iter_details(path, depth=message.depth or 1, xattrs=METADATA):
        found.append(each)
        size += len(each.path) + sum(map(len, each.xattrs.values()))
        if len(found) > _MOST_ENTRIES or size > _MOST_BYTES:
            raise RpcError("resource_exhausted", "it has too many entries: list a part of it")
    found.sort(key=lambda each: each.path.split("/"))
    return {"entries": [entry(each) for each in found]}


async def remove(request: Request, message: PathRequest) -> dict[str, Any]:
    """Remove a file, or a folder with all in it; one that is not there is removed already."""
    account, path = await _at(request, message.path)
    try:
        await account.files.remove(path, recursive=True, missing_ok=True)
    except FileError as error:
        raise RpcError("internal", f"error removing file or directory: {error}") from None
    return {}
