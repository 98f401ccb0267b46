"""TLS for E2B's clients: the certificate for all names below the domain, and a port that speaks TLS and plain HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.aio import end
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.gate.authority import Authority

_log = logging.getLogger("skerry.server")
_FIRST_S = 10.0
"""Seconds for the first byte of a connection, and again for the handshake."""
_MOST_NEW = 512
"""Connections whose first byte has not come."""
_HANDSHAKE = b"\x16"
_FULL_S = 0.2


def ca_folder(config: Config) -> Path:
    """Where the authority of our own is kept."""
    return Path(config.state_dir) / "e2b"


class Certificates:
    """The certificate for `*.DOMAIN`: the user's, or one that an authority of our own makes, again before it ends."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError."""
        settings = config.server
        self._name = f"*.{settings.e2b_domain.lower()}"
        self._authority: Authority | None = None
        self.outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.outer.minimum_version = ssl.TLSVersion.TLSv1_2
        self.outer.set_alpn_protocols(["http/1.1"])
        if not settings.e2b_tls_cert:
            from skerry.gate.authority import Authority  # it takes long to load, and needs the extra `network`

            self._authority = Authority(ca_folder(config))
            self._authority.context(self._name)
            self.outer.sni_callback = self._choose
            return
        try:
            self.outer.load_cert_chain(settings.e2b_tls_cert, settings.e2b_tls_key or None)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise ConfigError(f"server.e2b_tls_cert: {settings.e2b_tls_cert} cannot be used: {reason}") from None

    def _choose(self, connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        if self._authority is not None:
            connection.context = self._authority.context(self._name)


class Door:
    """A listening socket whose connections are TLS or not by what their first byte says."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        *,
        with_plain: bool,
    ) -> None:
        self._listening = listening
        self._connect = connect
        self._tls = tls
        self._with_plain = with_plain
        self._greeting: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name="skerry-e2b-door")

    def close(self) -> None:
        """Accept no more."""
        for task in (self._task, *self._greeting):
            task.cancel()

    async def aclose(self) -> None:
        await end(self._task, *self._greeting)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # out of descriptors: some will be closed
                _log.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_FULL_S)
                continue
            if len(self._greeting) >= _MOST_NEW:
                accepted.close()
                continue
            task = asyncio.create_task(self._greet(accepted))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, accepted: socket.socket) -> None:
        """Look at the first byte of a connection, and leave it to whoever reads on."""
        loop = asyncio.get_running_loop()
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_FIRST_S):
                first = await _peek(accepted)
            if not first or (first != _HANDSHAKE and not self._with_plain):
                accepted.close()
                return
            tls = self._tls if first == _HANDSHAKE else None
            limit = _FIRST_S if tls is not None else None
            await loop.connect_accepted_socket(self._connect, accepted, ssl=tls, ssl_handshake_timeout=limit)
        except (OSError, TimeoutError) as error:
            _log.debug("a connection did not begin: %s", error)
            accepted.close()
        except BaseException:
            accepted.close()
            raise


async def _peek(accepted: socket.socket) -> bytes:
    """The first byte of a connection, which stays there to be read."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, ready.set)
    try:
        while True:
            await ready.wait()
            with suppress(BlockingIOError):
                return accepted.recv(1, socket.MSG_PEEK)
            ready.clear()
    finally:
        loop.remove_reader(accepted)
