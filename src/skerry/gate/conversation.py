"""One conversation in HTTP/1.1 between a program in a box and a host of secrets: each request is read, checked, changed
and sent on, each answer sent back. Bodies pass as they come."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from skerry.aio import run_to_end
from skerry.errors import SkerryError
from skerry.gate import hooks
from skerry.gate.base import Dial, Duplex, Late, Meter, Policy, Refused, Unreachable
from skerry.gate.hooks import MAX_BODY, HookFailed, Hooks, Identity, NeedsBody
from skerry.gate.http1 import MAX_HEAD, Body, Malformed, Reader, Request, answer_error, exchange, parse_request
from skerry.gate.proxy import check_host
from skerry.gate.relay import finish
from skerry.gate.secrets import NoValue, Value, Vault
from skerry.gate.substitute import Substitution, Unfit
from skerry.model.secrets import Secret

_CONNECT_S = 30.0
_HEAD_S = 30.0
_IDLE_S = 300.0
_PARTING_S = 60.0
_PLACE_S = 30.0
"""Until other bodies of the sandbox, which hooks need whole, have been sent on."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_PUT_IN = 2 * MAX_HEAD
"""A box may name a value thousands of times."""
_FRAMING = ("content-length", "transfer-encoding")
_SHOWING = ("TRACE", "TRACK")
"""Methods that servers answer with the request itself."""

_log = logging.getLogger("skerry.gate")


class Host(NamedTuple):
    """The host of a conversation, and what is known of requests to it."""

    policy: Policy
    name: str
    port: int
    secrets: Mapping[str, Secret]
    """Those that are for it."""
    substitution: Substitution
    vault: Vault
    hooks: Hooks
    meter: Meter


class Conversation:
    """Requests of one connection, one after the other, each over the one connection to the host. It owns both."""

    def __init__(self, host: Host, client: Duplex, connect: Dial) -> None:
        self._host = host
        self._client = client
        self._requests = Reader(client)
        self._connect = connect
        self._answers: Reader | None = None
        self._is_fresh = True
        """Whether the host has answered nothing yet."""
        self._values: dict[str, str] = {}
        self._share = host.hooks.share(host.policy.id)
        self._has_body = False
        """Whether it has the whole body of its request, and a place for that."""

    async def run(self) -> None:
        """Go on until one side ends it. Raises Refused for a request that is not sent on, once the client was told."""
        refusal: Refused | None = None
        try:
            while await self._wait_for_request() and await self._serve_request():
                self._is_fresh = False
            await self._part()
        except Refused as error:
            refusal = error
            with suppress(OSError, SkerryError):
                await answer_error(self._client, error)
                await self._part()
        except (TimeoutError, OSError, SkerryError) as error:  # the other side sees it by its end
            _log.debug("a connection to %s broke off: %s", self._host.name, type(error).__name__)
        finally:
            await run_to_end(self._close())
        if refusal is not None:
            raise refusal

    async def _part(self) -> None:
        """Let go of the host, and of the client once it has all that it was sent."""
        await run_to_end(_close(self._answers))
        await finish(self._requests.rest(), _PARTING_S)

    async def _close(self) -> None:
        await asyncio.gather(_close(self._requests), _close(self._answers))

    async def _wait_for_request(self) -> bool:
        """Whether there is more of the client. A host that ends the connection meanwhile ends the conversation, so that
        the client knows it before it sends more."""
        if self._requests.is_ahead:
            return True
        coming = self._requests.look_ahead()
        waiting = {coming} if self._answers is None else {coming, self._answers.look_ahead()}
        done, _ = await asyncio.wait(waiting, timeout=_IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        return coming in done

    async def _serve_request(self) -> bool:
        """Whether another request may come after this one. Raises Refused while nothing of an answer was sent."""
        head = await self._requests.head(_HEAD_S)
        if head is None:
            return False
        request = parse_request(head)
        check_host(request, self._host.name, self._host.port)
        if request.method.upper() in _SHOWING:
            raise Refused(f"{request.method} would show the box what was put into its request")
        request.stay()
        await self._put_in(request)
        try:
            body = await self._call_hooks(request)
            answers = await self._reach()
            requests = self._requests if body is None else Reader(self._client, body)
            return await self._exchange(request, requests, answers)
        finally:
            if self._has_body:
                self._has_body = False
                self._share.bodies.release()

    async def _exchange(self, request: Request, requests: Reader, answers: Reader) -> bool:
        try:
            return await exchange(request, requests, answers, self._shown)
        except Unreachable:
            if self._is_fresh:
                raise
            raise ConnectionResetError from None  # it ended between two requests, after which clients try again

    async def _put_in(self, request: Request) -> None:
        """Put values in place of placeholders."""
        target = request.target.encode("latin-1")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        self._values = {}
        for name in sorted(self._host.substitution.find(target, headers)):
            self._values[name] = (await self._value(name)).reveal()
        if self._values:
            try:
                target, headers = self._host.substitution.put_in(target, headers, self._values)
            except Unfit as error:
                raise Unreachable(str(error)) from None
            if len(target) + sum(len(name) + len(value) for name, value in headers) > _MAX_PUT_IN:
                raise Malformed(f"a head of more than {_MAX_PUT_IN} bytes, with the values in it")
            request.send_to(target.decode("latin-1"))
            request.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
            self._host.meter.secrets.update(self._values)

    async def _value(self, name: str) -> Value:
        host = self._host
        try:
            return await host.vault.value(host.policy.id, name, host.secrets[name])
        except NoValue as error:
            raise Unreachable(str(error)) from None

    async def _call_hooks(self, request: Request) -> bytes | None:
        """Have the hooks of the host's secrets change a request; its body, if one of them needed that."""
        body: bytes | None = None
        for name, secret in self._host.secrets.items():
            if secret.hook is None:
                continue
            value = await self._value(name)
            self._values[name] = value.reveal()
            policy = self._host.policy
            identity = Identity(
                sandbox=policy.id,
                labels=policy.labels,
                host=self._host.name,
                port=self._host.port,
                secret=name,
                value=value,
            )
            body = await self._call_hook(secret.hook, identity, request, body)
            self._host.meter.secrets.add(name)
        return body

    async def _call_hook(self, hook: str, identity: Identity, request: Request, body: bytes | None) -> bytes | None:
        """Change a request as a hook does; how long its body is remains for us to say."""
        given = hooks.Request(method=request.method, target=request.target, headers=tuple(request.headers), body=body)
        try:
            try:
                made = await self._host.hooks.call(hook, given, identity)
            except NeedsBody:
                body = await self._read_body(request) if body is None else body
                given = msgspec.structs.replace(given, body=body)
                made = await self._host.hooks.call(hook, given, identity)
        except NeedsBody:
            raise Unreachable(f"the hook {hook} asks for the body again and again") from None
        except HookFailed as error:
            raise Unreachable(str(error)) from None
        if made.body is not None:
            if body is None:
                await self._read_body(request)  # another is sent in its stead
            body = made.body
        ours = _FRAMING if body is None else (*_FRAMING, "expect")
        framing = [pair for pair in request.headers if pair[0].lower() in _FRAMING]
        if body is not None and (body or framing):
            framing = [("Content-Length", str(len(body)))]
            request.body = Body(length=len(body))
        hosts = request.all("host")
        request.headers = [pair for pair in made.headers if pair[0].lower() not in ours] + framing
        request.send_to(made.target)
        if request.all("host") != hosts or not _is_whole(request):
            raise Unreachable(f"the hook {hook} made this no valid request, or one to another host")
        return body

    async def _read_body(self, request: Request) -> bytes:
        """The whole body of a request, for a hook; a sandbox has a few at once, as they are large."""
        if request.body == Body():
            return b""
        try:
            async with asyncio.timeout(_PLACE_S):
                await self._share.bodies.acquire()
        except TimeoutError:
            raise Late(f"hooks have had as many bodies of this sandbox as they may, for {_PLACE_S:g} s") from None
        self._has_body = True
        if "100-continue" in request.words("expect"):
            await self._client.write(_CONTINUE)
        data = bytearray()
        async for piece in self._requests.pieces(request.body):
            data += piece
            if len(data) > MAX_BODY:
                raise Malformed(f"a hook needs the whole body, which may have {MAX_BODY >> 20} MiB then")
        return await asyncio.to_thread(_joined, data) if request.body.is_chunked else bytes(data)

    async def _reach(self) -> Reader:
        """The connection to the host. Raises Refused."""
        if self._answers is None:
            name = self._host.name
            try:
                async with asyncio.timeout(_CONNECT_S):
                    self._answers = Reader(await self._connect())
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(f"the certificate of {name} is not trusted: {error.verify_message}") from None
            except TimeoutError:
                raise Late(f"{name} did not answer in {_CONNECT_S:g} s") from None
            except (OSError, SkerryError) as error:
                reason = getattr(error, "strerror", None) or error
                raise Unreachable(f"{name} cannot be reached: {reason}") from None
        return self._answers

    def _shown(self, head: bytes) -> bytes:
        """The head of an answer, without values that the host shows."""
        return self._host.substitution.hide(head, self._values) if self._values else head


async def _close(reader: Reader | None) -> None:
    """Close a side, if there is one; quiet the second time."""
    if reader is not None:
        await reader.close()
        with suppress(OSError, SkerryError):
            await reader.source.close()


def _is_whole(request: Request) -> bool:
    """Whether a request reads as what it is, now that a hook has changed it."""
    try:
        made = parse_request(request.encode())
    except (Malformed, UnicodeEncodeError):
        return False
    return made.headers == request.headers and made.target == request.target


def _joined(data: bytearray) -> bytes:
    """A body of chunks, which was found to be one, without what is between them."""
    body, at = bytearray(), 0
    while size := int(data[at : data.index(b"\r\n", at)].partition(b";")[0], 16):
        at = data.index(b"\r\n", at) + 2
        body += data[at : at + size]
        at += size + 2
    return bytes(body)
