"""The server: one manager for all, a scoped one for each tenant, and who may use which."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from starlette.requests import HTTPConnection

from skerry import trace
from skerry.access.access import Access, admin
from skerry.aio import end
from skerry.config import Config
from skerry.errors import AccessDenied, SkerryError
from skerry.manager.health import Examiner
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId
from skerry.model.tenants import TENANT_SCOPES, Principal
from skerry.surfaces.ports.proxy import Ports
from skerry.surfaces.server.bell import Bell
from skerry.surfaces.server.fleets import Fleets
from skerry.surfaces.server.gatekeeper import GateKeeper
from skerry.surfaces.server.history import History
from skerry.surfaces.server.leader import Leader, Work, keep_up
from skerry.surfaces.server.limits import Limits, TooMany
from skerry.surfaces.server.metrics import Metrics, of_pools
from skerry.surfaces.server.operations import Operations
from skerry.surfaces.server.pools import Pools
from skerry.surfaces.server.post import Poster, webhook_rules
from skerry.surfaces.server.webhooks import Webhooks

_log = logging.getLogger("skerry.server")
BEARER = "skerry.bearer."
"""Prefix of the WebSocket subprotocol that carries a token: browsers can send no header there."""
_RECONCILE_S = 60.0
_READERS = 2
TIDY_S = 60.0
_FIXED = ("listen", "socket", "expose", "ports_host", "e2b", "e2b_listen", "e2b_domain")
"""Settings that hold until the server is started again."""


class Server:
    """What all calls share."""

    def __init__(self, manager: AsyncSandboxManager) -> None:
        """`manager` is open, and sees everything."""
        self.manager = manager
        self.access = Access(manager.store)
        self._scoped: dict[str, AsyncSandboxManager] = {}
        """Of each tenant that has called, one to which there is nothing but its project."""
        self._config = manager.config
        self.is_draining = asyncio.Event()
        self.on_reload: list[Callable[[], Awaitable[None]]] = []
        """Called when there are other settings; one that raises ConfigError has them taken back."""
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        """Called when the server has answered its last call."""
        self.e2b_addresses: list[str] = []
        """Where E2B's clients are served."""
        self.e2b_refused = ""
        """Why they are not, although the settings have them served."""
        self.limits = Limits(lambda: self._config.server)
        self.metrics = Metrics()
        self.ports = Ports(manager, self._begin_visit)
        """Ports of sandboxes, which browsers reach under names of their own."""
        self.leader = Leader(manager.store)
        self.metrics.is_leader = lambda: self.leader.is_leader
        self.history = History(manager)
        self.poster = Poster(manager.config)
        self.webhooks = Webhooks(manager.store, self.poster)
        # by the objects that are at work: others might find another state of things
        self.examiner = Examiner(manager.config, manager.loaded_provider)
        self.reading = asyncio.Semaphore(_READERS)
        """For whoever reads the ledger, which is large, and keeps others from the processor meanwhile."""
        self.bell = Bell(manager.store)
        self.operations = Operations(manager.store)
        self.pools = Pools(manager.store, self.manager_for)
        self.metrics.add_source(lambda: of_pools(self.pools.stats()))
        self.fleets = Fleets()
        self.gatekeeper = GateKeeper(manager)
        self.metrics.add_source(self.gatekeeper.samples)
        self.background("webhooks", self.webhooks.run)
        self.background("pools", self.pools.run)
        self.background("operations", self.operations.tidy)
        self.background("follow", manager.follow)
        self.background("reconcile", self._reconcile)

    @property
    def config(self) -> Config:
        """The settings of the moment: `reload` changes them."""
        return self._config

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config) -> AsyncIterator[Server]:
        """A server with a manager of its own, until the `async with` ends; sandboxes live on."""
        async with AsyncSandboxManager(config) as manager:
            server = cls(manager)
            try:
                yield server
            finally:
                await server.aclose()

    async def aclose(self) -> None:
        """End all that goes on here, and let go of sandboxes, which live on. The manager is its opener's to close."""
        await self._note_uses()
        for close in (*self.on_close, self.bell.aclose, self.operations.aclose, self.history.aclose):
            await close()
        for scoped in self._scoped.values():
            await scoped.aclose()

    def background(self, name: str, work: Work) -> None:
        """Have work done by one of all servers on this registry: for as long as this one is the leader. It is begun
        again when it ends or fails, so it must be able to be cut off anywhere."""
        self.leader.background(name, work)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Do what is to be done beside calls, meanwhile."""
        with trace.listen(self.metrics.span):
            works = {"leader": self.leader.run, "gate": self.gatekeeper.run, "tidy": self._tidy}
            tasks = [asyncio.create_task(keep_up(*each), name=f"skerry-{each[0]}") for each in works.items()]
            try:
                yield
            finally:
                await end(*tasks)

    async def _reconcile(self) -> None:
        await asyncio.sleep(_RECONCILE_S)  # whoever opened the manager has just done it
        for verdict in await self.manager.reconcile():
            _log.info("sandbox %s: %s: %s", verdict.id, verdict.action, verdict.why)

    async def _tidy(self) -> None:
        """Let go of what was kept for sandboxes that have ended, whoever ended them; write down which tokens were
        used."""
        while True:
            await asyncio.sleep(TIDY_S)
            await self._note_uses()
            try:
                await self.tidy()
            except SkerryError as error:
                _log.debug("handles are let go later: %s", error)

    async def _note_uses(self) -> None:
        try:
            await self.access.note_uses()
        except SkerryError as error:
            _log.warning("when tokens were used is not written down: %s", error)

    async def tidy(self) -> None:
        """Let go of it once. Raises StoreError."""
        known = [(each.handles, each.handles.known) for each in (self.manager, *self._scoped.values())]
        live = {record.id for record in await self.manager.list()}  # after that: what is new since is not known
        for handles, ids in known:
            await handles.keep_only(live, ids)

    async def reload(self, config: Config) -> None:
        """Take other settings over, all but those that hold until the end; calls and connections go on. Raises
        ConfigError, and then everything is as it was."""
        before, rules = self._config, webhook_rules(config)
        kept = {name: getattr(before.server, name) for name in _FIXED}
        if changed := [name for name in _FIXED if getattr(config.server, name) != kept[name]]:
            _log.warning("start the server again for other values of %s", ", ".join(changed))
        self._config = msgspec.structs.replace(before, server=msgspec.structs.replace(config.server, **kept))
        try:
            for each in self.on_reload:
                await each()
        except BaseException:
            self._config = before
            raise
        self.poster.rules = rules
        for manager in (self.manager, *self._scoped.values()):
            manager.set_limits(config)
        self.manager.store.ledger.note("reload")
        _log.info("the settings were read again")

    async def principal(self, connection: HTTPConnection) -> Principal:
        """Whoever makes a call: by token, or on the unix socket by uid. It counts as one call of theirs, however often
        this is asked. Raises AccessDenied, or TooMany if they call too often."""
        scope = connection.scope
        if (known := scope.get("skerry.principal")) is not None:
            principal: Principal = known
            return principal
        try:
            principal = await self._identify(connection)
            scope["skerry.counted"] = self.limits.begin(principal.actor)
        except TooMany as error:
            self.metrics.refused(error.why)
            raise
        scope["skerry.principal"] = principal
        return principal

    def _begin_visit(self, id: SandboxId) -> Callable[[], None]:
        """Count a request for a port of a sandbox in, as a call of all who use its ports. Raises TooMany."""
        try:
            return self.limits.begin(f"ports:{id}").end
        except TooMany as error:
            self.metrics.refused(error.why)
            raise

    async def identify_again(self, connection: HTTPConnection) -> None:
        """See whether whoever made a call that lasts may still make it. Raises AccessDenied."""
        token = _token(connection)
        if token is not None:
            await self.access.check(token)

    async def _identify(self, connection: HTTPConnection) -> Principal:
        token = _token(connection)
        if token is not None:
            address = connection.client.host if connection.client is not None else ""
            self.limits.check(address, token)
            try:
                principal = await self.access.check(token)
            except AccessDenied:
                connection.scope["skerry.refused"] = self.limits.refused(address)
                raise
            self.limits.accepted(token)
            return principal
        uid = peer_uid(connection)
        if uid is None:
            raise AccessDenied("give a token: `Authorization: Bearer ...`; `skerry token create` makes one")
        if uid in (0, os.geteuid()):
            return admin(f"uid:{uid}")
        return Principal(actor=f"uid:{uid}", tenant=f"uid-{uid}", scopes=TENANT_SCOPES)

    async def manager_for(self, principal: Principal) -> AsyncSandboxManager:
        """The manager of what is theirs."""
        if principal.tenant is None:
            return self.manager
        quota = await self.access.quota(principal.tenant)
        known = self._scoped.get(principal.tenant)
        if known is None:
            known = self._scoped[principal.tenant] = self.manager.of_project(principal.tenant)
        known.store.quota = quota
        return known


def peer_uid(connection: HTTPConnection) -> int | None:
    """The uid of whoever is at the other end of the unix socket; None on any other."""
    client = connection.scope.get("client")
    host = client[0] if client else ""
    return int(host.removeprefix("uid:")) if host.startswith("uid:") else None


def _token(connection: HTTPConnection) -> str | None:
    if (key := connection.scope.get("skerry.token")) is not None:  # from a header that only one surface reads
        return str(key)
    header = connection.headers.get("authorization")
    if header is not None:
        scheme, _, text = header.partition(" ")
        if scheme.lower() != "bearer":
            raise AccessDenied("Authorization: the scheme is Bearer")
        return text.strip()
    if connection.scope["type"] == "websocket":
        for protocol in connection.scope.get("subprotocols", ()):
            if protocol.startswith(BEARER):
                return str(protocol.removeprefix(BEARER))
    return None
