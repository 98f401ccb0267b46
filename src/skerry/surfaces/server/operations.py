"""Operations: long work that a call has begun and need not wait for, as resources that tell how it goes and ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from skerry.aio import end, run_to_end
from skerry.errors import Conflict, LimitReached, NotFound, SkerryError, WrongState
from skerry.manager import identity
from skerry.model.records import Owner
from skerry.model.tenants import Principal, Scope
from skerry.store import Store
from skerry.store.documents import Document
from skerry.surfaces.rest import problems
from skerry.surfaces.rest.problems import Problem

_log = logging.getLogger("skerry.server")
KIND = "operation"
KEPT_S = 86400.0
"""How long an operation is told of after its end."""
_MOST_RUNNING = 16
"""Of one tenant, at a time."""
_MOST_KEPT = 500
"""Of one tenant; then the oldest that have ended are forgotten before their time."""
_MOST_STEPS = 500
_STEPS_WRITTEN = 100
_LONGEST_MESSAGE = 500
_BEAT_S = 10.0
"""How often a server writes down how its operations go, so that others see that it lives."""
_STALE_S = 6 * _BEAT_S
_TIDY_S = 600.0
_POLL_S = 1.0
"""How often the registry is asked for an operation of another server."""
_alive: set[str] = set()
"""The servers of this process."""


class OperationState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """The server that did it ended before it was done."""


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that an operation told on its way."""

    seq: int
    time: float
    message: str
    done: int | None = None
    """Bytes or parts, where they are known."""
    total: int | None = None
    data: dict[str, Any] | None = None


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation as the registry has it."""

    id: str
    kind: str
    """Noun and verb, such as `image.build`."""
    target: str
    """Name of what it is about."""
    scope: Scope
    """What a token must be allowed that began it, or cancels it."""
    actor: str
    project: str
    maker: Owner
    server: str
    created_at: float
    seen_at: float
    """When its server last told of it."""
    state: OperationState = OperationState.RUNNING
    ended_at: float | None = None
    result: Any = None
    problem: Problem | None = None
    steps: tuple[Step, ...] = ()
    """The last that it told."""
    told: int = 0
    """How many there were in all."""
    key: str | None = None
    """The idempotency key that it was asked for with."""
    cancelling: bool = False


class Unfinished(Exception):
    """Work that failed, and has a result all the same, such as a fleet of which some members came up."""

    def __init__(self, error: SkerryError, result: Any) -> None:
        super().__init__(str(error))
        self.error = error
        self.result = result


class Tell:
    """Told by work how it goes, from any thread."""

    def __init__(self, note: Callable[[Step], None]) -> None:
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.told = 0

    def __call__(
        self, message: str, *, done: int | None = None, total: int | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(lambda: self(message, done=done, total=total, data=data))
            return
        self.told += 1
        text = message[:_LONGEST_MESSAGE]
        own = None if data is None else dict(data)
        self._note(Step(seq=self.told, time=time.time(), message=text, done=done, total=total, data=own))


Work = Callable[[Tell], Awaitable[Any]]


class _Running:
    """An operation of this server that goes on, or has just ended."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.steps: deque[Step] = deque(maxlen=_MOST_STEPS)
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self._changed = asyncio.Event()

    def now(self) -> Operation:
        told = self.steps[-1].seq if self.steps else 0
        return msgspec.structs.replace(self.operation, steps=tuple(self.steps)[-_STEPS_WRITTEN:], told=told)

    def note(self, step: Step) -> None:
        self.steps.append(step)
        self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changes(self) -> None:
        await self._changed.wait()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()


class Operations:
    """The operations of a server, and what the registry has of those of others and of before."""

    def __init__(self, store: Store) -> None:
        """`store` sees everything."""
        self._store = store
        self._all = store.documents(KIND, Operation)
        self._running: dict[str, _Running] = {}
        self._beat: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._server = secrets.token_hex(8)
        self._is_closed = False
        self._forgot_at = 0.0
        _alive.add(self._server)

    async def tidy(self) -> None:
        """Until cancelled: note which ones a server that is gone has left, and forget what is old."""
        while True:
            for found in await self._all.list(limit=100_000):
                if found.body.state is OperationState.RUNNING and self._truth(found.body).state is not found.body.state:
                    await self._write(self._truth(found.body))
            await self._forget()
            await asyncio.sleep(_TIDY_S)

    async def aclose(self) -> None:
        """End all that runs here; each is told as interrupted."""
        self._is_closed = True
        tasks = [self._beat, *(each.task for each in self._running.values())]
        await end(*(task for task in tasks if task is not None))
        _alive.discard(self._server)

    async def begin(
        self,
        kind: str,
        target: str,
        work: Work,
        *,
        principal: Principal,
        scope: Scope,
        project: str = "",
        key: str | None = None,
    ) -> Operation:
        """Begin some work, which lives as long as the server, whatever becomes of the caller. With a `key`, the same
        again gives the same operation. Raises LimitReached, and Conflict for a key that was given for another."""
        async with self._lock:
            if self._is_closed:
                raise WrongState("the server is about to end: ask again when it is back")
            project = principal.tenant or project
            if key is not None and (known := await self._by_key(project, key)) is not None:
                if (known.kind, known.target) != (kind, target):
                    raise Conflict("Idempotency-Key: it was given for something else")
                return self._truth(known)
            if sum(each.operation.project == project for each in self._running.values()) >= _MOST_RUNNING:
                raise LimitReached(f"{_MOST_RUNNING} operations run already: wait until one has ended, or cancel one")
            await self._forget()
            now = time.time()
            made = Operation(
                id=f"{int(now * 1000):011x}{secrets.token_hex(6)}",
                kind=kind,
                target=target,
                scope=scope,
                actor=principal.actor,
                project=project,
                maker=identity.this_process(),
                server=self._server,
                created_at=now,
                seen_at=now,
                key=key,
            )
            await run_to_end(self._start(made, work))  # else one that is written down might never run
            return made

    async def _start(self, made: Operation, work: Work) -> None:
        await self._all.add(made.id, made, project=made.project)
        running = self._running[made.id] = _Running(made)
        running.task = asyncio.create_task(self._run(running, work), name=f"skerry-{made.kind}")
        if self._beat is None or self._beat.done():
            self._beat = asyncio.create_task(self._keep_telling(), name="skerry-operations")

    async def _by_key(self, project: str, key: str) -> Operation | None:
        mine = self._store.of_project(project).documents(KIND, Operation)
        return next((each.body for each in await mine.list(limit=10_000) if each.body.key == key), None)

    # seeing: `store` is that of whoever asks

    async def get(self, store: Store, id: str) -> Operation:
        """An operation as it is now. Raises NotFound, also for what is another tenant's."""
        return self._truth((await store.documents(KIND, Operation).get(id)).body)

    async def list(self, store: Store) -> Sequence[Operation]:
        """All that are kept, the oldest first."""
        return [self._truth(each.body) for each in await store.documents(KIND, Operation).list(limit=10_000)]

    def running(self, project: str, target: str, kind: str) -> Operation | None:
        """An operation that runs on this server for something of a project, by the beginning of its kind."""
        found = (each.operation for each in self._running.values())
        return next((each for each in found if (each.project, each.target) == (project, target)
                     and each.kind.startswith(kind) and each.state is OperationState.RUNNING), None)  # fmt: skip

    async def wait(self, store: Store, id: str, timeout_s: float) -> Operation:
        """The operation when it has ended, or when the time is over. Raises NotFound."""
        try:
            async with asyncio.timeout(timeout_s):
                async for each in self.follow(store, id):
                    if isinstance(each, Operation):
                        return each
        except TimeoutError:
            pass
        return await self.get(store, id)

    async def follow(self, store: Store, id: str, after: int = 0) -> AsyncGenerator[Step | Operation, None]:
        """What an operation told after that place, what it tells, and at its end the operation. Raises NotFound."""
        operation = await self.get(store, id)
        running = self._running.get(id)
        while True:
            steps = operation.steps if running is None else tuple(running.steps)
            operation = operation if running is None else running.operation
            for step in steps:
                if step.seq > after:
                    after = step.seq
                    yield step
            if operation.state is not OperationState.RUNNING:
                yield operation
                return
            if running is None:
                await asyncio.sleep(_POLL_S)
                operation = await self.get(store, id)
            elif running.operation is operation and (not running.steps or running.steps[-1].seq <= after):
                await running.changes()

    async def cancel(self, store: Store, id: str) -> Operation:
        """Have an operation ended; one of another server within seconds. Quiet if it has ended. Raises NotFound."""
        documents = store.documents(KIND, Operation)
        found = await documents.get(id)
        running = self._running.get(id)
        if running is not None:
            running.cancel()
        elif self._truth(found.body).state is OperationState.RUNNING:
            await documents.replace(id, msgspec.structs.replace(found.body, cancelling=True), version=found.version)
        return await self.get(store, id)

    def _truth(self, operation: Operation) -> Operation:
        """The operation as it is now: as this server knows it, or ended with the server that did it."""
        running = self._running.get(operation.id)
        if running is not None:
            return running.now()
        if operation.state is not OperationState.RUNNING or _may_run(operation):
            return operation
        why = "the server that did it ended before it was done: see what there is, and begin again"
        told = problems.make(503, "interrupted", why, retryable=True)
        state, ended_at = OperationState.INTERRUPTED, operation.seen_at
        return msgspec.structs.replace(operation, state=state, ended_at=ended_at, problem=told)

    # doing

    async def _run(self, running: _Running, work: Work) -> None:
        end: dict[str, Any]
        try:
            result = await work(Tell(running.note))
            end = {"state": OperationState.DONE, "result": msgspec.to_builtins(result, enc_hook=str)}
        except asyncio.CancelledError:
            state = OperationState.CANCELLED if running.is_cancelled else OperationState.INTERRUPTED
            why = "it was cancelled" if running.is_cancelled else "the server ended before it was done: begin again"
            end = {"state": state, "problem": problems.make(503, str(state), why, retryable=not running.is_cancelled)}
        except Unfinished as unfinished:
            told = msgspec.to_builtins(unfinished.result, enc_hook=str)
            problem = problems.problem_of(unfinished.error)
            end = {"state": OperationState.FAILED, "problem": problem, "result": told}
        except SkerryError as error:
            end = {"state": OperationState.FAILED, "problem": problems.problem_of(error)}
        except Exception:  # whatever it is, it is told as failed, and our log has more
            _log.exception("operation %s (%s) failed", running.operation.id, running.operation.kind)
            told = "the server failed; its log has more under the operation's id"
            end = {"state": OperationState.FAILED, "problem": problems.make(500, "internal", told)}
        now = time.time()
        running.operation = msgspec.structs.replace(running.operation, ended_at=now, seen_at=now, **end)
        running.operation = running.now()
        running.wake()
        await run_to_end(self._write(running.operation))
        self._running.pop(running.operation.id, None)

    async def _write(self, operation: Operation) -> None:
        try:
            await self._all.replace(operation.id, operation)
        except SkerryError as error:
            _log.warning("the end of operation %s is not written down: %s", operation.id, error)

    async def _keep_telling(self) -> None:
        """Write down now and then how those that run go, and see whether somebody at another server cancels one."""
        while self._running:
            await asyncio.sleep(_BEAT_S)
            for id, running in list(self._running.items()):
                try:
                    found = await self._all.get(id)
                    if found.body.cancelling:
                        running.cancel()
                    elif running.operation.state is OperationState.RUNNING:
                        now = msgspec.structs.replace(running.now(), seen_at=time.time())
                        await self._all.replace(id, now, version=found.version)
                except NotFound:
                    running.cancel()
                except SkerryError as error:
                    _log.debug("operation %s is not written down: %s", id, error)

    async def _forget(self) -> None:
        """Forget those that ended long ago, and the oldest of a tenant that has too many."""
        now = time.time()
        if now - self._forgot_at < _STALE_S:
            return
        self._forgot_at = now
        ended: dict[str, list[Document[Operation]]] = {}
        for found in await self._all.list(limit=100_000):
            if self._truth(found.body).state is not OperationState.RUNNING:
                ended.setdefault(found.project, []).append(found)
        for each in ended.values():
            kept = [found for found in each if now - (found.body.ended_at or found.body.seen_at) < KEPT_S][-_MOST_KEPT:]
            for found in each:
                if found not in kept:
                    await self._remove(found.id)

    async def _remove(self, id: str) -> None:
        try:
            await self._all.remove(id)
        except SkerryError as error:
            _log.debug("operation %s is not forgotten: %s", id, error)


def _may_run(operation: Operation) -> bool:
    """Whether whoever does it may still live, as far as can be known here."""
    if operation.maker == identity.this_process():
        return operation.server in _alive
    alive = identity.is_alive(operation.maker)
    return time.time() - operation.seen_at < _STALE_S if alive is None else alive
