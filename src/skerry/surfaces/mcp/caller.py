"""Whoever calls a tool: the manager of what is theirs, what new sandboxes are made from, and what bounds a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from copy import copy
from typing import Self
from urllib.parse import quote

import msgspec

from skerry.errors import InvalidSpec, NotFound, NotPermitted, SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.tenants import Principal, Scope
from skerry.pool.claim import is_warm
from skerry.pool.pool import AsyncSandboxPool
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.mcp.outputs import Outputs
from skerry.surfaces.mcp.progress import Progress
from skerry.surfaces.server.fleets import Fleets

_log = logging.getLogger("skerry.surfaces")


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one call."""

    timeout_s: float = 120.0
    """For a command that is given none."""
    max_timeout_s: float = 3600.0
    output_bytes: int = 64 * 1024
    """Of each output of a command, and of a file at once."""
    entries: int = 1000
    """Of a folder."""
    items: int = 250
    """Of any other list."""
    image_bytes: int = 700 << 10
    """Of a picture that is shown as one. Clients take messages of 1 MiB, and base64 makes them longer by a third."""
    resource_bytes: int = 700 << 10
    """Of what is read as a resource at once."""


class Caller:
    """Whoever calls. They see the sandboxes of one project and no others; `template` is what new ones are made from.

    A model cannot choose the provider, mounts, the user or the network: that is up to whoever runs the server. New
    sandboxes come from `pool`, if there is one and it has what is asked for.
    """

    def __init__(
        self,
        manager: AsyncSandboxManager,
        template: Spec,
        limits: CallLimits | None = None,
        pool: AsyncSandboxPool | None = None,
        *,
        outputs: Outputs | None = None,
        principal: Principal | None = None,
        fleets: Fleets | None = None,
        url: str = "",
        sees_all: bool = False,
    ) -> None:
        """Without a `principal` it is whoever started this program, who may do everything, and whose sandboxes end
        with it. `fleets` are the server's; `url` is where the REST API is; with `sees_all` other projects are seen
        too."""
        self.manager = manager
        self.template = template
        self.limits = limits or CallLimits()
        self.pool = pool
        self.outputs = Outputs() if outputs is None else outputs
        self.principal = principal
        self.fleets = Fleets() if fleets is None else fleets
        self.url = url
        self.progress = Progress()
        self._sees_all = sees_all
        self._made: set[SandboxId] = set()

    def with_progress(self, progress: Progress) -> Self:
        """The same caller, in a call whose progress is told."""
        other = copy(self)
        other.progress = progress
        return other

    @property
    def is_local(self) -> bool:
        """Whether sandboxes are to end with this program."""
        return self.principal is None

    @property
    def owner(self) -> str:
        """Whose long outputs theirs are: a tenant's, or those of one token that is no tenant's."""
        if self.principal is None:
            return ""
        return f"tenant {self.principal.tenant}" if self.principal.tenant is not None else self.principal.actor

    @property
    def project(self) -> str | None:
        """The project that they see; None is all of them."""
        return None if self._sees_all else self.template.project

    def require(self, scope: Scope | None) -> None:
        """Raise NotPermitted for a token without a scope."""
        if self.principal is not None and not self.principal.may(scope):
            raise NotPermitted(f"this needs the scope {scope}, which the token does not have")

    def time(self, timeout_s: float | None) -> float:
        """Seconds for a command. Raises InvalidSpec for more than there is."""
        most = self.limits.max_timeout_s
        if timeout_s is not None and timeout_s > most:
            raise InvalidSpec(f"timeout_s: {timeout_s:g} is more than {most:g}, the most there is")
        return min(self.template.timeout_s or self.limits.timeout_s, most) if timeout_s is None else timeout_s

    # sandboxes

    async def records(self) -> Sequence[Record]:
        """All that they see."""
        records = await self.manager.list(Filter(project=self.project))
        return [record for record in records if self._shows(record)]

    async def record(self, reference: str) -> Record:
        """A record, by name within their project first: what others call theirs is none of an agent's business. Raises
        NotFound."""
        named = await self.manager.list(Filter(project=self.template.project, name=reference))
        record = named[0] if named else await self.manager.record(reference)
        if not self._shows(record):
            raise NotFound(f"no sandbox has the id or name {reference!r}")
        return record

    async def sandbox(self, reference: str) -> AsyncSandbox:
        """A sandbox that can be used. Raises NotFound and WrongState."""
        return await self.manager.get((await self.record(reference)).id)

    def _shows(self, record: Record) -> bool:
        """Whether it is of our project; a warm one of a pool is nobody's yet."""
        return self.project in (None, record.spec.project) and not is_warm(record)

    def made(self, id: SandboxId) -> None:
        """Note a sandbox that is to end with this program."""
        self._made.add(id)

    def ended(self, id: SandboxId) -> None:
        self._made.discard(id)

    def ends(self, id: SandboxId) -> bool:
        """Whether a sandbox ends with this program."""
        return id in self._made

    async def destroy_made(self) -> None:
        """Destroy the sandboxes that were to end with this program."""

        async def destroy(id: SandboxId) -> None:
            try:
                await self.manager.destroy(id)
            except SkerryError as error:  # it ends with this process: the next reconcile removes it
                _log.debug("sandbox %s could not be destroyed: %s", id, error)

        made = set(self._made)
        self._made.clear()
        await asyncio.gather(*(destroy(id) for id in made))

    # references

    def file_uri(self, id: SandboxId, path: str) -> str:
        """Name of a file as a resource; its path is absolute."""
        return f"skerry://{id}{quote(path.encode(errors='surrogateescape'))}"

    def file_url(self, id: SandboxId, path: str) -> str | None:
        """Where a file is read and written as a stream, by the REST API; None where there is none."""
        if not self.url:
            return None
        return f"{self.url}/v1/sandboxes/{id}/files/content?path={quote(path.encode(errors='surrogateescape'))}"
