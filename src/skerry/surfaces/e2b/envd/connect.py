"""The Connect protocol, with JSON: calls of one message, and streams of messages in either direction."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from skerry.aio import end
from skerry.errors import SkerryError, printable
from skerry.surfaces.e2b import answers
from skerry.surfaces.e2b.envd.codes import STATUS, RpcError, is_gone, rpc_error
from skerry.surfaces.e2b.envd.context import envd_of
from skerry.surfaces.e2b.envd.streams import CONTENT_TYPE, EventStream, envelope
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import GONE as _GONE
from skerry.surfaces.server.answers import until_gone

_log = logging.getLogger("skerry.server")
T = TypeVar("T", bound=msgspec.Struct)

MAX_MESSAGE = 8 << 20
"""Bytes of a message that is taken: a program's arguments, or what it is to read."""
JSON = "application/json"
_MAX_TIMEOUT_MS = 10**10
_HEAD = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_encode = msgspec.json.Encoder(enc_hook=str).encode


def unary(path: str, type: type[T], handler: Callable[[Request, T], Awaitable[dict[str, Any]]]) -> Route:
    """The route of a call with one message either way."""

    async def endpoint(request: Request) -> Response:
        try:
            _check_unary(request)
            message = decode(await body_of(request), type)
            result = await _while_client_waits(request, handler(request, message))
            return Response(_encode(result), media_type=JSON)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except (SkerryError, RpcError) as error:
            return _refusal(request, error)

    return Route(path, endpoint, methods=["POST"])


def server_stream(
    path: str,
    type: type[T],
    handler: Callable[[Request, T], AsyncIterator[dict[str, Any]]],
    *,
    keep_alive: dict[str, Any],
    is_timed: bool = True,
) -> Route:
    """The route of a call with one message from the client, and any number of answers, with `keep_alive` where nothing
    is told for long. One that is not timed ends in the client's time by itself."""

    async def endpoint(request: Request) -> Response:
        try:
            _check_stream(request)
            message = decode(await _one_envelope(request), type)
            timeout_s = timeout_of(request) if is_timed else None
            return await EventStream(request, handler(request, message), keep_alive, timeout_s).begin()
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except (SkerryError, RpcError) as error:
            return _stream_refusal(request, error)

    return Route(path, endpoint, methods=["POST"])


def client_stream(
    path: str, type: type[T], handler: Callable[[Request, AsyncIterator[T]], Awaitable[dict[str, Any]]]
) -> Route:
    """The route of a call with any number of messages from the client, for as long as it likes, and one answer."""

    async def endpoint(request: Request) -> Response:
        async def messages() -> AsyncIterator[T]:
            async for body in envelopes(request.scope.get("skerry.receive") or request.receive):
                yield decode(body, type)

        try:
            _check_stream(request)
            result = await handler(request, messages())
            return Response(envelope(result) + EventStream.last(), media_type=CONTENT_TYPE)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except (SkerryError, RpcError) as error:
            return _stream_refusal(request, error)

    return Route(path, endpoint, methods=["POST"])


def decode(body: bytes, type: type[T]) -> T:
    """A message of a client. Raises RpcError."""
    try:
        return msgspec.json.decode(body or b"{}", type=type)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RpcError("invalid_argument", f"the message is not readable: {error}") from None


def timeout_of(request: Request) -> float | None:
    """Seconds that a call may take, as its client says; None is any time. Raises RpcError."""
    text = request.headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) > _MAX_TIMEOUT_MS:
        raise RpcError("invalid_argument", "Connect-Timeout-Ms: give a number of at most ten digits")
    return int(text) / 1000 or None


def _check_unary(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Refused(415, f"send {JSON}", "unsupported_media_type", {"accept-post": f"{JSON}, {CONTENT_TYPE}"})
    _check_encoding(request.headers.get("content-encoding", ""))


def _check_stream(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != CONTENT_TYPE:
        raise Refused(415, f"send {CONTENT_TYPE}", "unsupported_media_type", {"accept-post": f"{JSON}, {CONTENT_TYPE}"})
    _check_encoding(request.headers.get("connect-content-encoding", ""))


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        message = f"unknown compression {printable(encoding[:64])!r}: supported encodings are identity"
        raise RpcError("unimplemented", message)


async def body_of(request: Request) -> bytes:
    """All of a call's message. Raises RpcError, and Refused if it comes too slowly."""
    found = bytearray()
    async for chunk in _chunks(request.receive):
        found += chunk
        if len(found) > MAX_MESSAGE:
            raise RpcError("resource_exhausted", f"the message is larger than {MAX_MESSAGE} bytes")
    return bytes(found)


async def _one_envelope(request: Request) -> bytes:
    found = [body async for body in envelopes(request.receive)]
    if len(found) != 1:
        raise RpcError("invalid_argument", f"the call takes one message, and {len(found)} came")
    return found[0]


async def envelopes(receive: Receive) -> AsyncIterator[bytes]:
    """The messages of a body as they come. Raises RpcError, and ClientDisconnect."""
    buffer = bytearray()
    async for chunk in _chunks(receive):
        buffer += chunk
        while len(buffer) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(buffer)
            if flags & _COMPRESSED:
                raise RpcError("internal", "protocol error: sent compressed message without compression support")
            if flags & ~_END:
                raise RpcError("invalid_argument", f"protocol error: invalid envelope flags {flags}")
            if length > MAX_MESSAGE:
                raise RpcError("resource_exhausted", f"the message is larger than {MAX_MESSAGE} bytes")
            if len(buffer) < _HEAD.size + length:
                break
            body = bytes(buffer[_HEAD.size : _HEAD.size + length])
            del buffer[: _HEAD.size + length]
            if flags & _END:
                return
            yield body
    if buffer:
        raise RpcError("invalid_argument", "protocol error: the stream ends within a message")


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _while_client_waits(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of a call, within the time that its client gives it, and as long as that is there. Raises RpcError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request.receive))
    try:
        done, _ = await asyncio.wait((task, gone), timeout=timeout_of(request), return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise RpcError("canceled", "the client went away") if done else RpcError("deadline_exceeded", "timeout")
    finally:
        await end(task, gone)


def _refusal(request: Request, error: SkerryError | RpcError) -> Response:
    """The answer to a call that fails."""
    if is_gone(error):
        return answers.gone(envd_of(request).name)
    if isinstance(error, Refused):
        return answers.of_error(error)
    found = rpc_error(error)
    if found.code == "internal":
        _log.info("request %s: %s", request.scope.get("skerry.request"), error)
    headers = {"should-retry": "false"}
    return Response(_encode(found.body), STATUS[found.code], headers, JSON)


def _stream_refusal(request: Request, error: SkerryError | RpcError) -> Response:
    """The answer to a stream that fails before it begins: its status is a success all the same."""
    if is_gone(error):
        return answers.gone(envd_of(request).name)
    if isinstance(error, Refused):
        return answers.of_error(error)
    with suppress(KeyError):
        _log.debug("request %s: %s", request.scope["skerry.request"], error)
    return Response(EventStream.last(rpc_error(error)), media_type=CONTENT_TYPE)
