"""Listening: the unix socket and the addresses of a server, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from email.utils import formatdate
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from skerry.config import ServerSettings
from skerry.errors import ConfigError
from skerry.surfaces.e2b.app import build as build_e2b
from skerry.surfaces.e2b.tls import Certificates, Door
from skerry.surfaces.server.app import build
from skerry.surfaces.server.connections import HEAD_S, IDLE_S, Connections, HttpConnection, SocketConnection
from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")
_BACKLOG = 1024
_MAX_MESSAGE = 1 << 20
"""The most bytes of a WebSocket message."""
_TICK_S = 1.0
_LOOPBACK = ("127.0.0.1", "::1")
_E2B = "server.e2b_listen"


class Listeners:
    """The sockets that a server listens on."""

    def __init__(self, server: Server, sockets: list[socket.socket], e2b: Sequence[socket.socket] = ()) -> None:
        """Sockets of the server's own API, and those for E2B's clients."""
        settings = server.config.server
        self._server = server
        own = _config(build(server))
        self._configs = [own] * len(sockets)
        if e2b:
            self._configs += [_config(build_e2b(server))] * len(e2b)
        self._e2b = frozenset(each.fileno() for each in e2b)
        self._sockets = sockets = [*sockets, *e2b]
        self._states = [ServerState() for _ in sockets]
        self._open: list[asyncio.Server | Door] = []
        self._tls: ssl.SSLContext | None = None
        self.connections = Connections(settings.max_connections)
        for listening, state in zip(sockets, self._states, strict=True):
            self.connections.add(state, counted=listening.family != socket.AF_UNIX)

    async def open(self) -> None:
        """Accept connections. Raises ConfigError."""
        outer = self._tls = _tls(self._server.config.server)
        if outer is not None:
            outer.sni_callback = self._choose
        settings = self._server.config.server
        names = Certificates(self._server.config) if self._e2b and settings.e2b_domain else None
        for listening, config, state in zip(self._sockets, self._configs, self._states, strict=True):
            if names is not None and listening.fileno() in self._e2b:
                plain = outer is None and listening.getsockname()[0] in _LOOPBACK
                connect = partial(HttpConnection, config, state, self.connections)
                self._open.append(Door(listening, connect, names.outer, with_plain=plain))
                continue
            tls = None if listening.family == socket.AF_UNIX else outer
            self._open.append(await self._listen(listening, config, state, tls))

    async def _listen(
        self, listening: socket.socket, config: uvicorn.Config, state: ServerState, tls: ssl.SSLContext | None
    ) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            partial(HttpConnection, config, state, self.connections),
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=HEAD_S if tls is not None else None,
            backlog=_BACKLOG,
        )

    def _choose(self, connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        """Have a new connection begin with the certificate of the moment."""
        if self._tls is not None:
            connection.context = self._tls

    async def renew(self) -> None:
        """Take over what the settings say now, for new connections. Raises ConfigError, and then all is as it was."""
        settings = self._server.config.server
        if bool(settings.tls_cert) != (self._tls is not None):
            raise ConfigError("server.tls_cert: start the server again to have TLS, or no more")
        self._tls = _tls(settings)
        self.connections.most = settings.max_connections

    async def close(self) -> None:
        """Accept no more."""
        for server in self._open:
            server.close()
            if isinstance(server, Door):
                await server.aclose()
        for listening in self._sockets:
            listening.close()

    async def tick(self) -> None:
        """Until it is cancelled: keep the date of answers, and measure how late the event loop is."""
        while True:
            self.connections.tell_date(formatdate(usegmt=True).encode())
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._server.metrics.lag_s = time.monotonic() - due


def _config(app: ASGIApp) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws=SocketConnection,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        ws_max_size=_MAX_MESSAGE,
        timeout_keep_alive=IDLE_S,
    )
    config.load()
    return config


async def run(server: Server, ready: asyncio.Event | None = None) -> None:
    """Serve until cancelled; then let calls that are under way come to their end, for as long as the settings say, or
    until cancelled again."""
    settings = server.config.server
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what it would say is said by the guard
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(_tcp(address, settings)) for address in settings.listen]
        path = socket_path(server)
        if path is not None:
            sockets.append(stack.enter_context(_unix(path)))
        listeners = Listeners(server, sockets, [stack.enter_context(each) for each in _for_e2b(server)])
        await listeners.open()
        await stack.enter_async_context(server.working())
        server.metrics.connections = lambda: listeners.connections.count
        server.on_reload.append(listeners.renew)
        ticking = asyncio.create_task(listeners.tick())
        if ready is not None:
            ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.is_draining.set()
            await listeners.close()
            ticking.cancel()
            server.on_reload.remove(listeners.renew)
            await listeners.connections.drain(server.config.server.drain_s)


def _for_e2b(server: Server) -> Iterator[AbstractContextManager[socket.socket]]:
    """The sockets for E2B's clients. If the usual address is taken, another server or program of this host has it:
    then E2B's clients are not served, which is said, and all else is. Raises ConfigError for an address that was asked
    for."""
    settings = server.config.server
    if not settings.e2b:
        return
    is_usual = server.config.origins.get(_E2B, "default") == "default"
    for address in settings.e2b_listen:
        if is_usual and settings.e2b_listen == type(settings)().e2b_listen and not _is_free(address):
            server.e2b_refused = f"{address} is taken"
            _log.warning("E2B's clients are not served: %s; set %s", server.e2b_refused, _E2B)
            continue
        server.e2b_addresses.append(address)
        yield _tcp(address, settings, _E2B)


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """What speaks TLS with the settings' certificate; None if there is none. Raises ConfigError."""
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ConfigError(f"server.tls_cert: {settings.tls_cert} and its key cannot be used: {reason}") from None
    return context


def socket_path(server: Server) -> Path | None:
    """Path of the server's unix socket; None if it is to have none."""
    named = server.config.server.socket
    if named == "off":
        return None
    return Path(named).expanduser() if named else Path(server.config.state_dir) / "server.sock"


@contextmanager
def _tcp(address: str, settings: ServerSettings, key: str = "server.listen") -> Iterator[socket.socket]:
    """A listening socket. Raises ConfigError for an address that is not to be listened on, or is taken."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{key}: {address!r} is not ADDRESS:PORT")
    if host not in _LOOPBACK:
        if not settings.expose:
            raise ConfigError(f"{key}: {address!r} is reached by others: say so with --expose")
        has_own = key == _E2B and bool(settings.e2b_domain)
        if not (settings.tls_cert and settings.tls_key) and not has_own:
            raise ConfigError(f"{key}: {address!r} needs TLS: set server.tls_cert and server.tls_key")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio does so only where a socket names its protocol; without it a body waits 40 ms for its head's ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listening.bind((host, int(port)))
        except OSError as error:
            raise ConfigError(f"{key}: {address}: {error.strerror or error}") from None
        listening.listen(_BACKLOG)
        yield listening


@contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    """A listening unix socket for us and our group. Raises ConfigError if another server has it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            if _is_alive(path):
                raise ConfigError(f"server.socket: another server listens on {path}")
            path.unlink()
        before = os.umask(0o117)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise ConfigError(f"server.socket: {path}: {error.strerror or error}") from None
        finally:
            os.umask(before)
        listening.listen(_BACKLOG)
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)


def _is_alive(path: Path) -> bool:
    """Whether anybody listens on a unix socket, also if they are too busy to answer, or are not to be asked by us."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
