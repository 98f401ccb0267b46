"""One file of several, in their order: what was sent in pieces becomes whole."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from skerry.errors import InvalidSpec, PathNotFile, PathNotFound, SkerryError
from skerry.model.results import FileType
from skerry.sandbox.users import Account
from skerry.surfaces.e2b import answers
from skerry.surfaces.e2b.envd.codes import RpcError
from skerry.surfaces.e2b.envd.connect import body_of, decode
from skerry.surfaces.e2b.envd.context import account_of, resolve
from skerry.surfaces.e2b.envd.files import refusal
from skerry.surfaces.rest.route import GONE

_MOST = 10_000


class ComposeRequest(msgspec.Struct):
    source_paths: list[str] = []
    destination: str = ""
    username: str | None = None


async def compose(request: Request) -> Response:
    """Put files together into one, in place of what is there, and remove them."""
    try:
        message = decode(await body_of(request), ComposeRequest)
        if not 0 < len(message.source_paths) <= _MOST or not message.destination:
            raise InvalidSpec(f"give a destination, and 1 to {_MOST} source_paths")
        account = await account_of(request, message.username)
        target = resolve(message.destination, account.user.home)
        sources = [resolve(each, account.user.home) for each in message.source_paths]
        await _check(account, sources, target)
        await account.files.write(target, _Whole(account, sources), own=True)
        for each in sources:
            await account.files.remove(each, missing_ok=True)
        return answers.answer({"path": target, "name": posixpath.basename(target), "type": "file"})
    except ClientDisconnect:
        return Response(status_code=GONE)
    except RpcError as error:
        return answers.failure(400, str(error))
    except SkerryError as error:
        return refusal(request, error)


async def _check(account: Account, sources: Sequence[str], target: str) -> None:
    """Raise for a source that is the target, is not there, or is no file."""
    for each in sources:
        if each == target:
            raise InvalidSpec(f"source path {each!r} cannot be the same as destination")
        try:
            info = await account.files.stat(each)
        except PathNotFound:
            raise PathNotFound(f"source file not found: {each}") from None
        if info.type is not FileType.FILE:
            raise PathNotFile(f"source path is not a regular file: {each}")


class _Whole:
    """Files one after the other, as one to read from."""

    def __init__(self, account: Account, sources: Sequence[str]) -> None:
        self._pieces = self._all(account, sources)

    async def _all(self, account: Account, sources: Sequence[str]) -> AsyncIterator[bytes]:
        for each in sources:
            pieces = cast("Any", account.files.iter_chunks(each))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def read(self, _size: int = -1, /) -> bytes:
        return await anext(self._pieces, b"")
