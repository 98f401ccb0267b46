"""Watches of folders, as streams or asked from time to time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute

from skerry.errors import NotFound, SkerryError
from skerry.model.results import FileEvent
from skerry.sandbox.users import Account
from skerry.surfaces.e2b.envd.codes import RpcError, is_gone
from skerry.surfaces.e2b.envd.connect import server_stream, unary
from skerry.surfaces.e2b.envd.context import account_of, named_user, resolve
from skerry.surfaces.e2b.envd.entries import METADATA, entry

_TYPES = {
    "create": "CREATE", "moved_to": "CREATE", "modify": "WRITE", "delete": "REMOVE", "moved_from": "RENAME",
    "attrib": "CHMOD",
}  # fmt: skip
_THERE = frozenset({"CREATE", "WRITE", "CHMOD"})
"""What happens to files that are there after it."""
_ID = re.compile(r"w(\d{1,15})(e?)\.([0-9a-f]{0,512})\.([0-9a-f]{0,8192})")


class WatchRequest(msgspec.Struct, rename="camel"):
    path: str = ""
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class WatcherRequest(msgspec.Struct, rename="camel"):
    watcher_id: str = ""


def routes() -> list[BaseRoute]:
    place = "/filesystem.Filesystem/"
    return [
        server_stream(place + "WatchDir", WatchRequest, watch_dir, keep_alive={"keepalive": {}}),
        unary(place + "CreateWatcher", WatchRequest, create_watcher),
        unary(place + "GetWatcherEvents", WatcherRequest, get_watcher_events),
        unary(place + "RemoveWatcher", WatcherRequest, remove_watcher),
    ]


async def watch_dir(request: Request, message: WatchRequest) -> AsyncIterator[dict[str, Any]]:
    """Tell of changes in a folder as they happen."""
    account = await account_of(request, named_user(request))
    path = resolve(message.path, account.user.home)
    async with await account.files.watch(path, recursive=message.recursive, exact=True) as changes:
        yield {"start": {}}
        async for change in changes:
            yield {"filesystem": await _event(account, path, change, with_entry=message.include_entry)}


async def create_watcher(request: Request, message: WatchRequest) -> dict[str, Any]:
    """Begin a watch that its client asks for what happened. Its id holds all that is needed to go on with it."""
    named = named_user(request)
    account = await account_of(request, named)
    path = resolve(message.path, account.user.home)
    kept = await account.files.keep_watch(path, recursive=message.recursive, exact=True)
    flag = "e" if message.include_entry else ""
    return {"watcherId": f"w{kept.number}{flag}.{(named or '').encode().hex()}.{path.encode().hex()}"}


class _Watcher:
    """A watch by its id."""

    def __init__(self, account: Account, number: int, path: str, *, with_entry: bool) -> None:
        self.account = account
        self.kept = account.files.kept_watch(number)
        self.path = path
        self.with_entry = with_entry

    @classmethod
    async def of(cls, request: Request, id: str) -> _Watcher:
        """The watch of an id. Raises NotFound."""
        found = _ID.fullmatch(id)
        try:
            if found is None:
                raise ValueError
            user, path = (bytes.fromhex(found[at]).decode() for at in (3, 4))
        except ValueError:
            raise NotFound(f"watcher with id {id[:64]} not found") from None
        account = await account_of(request, user or None)
        return cls(account, int(found[1]), path, with_entry=bool(found[2]))


async def get_watcher_events(request: Request, message: WatcherRequest) -> dict[str, Any]:
    """Tell all that has happened since the last time, up to this moment."""
    watcher = await _Watcher.of(request, message.watcher_id)
    changes = await watcher.kept.events()
    return {
        "events": [await _event(watcher.account, watcher.path, each, with_entry=watcher.with_entry) for each in changes]
    }


async def remove_watcher(request: Request, message: WatcherRequest) -> dict[str, Any]:
    """End a watch."""
    watcher = await _Watcher.of(request, message.watcher_id)
    await watcher.kept.end()
    return {}


async def _event(account: Account, base: str, change: FileEvent, *, with_entry: bool) -> dict[str, Any]:
    """A change as `FilesystemEvent`, with the name below the folder that is watched. Raises RpcError if some were
    lost."""
    kind = _TYPES.get(change.event)
    if kind is None:
        raise RpcError("internal", "watcher error: more happened than could be told, and some of it is lost")
    name = change.path.removeprefix(base.rstrip("/") + "/") if change.path != base else "."
    found: dict[str, Any] = {
        "name": name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "type": f"EVENT_TYPE_{kind}",
    }
    if with_entry and kind in _THERE:
        try:
            found["entry"] = entry(await account.files.details(change.path, xattrs=METADATA))
        except SkerryError as error:  # it is gone again, or not to be looked at
            if is_gone(error):
                raise
    return found
