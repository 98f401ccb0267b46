"""Webhooks: events of the registry, posted to whoever asked for them, in order, again and again until they are taken.

Where each hook is lies in the registry, so that a restart loses nothing; what was posted and not yet written down is
posted once more, with the same id. One task serves one hook, so that a slow one keeps no other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from skerry import aio
from skerry.errors import Conflict, InvalidSpec, LimitReached, NotFound, SkerryError
from skerry.model.records import Event
from skerry.store import Store
from skerry.store.documents import Collection, Document
from skerry.surfaces.server.limits import Bucket, TooMany
from skerry.surfaces.server.post import Poster, PostFailed, Target, sign
from skerry.version import __version__

T = TypeVar("T")
_log = logging.getLogger("skerry.server")
KINDS = frozenset({
    "created", "creating", "ready", "paused", "asleep", "stopped", "lost", "destroyed", "doomed", "adopted", "acquired",
    "renamed", "lifetime", "rules", "remaking",
})  # fmt: skip
"""Kinds of events that a hook can ask for."""
_LOOK_S = 0.5
_REFRESH_S = 5.0
"""How often hooks are looked for that another server made."""
_RETRY_S = (1.0, 3600.0)
_DOUBLINGS = 12
"""Attempts until the wait is the longest."""
_SAVE_S = 1.0
"""How long what was taken may be known here alone."""
_GIVE_UP_S = 86400.0
"""How long a hook may fail before it is switched off."""
_GONE = 410
_KEPT = 50
"""Posts of a hook that can be looked at."""
_BATCH = 100
_MOST_OF_ONE = 16
_PING_RATE, _PING_BURST = 1.0, 10.0
"""Pings of a project a second, and at once: no server is to be flooded by ours."""
_PAGE = 1000


class Webhook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hook as it is kept."""

    url: str
    secret: str
    """What posts are signed with, which both sides have to know."""
    events: tuple[str, ...] = ()
    """Kinds; none is all of them."""
    note: str = ""
    active: bool = True
    trusted: bool = False
    """It was made by the owner of the host, and may lead anywhere."""
    created_by: str = ""

    def wants(self, event: Event) -> bool:
        return not self.events or event.kind in self.events


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to post one event."""

    id: str
    """The same for each attempt of one event, so that a receiver knows what it has had."""
    kind: str
    time: float
    attempt: int
    took_s: float
    status: int | None = None
    error: str = ""

    @property
    def is_taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class HookState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a hook is."""

    after: int
    """The last event that was taken, or was none for it."""
    attempts: int = 0
    """Failures of the event after that, so far."""
    failing_since: float | None = None
    off_because: str = ""
    """Why it was switched off, if it was not by its owner."""
    log: tuple[Delivery, ...] = ()
    """The newest attempts, the newest last."""

    def failed(self, delivery: Delivery) -> HookState:
        since = self.failing_since or delivery.time
        return self._with(delivery, attempts=self.attempts + 1, failing_since=since)

    def passed(self, event: Event, delivery: Delivery | None) -> HookState:
        if delivery is None:
            return msgspec.structs.replace(self, after=event.seq)
        return self._with(delivery, after=event.seq, attempts=0, failing_since=None)

    def _with(self, delivery: Delivery, **changes: Any) -> HookState:
        return msgspec.structs.replace(self, log=(*self.log, delivery)[-_KEPT:], **changes)


class Hooks:
    """The hooks of a registry, or of the one project that a store is for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.hooks: Collection[Webhook] = store.documents("webhook", Webhook)
        self.states: Collection[HookState] = store.documents("webhook-state", HookState)

    async def all(self) -> Sequence[Document[Webhook]]:
        return await _whole(self.hooks)

    async def state(self, id: str) -> HookState:
        """Where a hook is. Raises NotFound."""
        return (await self.states.get(id)).body

    async def with_states(self) -> Sequence[tuple[Document[Webhook], HookState]]:
        """All of them, and where each is."""
        states = {each.id: each.body for each in await _whole(self.states)}
        return [(each, states[each.id]) for each in await self.all() if each.id in states]

    async def add(self, hook: Webhook) -> Document[Webhook]:
        """Add a hook for what happens from now on. Raises InvalidSpec, and LimitReached if there are too many."""
        check_kinds(hook.events)
        mine = [each for each in await self.all() if each.project == (self._store.project or "")]
        if len(mine) >= _MOST_OF_ONE:
            raise LimitReached(f"a project can have {_MOST_OF_ONE} webhooks: remove one first")
        id = secrets.token_hex(8)
        self._store.ledger.append("webhook", None, action="create", id=id, host=Target.parse(hook.url).host)
        await self.states.add(id, HookState(after=await self._store.last_event()))
        return await self.hooks.add(id, hook)

    async def change(self, id: str, version: int | None, **changes: Any) -> Document[Webhook]:
        """Change a hook, and try again what it failed at. Raises NotFound, InvalidSpec, and Conflict if it has another
        version by now."""
        found = await self.hooks.get(id)
        body = msgspec.structs.replace(found.body, **changes)
        check_kinds(body.events)
        self._store.ledger.append("webhook", None, action="change", id=id, host=Target.parse(body.url).host)
        changed = await self.hooks.replace(id, body, version=found.version if version is None else version)
        if body.active:
            state = await self.state(id)
            fresh = msgspec.structs.replace(state, attempts=0, failing_since=None, off_because="")
            await self.states.replace(id, fresh)
        return changed

    async def remove(self, id: str) -> None:
        """Forget a hook. Raises NotFound."""
        await self.hooks.get(id)
        self._store.ledger.note("webhook", None, action="remove", id=id)
        await self.hooks.remove(id)
        await self.states.remove(id)


class Webhooks:
    """Posts events for all hooks of a server."""

    def __init__(self, store: Store, poster: Poster) -> None:
        self._store = store
        self._poster = poster
        self._all = Hooks(store)
        self._known: dict[str, Document[Webhook]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._pings: dict[str, Bucket] = {}

    def look_again(self) -> None:
        """See at once what was changed in the hooks."""
        self._changed.set()

    async def ping(self, hook: Document[Webhook]) -> Delivery:
        """Post a sign of life, and tell what came of it. Raises TooMany."""
        now = time.monotonic()
        pings = self._pings.setdefault(hook.project, Bucket(_PING_BURST, now))
        if wait_s := pings.take(_PING_RATE, _PING_BURST, now):
            raise TooMany("pings", f"more than {_PING_RATE:g} ping a second", wait_s)
        id = f"ping-{secrets.token_hex(8)}"
        return await self._post(hook.body, id, "ping", {"id": id, "type": "ping", "time": time.time()}, attempt=1)

    async def run(self) -> None:
        """Post until it is cancelled. Of several servers on one registry one does."""
        last, refreshed = -1, -_REFRESH_S
        try:
            while True:
                try:
                    if self._changed.is_set() or time.monotonic() - refreshed >= _REFRESH_S:
                        self._changed.clear()
                        await self._refresh()
                        refreshed = time.monotonic()
                    if self._known and last != (newest := await self._store.last_event()):
                        last = newest
                        for news in self._news.values():
                            news.set()
                except SkerryError as error:
                    _log.warning("webhooks wait for the registry: %s", error)
                await self._wait()
        finally:
            await aio.run_to_end(self._end([*self._known]))

    async def _wait(self) -> None:
        """Wait until there may be something new."""
        try:
            async with asyncio.timeout(_LOOK_S if self._known else _REFRESH_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _end(self, ids: Iterable[str]) -> None:
        """Post no more for some hooks."""
        for id in ids:
            del self._known[id], self._news[id]
            await aio.end(self._workers.pop(id))

    async def _refresh(self) -> None:
        """Have a worker for each hook that is active, which is begun anew where the hook was changed."""
        found = {each.id: each for each in await self._all.all() if each.body.active}
        await self._end([id for id in self._known if found.get(id) != self._known[id]])
        for id, hook in found.items():
            if id not in self._known or self._workers[id].done():
                self._known[id] = hook
                self._news[id] = asyncio.Event()
                self._workers[id] = asyncio.create_task(self._serve(hook), name=f"skerry-webhook-{id}")

    async def _serve(self, hook: Document[Webhook]) -> None:
        """Post what happens to one hook, until it is switched off or this is cancelled."""
        store = self._store.of_project(hook.project) if hook.project else self._store
        news = self._news[hook.id]
        try:
            state = await self._all.state(hook.id)
            while True:
                news.clear()
                events = await store.events(after=state.after, limit=_BATCH)
                saved = time.monotonic()
                for event in events:
                    passed = await self._pass_on(hook, state, event)
                    if passed is None:
                        return
                    state = passed
                    if time.monotonic() - saved >= _SAVE_S:
                        await self._all.states.replace(hook.id, state)
                        saved = time.monotonic()
                if events:
                    await self._all.states.replace(hook.id, state)
                else:
                    await news.wait()
        except NotFound:
            return  # it was removed meanwhile
        except SkerryError as error:
            _log.warning("webhook %s is tried again: %s", hook.id, error)  # by the next refresh

    async def _pass_on(self, hook: Document[Webhook], state: HookState, event: Event) -> HookState | None:
        """Post one event until it is taken; None if the hook was switched off before that."""
        if not hook.body.wants(event):
            return state.passed(event, None)
        id = f"{self._store.instance}-{event.seq}"
        content = {"id": id, "type": f"sandbox.{event.kind}", **msgspec.to_builtins(event)}
        waits = aio.backoff(*_RETRY_S)
        for _ in range(min(state.attempts, _DOUBLINGS)):  # it failed so often before a restart
            next(waits)
        for wait_s in waits:
            delivery = await self._post(hook.body, id, event.kind, content, attempt=state.attempts + 1)
            if delivery.is_taken:
                return state.passed(event, delivery)
            state = state.failed(delivery)
            since = state.failing_since or delivery.time
            if delivery.status == _GONE or delivery.time - since >= _GIVE_UP_S:
                await self._switch_off(hook, state, delivery)
                return None
            await self._all.states.replace(hook.id, state)
            await asyncio.sleep(wait_s * (0.75 + secrets.randbelow(500) / 1000))  # hooks of one receiver come apart
        raise AssertionError("a backoff without a timeout has no end")

    async def _switch_off(self, hook: Document[Webhook], state: HookState, delivery: Delivery) -> None:
        why = delivery.error or f"it answered {delivery.status}"
        _log.warning("webhook %s is switched off: %s", hook.id, why)
        await self._all.states.replace(hook.id, msgspec.structs.replace(state, off_because=why))
        off = msgspec.structs.replace(hook.body, active=False)
        try:
            await self._all.hooks.replace(hook.id, off, version=hook.version)
        except Conflict:
            return  # its owner changed it just now, and it is tried once more

    async def _post(self, hook: Webhook, id: str, kind: str, content: Any, *, attempt: int) -> Delivery:
        body = msgspec.json.encode(content)
        headers = {
            "User-Agent": f"skerry/{__version__}",
            "X-Skerry-Delivery": id,
            "X-Skerry-Event": kind,
            "X-Skerry-Signature": sign(hook.secret, body),
        }
        now, began = time.time(), time.monotonic()
        status, error = None, ""
        try:
            status = await self._poster.post(Target.parse(hook.url), body, headers, trusted=hook.trusted)
        except (PostFailed, InvalidSpec) as failure:
            error = str(failure)
        took_s = round(time.monotonic() - began, 3)
        return Delivery(id=id, kind=kind, time=now, attempt=attempt, took_s=took_s, status=status, error=error)


async def _whole(collection: Collection[T]) -> list[Document[T]]:
    """All documents of a collection."""
    found: list[Document[T]] = []
    while len(page := await collection.list(after=found[-1].id if found else "", limit=_PAGE)) == _PAGE:
        found += page
    return [*found, *page]


def new_secret() -> str:
    """A secret to sign posts with."""
    return f"whsec_{secrets.token_urlsafe(32)}"


def check_kinds(kinds: Iterable[str]) -> None:
    """Raise InvalidSpec for kinds of events that there are not."""
    if unknown := sorted({*kinds} - KINDS):
        raise InvalidSpec(f"events: {unknown[0]!r} is none; there are {', '.join(sorted(KINDS))}", field="events")
