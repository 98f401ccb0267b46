"""Sandboxes as E2B knows them: each with its document, its tokens, and what goes on with it here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from skerry.errors import Conflict, NotFound, SkerryError, Unsupported, WrongState
from skerry.model.records import Cause, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.model.tenants import Principal
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store.documents import Document
from skerry.surfaces.e2b.headers import Rules
from skerry.surfaces.e2b.kept import KIND, Kept, every
from skerry.surfaces.e2b.keys import Keys, Signature
from skerry.surfaces.e2b.names import shown
from skerry.surfaces.e2b.reset import reset

if TYPE_CHECKING:
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")
_LOOK_S = 5.0
"""Seconds after which what other servers changed is seen here, at the latest."""
_TOKENS_S = 1.0
"""Seconds for which the tokens of all sandboxes are remembered, for whoever brings a signature alone."""
_LATE_S = 30.0
"""Seconds by which the agent's own clock is behind ours: whoever is first ends a sandbox, and ours tells clients."""


class Transport(Protocol):
    def abort(self) -> None: ...


class Exchanges:
    """Requests for a sandbox that are under way: those that have begun to answer are cut off when it is paused or
    killed, the others are answered."""

    def __init__(self) -> None:
        self._open: set[Exchange] = set()

    @contextmanager
    def open(self, transport: Transport | None) -> Iterator[Exchange]:
        """Have a request be one of them meanwhile."""
        exchange = Exchange(transport)
        self._open.add(exchange)
        try:
            yield exchange
        finally:
            self._open.discard(exchange)

    def end(self) -> None:
        """End all of them."""
        for each in tuple(self._open):
            each.end()


class Exchange:
    """One request. With a reset, not an end: an answer that was cut is not to look like one that is whole."""

    def __init__(self, transport: Transport | None) -> None:
        self._transport = transport
        self.is_answered = False
        self.ended = asyncio.Event()

    def end(self) -> None:
        self.ended.set()
        if self.is_answered and self._transport is not None:
            reset(self._transport)


class E2bSandbox:
    """What the calls about one sandbox need."""

    def __init__(self, boxes: Boxes, document: Document[Kept], manager: AsyncSandboxManager, record: Record) -> None:
        self.id = SandboxId(document.id)
        self.name = shown(self.id)
        self.kept = document.body
        self.project = document.project
        self.manager = manager
        self.record = record
        self._boxes = boxes

    @property
    def sandbox(self) -> AsyncSandbox:
        """Its handle."""
        return self.manager.handles.of(self.record)

    @property
    def default_user(self) -> str:
        """Whose commands and files are those that name no user."""
        return self.kept.user

    @property
    def envs(self) -> dict[str, str]:
        """Its environment beside what its agent has: none, since its agent was given all."""
        return {}

    @property
    def access_token(self) -> str | None:
        """What calls of its files and processes must show; None if anybody may who knows its id."""
        return self._boxes.keys.derive("envd", self.id) if self.kept.secure else None

    @property
    def traffic_token(self) -> str | None:
        """What requests for its ports must show; None if anybody may."""
        return None if self.kept.network.allow_public_traffic else self._boxes.keys.derive("traffic", self.id)

    @property
    def is_running(self) -> bool:
        return self.record.state is State.READY and not self.kept.paused and not self.kept.is_over(time.time())

    @property
    def is_paused(self) -> bool:
        return self.kept.paused or self.record.state in (State.PAUSED, State.ASLEEP, State.STOPPED)

    @property
    def exchanges(self) -> Exchanges:
        return self._boxes.exchanges_of(self.id)

    async def change(self, **fields: Any) -> None:
        """Write down what is different of it. Raises NotFound if it is gone."""
        self.kept = await self._boxes.write(self.id, fields)

    async def set_timeout(self, timeout_s: float, *, longer: bool = False) -> None:
        """Have it end, or pause, so long from now; with `longer` only if that is later than it was to be."""
        ends_at = time.time() + timeout_s
        if longer and ends_at <= self.kept.ends_at:
            return
        await self.change(ends_at=ends_at, **({"timeout_s": timeout_s} if timeout_s else {}))
        if not self.kept.auto_pause and timeout_s > 0:
            await self.sandbox.set_lifetime(timeout_s + _LATE_S)
        self._boxes.wake()

    async def pause(self, *, memory: bool = True) -> None:
        """Freeze it, or keep its files alone. Raises Conflict if it is paused, and Unsupported where the provider
        cannot."""
        async with self._boxes.lock_of(self.id):
            await self._refresh()
            if self.is_paused:
                raise Conflict(f"sandbox {self.name} is paused already")
            await self._pause(memory)

    async def pause_if_over(self) -> None:
        """Pause it, unless somebody has given it more time meanwhile."""
        async with self._boxes.lock_of(self.id):
            await self._refresh()
            if self.kept.is_over(time.time()) and self.record.state is State.READY:
                await self._pause(self.kept.pauses_memory)

    async def _pause(self, memory: bool) -> None:
        await self.sandbox.set_lifetime(None)  # a paused one stays until somebody ends it
        await self.change(paused=True)
        try:
            if memory:
                try:
                    await self.manager.pause(self.id, save=True)
                except Unsupported:  # its memory stays taken
                    await self.manager.pause(self.id)
            else:
                await self.manager.stop(self.id, 0.0)
        except BaseException:
            await self.change(paused=False)
            raise
        self.exchanges.end()  # after the box stands still: a client that asks at once must not find it half awake

    async def connect(self, timeout_s: float | None) -> bool:
        """Have it live for so long from now at the least; let it go on if it is paused, and tell whether it was."""
        async with self._boxes.lock_of(self.id):
            await self._refresh()
            if not self.is_paused:
                if timeout_s is not None:
                    await self.set_timeout(timeout_s, longer=True)
                return False
            if self.record.state is State.STOPPED:
                await self.manager.start(self.id, self._boxes.envs.get(self.id))
            elif self.record.state in (State.PAUSED, State.ASLEEP):
                await self.manager.resume(self.id)
            self.record = await self.manager.record(self.id)
            timeout_s = self.kept.timeout_s if timeout_s is None else timeout_s
            await self.change(paused=False, ends_at=time.time() + timeout_s)
            await self.set_timeout(timeout_s)
            return True

    async def _refresh(self) -> None:
        """See what others have done with it. Raises NotFound if it is gone."""
        found = await self._boxes.get(self.id)
        self.kept, self.record = found.kept, found.record

    async def kill(self, cause: Cause = Cause.USER) -> None:
        """End it, and forget it."""
        try:
            await self.manager.destroy(self.id, cause=cause, grace_s=0.0)
            await self._boxes.forget(self.id)
        finally:
            self.exchanges.end()
        self._boxes.let_go(self.id)


class Boxes:
    """All sandboxes of a server that E2B's clients know."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._documents = server.manager.store.documents(KIND, Kept)
        self.keys = Keys(server.manager.store)
        self.envs: dict[SandboxId, dict[str, str]] = {}
        """Environments of sandboxes that were made here, for those that start once more; kept nowhere else."""
        self.headers: dict[SandboxId, Rules] = {}
        """Headers that requests of sandboxes get, which may be secret themselves; kept nowhere else."""
        self._exchanges: dict[SandboxId, Exchanges] = {}
        self._locks: dict[SandboxId, asyncio.Lock] = {}
        self._tokens: tuple[float, dict[SandboxId, str]] = (0.0, {})
        self._woken = asyncio.Event()

    def exchanges_of(self, id: SandboxId) -> Exchanges:
        return self._exchanges.setdefault(id, Exchanges())

    def lock_of(self, id: SandboxId) -> asyncio.Lock:
        """What whoever pauses or resumes a sandbox holds, since many may want to at once."""
        return self._locks.setdefault(id, asyncio.Lock())

    def let_go(self, id: SandboxId) -> None:
        """Forget what goes on with a sandbox that is no more."""
        for each in (self._exchanges, self._locks, self.envs, self.headers):
            each.pop(id, None)

    def wake(self) -> None:
        """Look again when the next one is to end."""
        self._woken.set()

    async def add(self, id: SandboxId, kept: Kept, project: str) -> Document[Kept]:
        """Take a sandbox in. Raises Conflict."""
        document = await self._documents.add(id, kept, project=project)
        self._tokens = 0.0, {}  # its files may be asked for at once
        self.wake()
        return document

    async def write(self, id: SandboxId, fields: dict[str, Any]) -> Kept:
        """Write down what is different of a sandbox. Raises NotFound."""
        while True:
            found = await self._documents.get(id)
            body = msgspec.structs.replace(found.body, **fields)
            with suppress(Conflict):  # somebody else was quicker: on top of theirs
                return (await self._documents.replace(id, body, version=found.version)).body

    async def forget(self, id: SandboxId) -> None:
        with suppress(NotFound):
            await self._documents.remove(id)

    async def get(self, id: SandboxId, principal: Principal | None = None) -> E2bSandbox:
        """A sandbox; with a `principal` only one of theirs. Raises NotFound for any other, and for one that ended."""
        await self.keys.open()
        missing = NotFound(f"sandbox {shown(id)} was not found")
        try:
            document = await self._documents.get(id)
            if principal is not None and principal.tenant not in (None, document.project):
                raise missing
            manager = await self.manager_of(document.project)
            record = await manager.record(id)
        except NotFound:
            raise missing from None
        found = E2bSandbox(self, document, manager, record)
        is_over = document.body.is_over(time.time()) and not document.body.auto_pause
        if not record.is_live or record.doomed or is_over:  # a doomed one is told as gone before its box has ended
            raise missing
        return found

    async def all(self, principal: Principal | None = None) -> list[E2bSandbox]:
        """Those of somebody, or all; what has ended is not there. Two questions to the registry, however many."""
        await self.keys.open()
        tenant = None if principal is None else principal.tenant
        records = {record.id: record for record in await (await self.manager_of(tenant or "")).list()}
        managers: dict[str, AsyncSandboxManager] = {}
        found, now = [], time.time()
        for document in await every(self._documents):
            record = records.get(SandboxId(document.id))
            is_over = document.body.is_over(now) and not document.body.auto_pause
            if record is None or is_over or tenant not in (None, document.project):
                continue
            if document.project not in managers:
                managers[document.project] = await self.manager_of(document.project)
            found.append(E2bSandbox(self, document, managers[document.project], record))
        return found

    async def signed(self, signature: Signature) -> E2bSandbox | None:
        """The sandbox by whose token something was signed."""
        await self.keys.open()
        if time.monotonic() > self._tokens[0]:
            ids = [SandboxId(each.id) for each in await every(self._documents) if each.body.secure]
            self._tokens = time.monotonic() + _TOKENS_S, {id: self.keys.derive("envd", id) for id in ids}
        for id, token in self._tokens[1].items():
            if signature.fits(token):
                with suppress(NotFound):
                    return await self.get(id)
        return None

    async def manager_of(self, project: str) -> AsyncSandboxManager:
        """The manager of a tenant's; what is nobody's is that of the server itself."""
        if not project:
            return self._server.manager
        return await self._server.manager_for(Principal(actor="e2b", tenant=project, scopes=frozenset()))

    async def run(self) -> None:
        """Until it is cancelled: end or pause each sandbox whose time is over. What fails is tried again later."""
        while True:
            self._woken.clear()
            documents, now = await every(self._documents), time.time()
            for document in documents:
                if document.body.is_over(now):
                    await self._try_to_end(document)
            later = [each.body.ends_at for each in documents if not each.body.paused and each.body.ends_at > now]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([_LOOK_S, *(at - time.time() for at in later)]))):
                    await self._woken.wait()

    async def _try_to_end(self, document: Document[Kept]) -> None:
        try:
            await self._end(document)
        except SkerryError as error:
            _log.warning("sandbox %s is not ended yet: %s", document.id, error)

    async def _end(self, document: Document[Kept]) -> None:
        manager = await self.manager_of(document.project)
        try:
            record = await manager.record(document.id)
        except NotFound:
            await self.forget(SandboxId(document.id))
            return
        found = E2bSandbox(self, document, manager, record)
        if not record.is_live:
            await self.forget(found.id)
            self.exchanges_of(found.id).end()
            self.let_go(found.id)
        elif not document.body.auto_pause:
            await found.kill(Cause.LIFETIME)
        else:
            with suppress(WrongState):
                await found.pause_if_over()
