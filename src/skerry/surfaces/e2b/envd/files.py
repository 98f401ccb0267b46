"""Contents of files over HTTP: downloads, and uploads alone or in forms, by a token or a signed URL."""

from __future__ import annotations

import hmac
import posixpath
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from skerry.errors import (
    AccessDenied,
    DiskFull,
    FileError,
    InvalidSpec,
    PathIsFolder,
    PathNotFound,
    SkerryError,
    Unsupported,
    UserNotFound,
)
from skerry.sandbox.users import Account
from skerry.surfaces.e2b import answers
from skerry.surfaces.e2b.envd import encoding
from skerry.surfaces.e2b.envd.codes import is_gone
from skerry.surfaces.e2b.envd.context import account_of, envd_of, resolve
from skerry.surfaces.e2b.envd.entries import METADATA, metadata
from skerry.surfaces.e2b.envd.multipart import Form
from skerry.surfaces.e2b.keys import Signature
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import GONE, Streamed
from skerry.surfaces.server.answers import StreamedAnswer

_HEADER = "x-metadata-"
_KEY = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,240}")
_VALUE = re.compile(r"[ -~]{0,4096}")
_MOST_METADATA = 64
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_STATUS: tuple[tuple[type[SkerryError], int], ...] = (
    (AccessDenied, 401),
    (UserNotFound, 401),
    (PathNotFound, 404),
    (DiskFull, 507),
    (FileError, 400),
    (InvalidSpec, 400),
)


def routes() -> list[BaseRoute]:
    return [
        Route("/files", download, methods=["GET"]),
        Route("/files", upload, methods=["POST"]),
    ]


async def download(request: Request) -> Response:
    """Give the content of a file, or a range of it."""
    try:
        check_signature(request, "read")
        account = await account_of(request, request.query_params.get("username"))
        path = resolve(request.query_params.get("path", ""), account.user.home)
        try:
            info = await account.files.stat(path)
        except PathNotFound:
            raise PathNotFound(f"path '{path}' does not exist") from None
        if info.is_dir:
            raise PathIsFolder(f"path '{path}' is a directory")
        return await _content(request, account, path, info.size)
    except SkerryError as error:
        return refusal(request, error)


async def _content(request: Request, account: Account, path: str, size: int) -> Response:
    headers = {"vary": "Accept-Encoding", "content-disposition": _disposition(path)}
    asked = request.headers.get("range", "")
    found = _RANGE.fullmatch(asked) if size else None
    accepted = "identity" if asked else encoding.accepted(request.headers.get("accept-encoding", ""))
    if found is not None and (found[1] or found[2]):
        begin, end = _bounds(found[1], found[2], size)
        headers |= {"content-range": f"bytes {begin}-{end - 1}/{size}", "content-length": str(end - begin)}
        chunks = account.files.iter_chunks(path, offset=begin, length=end - begin)
        return StreamedAnswer(Streamed(chunks=await begun(chunks), status=206), headers)
    chunks = await begun(account.files.iter_chunks(path, length=size or None))
    if accepted == encoding.GZIP:
        headers["content-encoding"] = encoding.GZIP
        chunks = encoding.compressed(chunks)
    elif size:
        headers["content-length"] = str(size)
    return StreamedAnswer(Streamed(chunks=chunks), headers)


async def begun(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a file that was opened: what goes wrong at first is raised now."""
    first = await anext(chunks, None)

    async def all_of_it() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield first
                async for chunk in chunks:
                    yield chunk
        finally:
            close: Any = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    return all_of_it()


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """The first byte of a range and the one after its last. Raises Refused."""
    begin, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    end = min(end, size)
    if begin >= end:
        raise Refused(416, "there is no such range in the file", "no_such_range", {"content-range": f"bytes */{size}"})
    return begin, end


def _disposition(path: str) -> str:
    name = posixpath.basename(path).encode("utf-8", "surrogateescape")
    return f"inline; filename*=UTF-8''{quote(name, safe='')}"


async def upload(request: Request) -> Response:
    """Write files: one that is the body, or those of a form."""
    try:
        check_signature(request, "write")
        account = await account_of(request, request.query_params.get("username"))
        attached = metadata_of(request)
        kind = request.headers.get("content-type", "")
        kind_alone = kind.partition(";")[0].strip().lower()
        path = request.query_params.get("path")
        if kind_alone == "application/octet-stream":
            if path is None:
                raise InvalidSpec("path query parameter is required for raw body upload")
            source = Body(_chunks(request))
            found = [await _write(account, resolve(path, account.user.home), source, attached)]
        elif kind_alone.startswith("multipart/"):
            found = await _upload_form(account, Form(kind, _chunks(request)), path, attached)
        else:
            expected = "expected multipart/form-data or application/octet-stream"
            raise InvalidSpec(f"unsupported content type: {kind[:200]}, {expected}")
        return answers.answer(found)
    except ClientDisconnect:
        return Response(status_code=GONE)
    except SkerryError as error:
        return refusal(request, error)


async def _upload_form(
    account: Account, form: Form, path: str | None, attached: dict[str, bytes]
) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async for part in form.parts():
        if part.name != "file":
            continue
        target = resolve(part.filename or "" if path is None else path, account.user.home)
        if target in found:
            text = f"you cannot upload multiple files to the same path '{target}' in one upload request"
            raise InvalidSpec(f"{text}, only the first specified file was uploaded")
        found[target] = await _write(account, target, part, attached)
    return list(found.values())


class Body:
    """A body that is a file."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def read(self, _size: int = -1, /) -> bytes:
        async for chunk in self._chunks:
            if chunk:
                return chunk
        return b""


def _chunks(request: Request) -> AsyncIterator[bytes]:
    """The body of a request as its client had it. Raises InvalidSpec."""
    name = request.headers.get("content-encoding", "").strip().lower()
    if name in ("", "identity"):
        return request.stream()
    if name != encoding.GZIP:
        raise InvalidSpec(f"unsupported Content-Encoding: {name[:64]}, supported: [gzip]")
    return encoding.decompressed(request.stream())


async def _write(account: Account, path: str, source: Any, attached: dict[str, bytes]) -> dict[str, Any]:
    """Write a file in its place, and attach metadata alone of what is given now."""
    try:
        await account.files.write(path, source, atomic=False, own=True)
    except PathIsFolder:
        raise PathIsFolder(f"path is a directory: {path}") from None
    found: dict[str, Any] = {"path": path, "name": posixpath.basename(path), "type": "file"}
    try:
        await account.files.set_xattrs(path, attached, replace=METADATA)
    except Unsupported:  # /proc, or a file system without attributes: the content is there
        return found
    known = metadata(attached)
    return {**found, **({"metadata": known} if known else {})}


def metadata_of(request: Request) -> dict[str, bytes]:
    """The metadata in the headers of an upload, as extended attributes. Raises InvalidSpec."""
    found: dict[str, bytes] = {}
    for header, value in request.headers.items():
        key = header.removeprefix(_HEADER)
        if key == header or not key:
            continue
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise InvalidSpec(f"invalid metadata: {key[:64]!r}: give printable ASCII, 4096 letters at most")
        found.setdefault(METADATA + key, value.encode())
    if len(found) > _MOST_METADATA:
        raise InvalidSpec(f"invalid metadata: give {_MOST_METADATA} at most")
    return found


def check_signature(request: Request, operation: str) -> None:
    """Let in who shows the sandbox's token, or has a URL that was signed with it. Raises AccessDenied."""
    token = envd_of(request).access_token
    if token is None:
        return
    shown = request.headers.get("x-access-token")
    if shown:
        if not hmac.compare_digest(shown.encode(), token.encode()):
            raise AccessDenied("access token present in header but does not match")
        return
    query = request.query_params
    if "signature" not in query:
        raise AccessDenied("missing signature query parameter")
    user, expires = query.get("username", ""), query.get("signature_expiration", "")
    signature = Signature(query["signature"], query.get("path", ""), operation, user, expires)
    if not signature.fits(token):
        raise AccessDenied("invalid signature")
    if signature.is_expired:
        raise AccessDenied("signature is already expired")


def refusal(request: Request, error: SkerryError) -> Response:
    """The answer to a call about a file that fails."""
    if is_gone(error):
        return answers.gone(envd_of(request).name)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
    found = answers.of_error(error) if status is None else answers.failure(status, str(error))
    found.headers.update(answers.kind_headers(error))
    return found
