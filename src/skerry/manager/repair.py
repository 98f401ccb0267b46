"""Repair: ask the hosts, have it decided what is wrong, carry the verdicts out, and end what is overdue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from skerry.agent.client import AgentClient
from skerry.clock import Moment
from skerry.errors import AgentError, Conflict, NotFound, ProviderError, SkerryError
from skerry.manager import destroy, identity
from skerry.manager.addresses import Addresses
from skerry.manager.create import begin_service
from skerry.manager.decide import LATE_S, Action, Now, Verdict, decide, leftovers
from skerry.manager.network import Networks
from skerry.manager.providers import Providers, require_capability
from skerry.manager.rebuild import ASK_AGAIN, Rebuilder
from skerry.model.records import Cause, Filter, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxStatus, CanSnapshot, Capability, HasVolumes
from skerry.store import Store

_PROVIDER_DEADLINE_S = 60.0
"""Deadline for a provider to say which boxes it holds; after it, it counts as not answering."""
_UNASKED_S = 10.0
"""The same, where nobody asked for a repair and somebody waits for something else."""
GLANCE_S = 5.0
"""The same, where somebody only wants to know how things are."""
_FIRST_CALL_S = 0.25
"""Head start of what a manager was opened for, before it looks for orphans."""
LOOK_S = 60.0
"""Seconds between two looks of an open manager at sandboxes that other programs have made."""
_PARTING_S = 5.0
"""Deadline of a manager that is closed for what is just being ended; the next one goes on with it."""
_NOTED = frozenset({Action.ADOPT, Action.FOLLOW, Action.LOST})
"""Verdicts that change nothing but the registry, where no box is being made anew."""
_log = logging.getLogger("skerry.manager")


class Repair:
    """Makes registry and hosts agree again."""

    def __init__(
        self, store: Store, providers: Providers, rebuilder: Rebuilder, addresses: Addresses, networks: Networks
    ) -> None:
        self._store = store
        self._providers = providers
        self._rebuilder = rebuilder
        self._addresses = addresses
        self._networks = networks

    async def unfinished(self) -> float:
        """Go on with what somebody who is dead has begun, and end what its agent did not end in time; in how many
        seconds there may be more to do. One query, where there is nothing."""
        records = await self._store.list()
        now = self._store.now()
        due = {each.spec.provider for each in records if _is_unfinished(each) or _is_overdue(each, now)}
        for name in due:
            try:
                await self.provider(name, answer_s=_UNASKED_S)
            except SkerryError as error:  # what cannot be repaired now must not keep anybody from working
                _log.warning("provider %s could not be repaired: %s", name, error)
        records = await self._store.list() if due else records
        await self._addresses.ensure(records)
        await self._networks.ensure(records)
        if to_note := [each for each in records if _is_to_be_noted(each, now)]:
            try:
                await self._store.note_ends(to_note)
            except SkerryError as error:
                _log.debug("what is left of lifetimes is noted later: %s", error)
        return min((due_in(each, now) for each in records), default=LOOK_S)

    async def provider(
        self, name: str, *, dry_run: bool = False, rebuild: bool = False, answer_s: float | None = None
    ) -> Sequence[Verdict]:
        """Repair what differs between registry and provider; what was done, or would be, and what is outdated."""
        judged = await self._judge(name, rebuild=rebuild, answer_s=answer_s) or []
        if not dry_run:
            await self._act_on(judged)
            await self._remove_leftovers(name)
            await self._remove_late_volumes(name)
            await self._serve_again([known for verdict, known in judged if verdict.action is Action.LEAVE and known])
        return [verdict for verdict, _ in judged if verdict.action is not Action.LEAVE or verdict.outdated]

    async def sandbox(self, record: Record, *, answer_s: float | None = None) -> None:
        """See what the host says of one sandbox, and follow it."""
        for verdict, known in await self._judge(record.spec.provider, answer_s=answer_s) or ():
            if verdict.id == record.id:
                await self._act(verdict, known)

    async def look(self, record: Record) -> Record:
        """See what the host says of one sandbox, within seconds; the record after that. Nothing is removed for it."""
        for verdict, known in await self._judge(record.spec.provider, answer_s=GLANCE_S) or ():
            if verdict.id == record.id and verdict.action in _NOTED and record.remaker is None:
                await self._act(verdict, known)
        return await self._store.get(record.id)

    async def refresh(self, names: Iterable[str]) -> list[str]:
        """See what providers say, within seconds, and follow it; the names of those that say nothing."""

        async def is_silent(name: str) -> bool:
            judged = await self._judge(name, answer_s=GLANCE_S)
            try:
                await self._act_on(judged or ())
            except (SkerryError, OSError) as error:
                _log.warning("provider %s could not be repaired: %s", name, error)
            return judged is None

        asked = sorted(set(names))
        silent = await asyncio.gather(*(is_silent(name) for name in asked))
        return [name for name, is_one in zip(asked, silent, strict=True) if is_one]

    async def orphans(self) -> None:
        """Remove the boxes of this installation that no record tells of, from all providers that it ever used. What
        cannot be removed now is left to whoever looks next."""
        await asyncio.sleep(_FIRST_CALL_S)
        try:
            names = await self._providers.names(self._store)
        except SkerryError as error:
            _log.debug("orphans are left: %s", error)
            return
        for name in names:
            try:
                await self._providers.load(name)
                judged = await self._judge(name, answer_s=_UNASKED_S, level=logging.DEBUG)
                if judged is not None:
                    await self._act_on([each for each in judged if each[1] is None or not each[1].is_live])
                    await self._remove_leftovers(name)
            except (SkerryError, OSError) as error:
                _log.debug("orphans on %s are left: %s", name, error)

    async def _judge(
        self, name: str, *, rebuild: bool = False, answer_s: float | None = None, level: int = logging.WARNING
    ) -> Sequence[tuple[Verdict, Record | None]] | None:
        """Verdicts, each with the record it is about; None if the provider does not answer, which is told at `level`.
        What changed while the host was asked is left to its changer."""
        filter = Filter(provider=name, include_ended=True)
        before = {record.id: record.version for record in await self._store.list(filter)}
        boxes = await self._boxes(name, answer_s, level)
        if boxes is None:
            return None
        records = {record.id: record for record in await self._store.list(filter)}
        now = Now(
            moment=self._store.now(),
            instance=self._store.instance,
            is_alive=identity.is_alive,
            me=identity.this_process(),
            making=frozenset(identity.making),
            rebuild=rebuild,
        )
        verdicts = decide(name, records.values(), boxes, now)
        return [
            (verdict, record)
            for verdict in verdicts
            if (record := records.get(verdict.id)) is None or before.get(verdict.id) == record.version
            if record is not None or self._sees_all
        ]

    @property
    def _sees_all(self) -> bool:
        """Whether the whole registry is ours to see. To one project the boxes of the others have no record either, so
        what nobody knows is left to whoever sees all."""
        return self._store.project is None

    async def _boxes(self, name: str, answer_s: float | None, level: int) -> Mapping[SandboxId, BoxStatus] | None:
        try:
            async with asyncio.timeout(answer_s or _PROVIDER_DEADLINE_S):
                return await self._providers.get(name).discover()
        except (SkerryError, TimeoutError, OSError) as error:
            _log.log(level, "provider %s does not answer, so nothing is known: %s", name, error or type(error).__name__)
            return None

    async def _act_on(self, judged: Iterable[tuple[Verdict, Record | None]]) -> None:
        """Carry verdicts out, all at once. Raises what the first failed with, once all others are done."""
        done = await asyncio.gather(*(self._act(*each) for each in judged), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _act(self, verdict: Verdict, record: Record | None) -> None:
        level = logging.DEBUG if verdict.action is Action.LEAVE else logging.INFO
        _log.log(level, "sandbox %s on %s: %s: %s", verdict.id, verdict.provider, verdict.action, verdict.why)
        try:
            if verdict.action is Action.DESTROY:
                await self._destroy(verdict, record)
            elif record is None or verdict.to is None:
                return
            elif verdict.action is Action.REBUILD:
                await self._rebuilder.rebuild(record, self._providers.get(verdict.provider))
            elif verdict.action is Action.LOST and record.remaker is not None:
                await self._lose_unmade(verdict, record)
            elif verdict.action is Action.FINISH and not await self._answers(record):
                await self._destroy(msgspec.structs.replace(verdict, cause=Cause.CREATION_FAILED), record)
            else:
                kind = "adopted" if verdict.action in (Action.ADOPT, Action.FINISH) else None
                changed = await self._store.change(record, to=verdict.to, cause=verdict.cause, kind=kind)
                if changed.state is State.READY and not changed.is_being_set_up:
                    await self._begin_service(changed)
        except Conflict as error:  # somebody else was quicker; the next reconcile sees what came of it
            _log.debug("sandbox %s is left to another: %s", verdict.id, error)

    async def _destroy(self, verdict: Verdict, record: Record | None) -> None:
        if record is None or not record.is_live:
            volumes = record is not None and record.volumes
            await self._providers.get(verdict.provider).destroy(verdict.id, volumes=volumes)
            return
        if verdict.cause is not None and not record.doomed:
            # once only: if somebody changed it meanwhile, the verdict was about something else
            taken = destroy.takes_volumes(record, verdict.cause) or None
            record = await self._store.change(record, doomed=True, volumes=taken, cause=verdict.cause, kind="doomed")
        await self._addresses.end(record)
        await self._networks.forget(record)
        await destroy.finish(self._store, self._providers.get(record.spec.provider), record)

    async def _lose_unmade(self, verdict: Verdict, record: Record) -> None:
        """Remove what may be half a box. Until that is done it is ours to make, and nobody else's."""
        me, detail = identity.this_process(), f"{verdict.why}; {ASK_AGAIN}"
        with identity.being_made(record.id):
            record = await self._store.change(record, to=State.CREATING, remaker=me, kind="remaking")
            await self._providers.get(verdict.provider).destroy(record.id)
            await self._store.change(record, to=State.LOST, cause=verdict.cause, detail=detail)

    async def _serve_again(self, records: Sequence[Record]) -> None:
        """Begin the commands of boxes that somebody restarted behind our back, and serve addresses that nobody does."""
        await self._addresses.ensure(records)
        await self._networks.ensure(records)
        ready = [each for each in records if each.state is State.READY and each.spec.command is not None]
        await asyncio.gather(*(self._begin_service(each) for each in ready if not each.is_being_set_up))

    async def _begin_service(self, record: Record) -> None:
        """Begin its command, if it does not run: others may have started its box. Its environment is kept nowhere."""
        try:
            await begin_service(self._providers.get(record.spec.provider), record.id, record.spec)
        except (SkerryError, OSError) as error:
            _log.warning("the command of sandbox %s is not begun: %s", record.id, error)

    async def _answers(self, record: Record) -> bool:
        """Whether there is an agent in the box: a box may run whose agent never came."""
        try:
            stream = await self._providers.get(record.spec.provider).dial(record.id)
            (await AgentClient.greet(stream)).close()
        except (AgentError, NotFound) as error:
            _log.info("the agent of sandbox %s never came: %s", record.id, error)
            return False
        return True

    async def _remove_leftovers(self, name: str) -> None:
        """The snapshots of forks that came to no end, or have ended."""
        if not self._sees_all:
            return
        try:
            snapshots: CanSnapshot = require_capability(self._providers.get(name), Capability.SNAPSHOT)
        except SkerryError:
            return  # it has none, or cannot be loaded
        try:
            async with asyncio.timeout(_PROVIDER_DEADLINE_S):
                there = await snapshots.snapshots()
            records = await self._store.list(Filter(provider=name, include_ended=True))
            for leftover in leftovers(there, records):
                if await destroy.remove_temporary(snapshots, leftover):
                    _log.info("the snapshot %s of a fork that is gone was removed", leftover)
        except (ProviderError, TimeoutError, OSError) as error:
            _log.debug("snapshots of provider %s are not known: %s", name, error or type(error).__name__)

    async def _remove_late_volumes(self, name: str) -> None:
        """Remove volumes that an engine made after the end of their sandbox, for a program that was killed as it asked.
        Those of a sandbox with a name may be another's by now."""
        records = await self._store.list(Filter(provider=name, include_ended=True))
        ended = {each.id for each in records if each.volumes and not each.is_live and each.name is None}
        try:
            volumes: HasVolumes = require_capability(self._providers.get(name), Capability.VOLUMES)
        except SkerryError:
            return  # it has none, or cannot be loaded
        try:
            async with asyncio.timeout(_PROVIDER_DEADLINE_S):
                for volume in await volumes.volumes() if ended else ():
                    if volume.kind == "data" and volume.sandbox in ended and not volume.in_use:
                        await volumes.remove_volume(volume.name)
                        _log.info("volume %s of sandbox %s came after its end: removed", volume.name, volume.sandbox)
        except (SkerryError, TimeoutError, OSError) as error:
            _log.debug("volumes of provider %s are not known: %s", name, error or type(error).__name__)


class Timekeeper:
    """Ends what is overdue, for as long as a manager is open. Between two ends it is a timer, and nothing else. Once at
    the beginning it has orphans removed."""

    def __init__(
        self, look: Callable[[], Awaitable[float]], orphans: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._sweep = None if orphans is None else self._loop.create_task(orphans())
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    def look_in(self, seconds: float) -> None:
        """Look then, unless that is done before; or while others are being ended, after that."""
        at = self._loop.time() + seconds
        if self._is_closed or self._looking is not None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._looking = self._loop.create_task(self._end_overdue())

    async def _end_overdue(self) -> None:
        next_s = LOOK_S
        try:
            next_s = await self._look()
        except (SkerryError, OSError) as error:
            _log.debug("the next look ends what is overdue: %s", error)
        self._looking = None
        self.look_in(next_s)

    async def aclose(self) -> None:
        """Look no more; what is just being ended is waited for, a while."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._sweep is not None:  # whoever opens a manager next goes on with it
            self._sweep.cancel()
            await asyncio.wait([self._sweep])
        if (looking := self._looking) is not None:
            await asyncio.wait([looking], timeout=_PARTING_S)
            looking.cancel()
            await asyncio.wait([looking])


def due_in(record: Record, now: Moment) -> float:
    """In how many seconds it is to be seen whether its agent has ended it, or whether nobody uses it any more."""
    left_s = record.left_s(now)
    look_s = min(record.spec.sleep_after_s or LOOK_S, LOOK_S) if record.state is State.READY else LOOK_S
    if left_s is None or record.state is State.CREATING or _is_overdue(record, now):
        return look_s
    return min(left_s + LATE_S, look_s)


def _is_overdue(record: Record, now: Moment) -> bool:
    """Whether its agent should have ended it, and it is not its maker's yet."""
    return record.state is not State.CREATING and record.is_over(now, LATE_S)


def _is_to_be_noted(record: Record, now: Moment) -> bool:
    """Whether what is noted of its end is too far from what is left: after a restart of the host only that counts. Half
    is near enough, so a lifetime is noted a few times."""
    left_s = record.left_s(now)
    if left_s is None or left_s <= LATE_S:
        return False
    if record.end is None:  # written by an older skerry
        return record.owner.host.partition("/")[0] == now.machine
    return record.end.noted.boot != now.boot or left_s < record.end.left_s / 2


def _is_unfinished(record: Record) -> bool:
    if record.remaker is not None and record.state is not State.LOST:
        return not identity.is_rebuilt(record)
    depends_on_owner = record.ephemeral or record.state is State.CREATING
    return record.doomed or (depends_on_owner and identity.is_alive(record.owner) is False)
