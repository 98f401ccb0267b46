"""Posts to addresses that others chose: only to what they may reach, by a deadline, and without following anything.

A name is resolved here, each address checked by the code that checks those of boxes, and a checked address is what is
connected to; so a name that leads elsewhere the second time leads nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from skerry.config import Config
from skerry.errors import ConfigError, InvalidSpec
from skerry.gate.base import Policy, Refused
from skerry.gate.decide import check_address, host_of
from skerry.gate.dialer import Dialer
from skerry.model.rules import Address, Rules
from skerry.model.spec import SandboxId

_ID = SandboxId("webhooks")
_DEADLINE_S = 10.0
_DIAL_S = 3.0
"""Time for one address."""
_MAX_URL = 2048
_MAX_LINE = 4096
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |\r|\n|$)")
_PORTS = {"http": 80, "https": 443}
_UNPRIVILEGED = 1024
"""Ports below this belong to services that are no web servers, but for two."""


class PostFailed(Exception):
    """A post without an answer; its text is fit for whoever chose the address."""


class Target(NamedTuple):
    """A URL in its parts."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Target:
        """The parts of a URL. Raises InvalidSpec for what is none that could be posted to."""
        if not 0 < len(url) <= _MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidSpec("url: it is none, or too long; what is not ASCII is written as %xx", field="url")
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
            host = host_of(parts.hostname or "")
        except KeyError:
            raise InvalidSpec("url: it begins with https:// or http://", field="url") from None
        except (ValueError, Refused) as error:
            raise InvalidSpec(f"url: {error}", field="url") from None
        if parts.username is not None or parts.password is not None or "#" in url:
            raise InvalidSpec("url: it has a user, a password or a #, which would not be sent", field="url")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host, port, path)

    @property
    def authority(self) -> str:
        """The name as a request has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def webhook_rules(config: Config) -> Rules:
    """What `server.webhook_allow` opens to posts. Raises ConfigError for rules that are none."""
    try:
        return Rules.of(config.server.webhook_allow)
    except InvalidSpec as error:
        raise ConfigError(f"server.webhook_allow: {error}") from None


def sign(secret: str, body: bytes, now: float | None = None) -> str:
    """A signature by which a receiver knows that a body is ours and new: of the time and the body."""
    moment = int(time.time() if now is None else now)
    digest = hmac.new(secret.encode(), b"%d.%b" % (moment, body), hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


class Poster:
    """Posts for many. What is private, or this machine, is reached only by those who are trusted, or where the settings
    allow it."""

    def __init__(self, config: Config, dialer: Dialer | None = None) -> None:
        """Raises ConfigError for rules that are none."""
        self._dialer = dialer or Dialer()
        self._trusted = Policy(id=_ID, rules=Rules(), hosts=config.network.hosts)
        self.rules = webhook_rules(config)
        """What those who are not trusted may reach beside the internet."""
        self._tls = ssl.create_default_context()
        if config.network.ca is not None:
            self._tls.load_verify_locations(config.network.ca)

    def check(self, target: Target, *, trusted: bool) -> None:
        """Raise InvalidSpec for a target that can be told to be refused without asking where it is."""
        if trusted or target.port >= _UNPRIVILEGED or target.port in _PORTS.values():
            return
        raise InvalidSpec(f"url: port {target.port} is none of a web server", field="url")

    async def post(self, target: Target, body: bytes, headers: Mapping[str, str], *, trusted: bool) -> int:
        """The status of the answer. Raises PostFailed."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                addresses = await self._find(target, trusted=trusted)
                reader, writer = await self._connect(target, addresses)
                try:
                    writer.write(_head(target, headers, len(body)) + body)
                    await writer.drain()
                    line = await reader.readuntil(b"\n")
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise PostFailed(f"no answer within {_DEADLINE_S:g} s") from None
        except Refused as error:
            raise PostFailed(str(error)) from None
        except ssl.SSLError as error:
            raise PostFailed(f"TLS failed: {error.reason or 'unknown'}") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise PostFailed(f"the connection failed: {getattr(error, 'strerror', None) or 'cut short'}") from None
        match = _STATUS.match(line)
        if match is None:
            raise PostFailed("the answer is no HTTP/1.1")
        return int(match[1])

    async def _find(self, target: Target, *, trusted: bool) -> Sequence[Address]:
        """Addresses that may be connected to. Raises Refused if there is none, or one that may not be."""
        policy = self._trusted if trusted else Policy(id=_ID, rules=self.rules)
        addresses = await self._dialer.resolve(policy, target.host)
        for address in () if trusted else addresses:
            try:
                check_address(policy, target.host, target.port, address, self._dialer.is_own)
            except Refused:
                # which address it is, is nobody's business who asks for it
                raise Refused("it is not on the internet; see server.webhook_allow") from None
        if not addresses:
            raise Refused("it has no address")
        return addresses

    async def _connect(
        self, target: Target, addresses: Sequence[Address]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that answers. Raises OSError."""
        failure: OSError = OSError("it has no address")
        tls, name = (self._tls, target.host) if target.scheme == "https" else (None, None)
        for address in addresses:
            with suppress(TimeoutError):
                try:
                    async with asyncio.timeout(_DIAL_S):
                        return await asyncio.open_connection(
                            str(address), target.port, limit=_MAX_LINE, ssl=tls, server_hostname=name
                        )
                except OSError as error:
                    failure = error
        raise failure


def _head(target: Target, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"POST {target.path} HTTP/1.1", f"Host: {target.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", f"Content-Length: {length}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("ascii")
