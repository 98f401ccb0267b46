"""The acting half of reconcile: asks the host, has it decided, and carries the verdicts out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from skerry import ending, lifecycle, owners
from skerry.agent.client import AgentClient
from skerry.errors import AgentError, Conflict, NotFound, ProviderError, SkerryError
from skerry.lifecycle import State
from skerry.making import Maker
from skerry.providers.base import BoxStatus, CanSnapshot, Capability, Provider
from skerry.reconcile import Action, Now, Verdict, decide, leftovers
from skerry.records import Cause, Filter, Record
from skerry.remaking import ASK_AGAIN, Remaker
from skerry.spec import SandboxId
from skerry.store import Store

_PROVIDER_DEADLINE_S = 60.0
"""How long a provider may take to say which boxes it holds, before it counts as not answering."""
_GREETING_S = 10.0


class Repair:
    def __init__(self, store: Store, provider: Callable[[str], Provider], maker: Maker) -> None:
        self._store = store
        self._provider = provider
        self._maker = maker

    async def unfinished(self) -> None:
        """Go on with what somebody who is dead has begun. One query, where there is nothing to do."""
        records = await self._store.list()
        for name in {record.spec.provider for record in records if _is_unfinished(record)}:
            with suppress(SkerryError):  # what cannot be repaired now must not keep anybody from working
                await self.provider(name)

    async def provider(self, name: str, *, dry_run: bool = False, rebuild: bool = False) -> Sequence[Verdict]:
        """Compare the registry with one provider and repair the difference; what was done, or would be. What is
        outdated is told too, and made anew with `rebuild`."""
        judged = await self._judge(name, rebuild=rebuild)
        if not dry_run:
            done = await asyncio.gather(*(self._act(*each) for each in judged), return_exceptions=True)
            for error in done:
                if error is not None:
                    raise error  # told once all others are done
            await self._remove_leftovers(name)
        return [verdict for verdict, _ in judged if verdict.action is not Action.LEAVE or verdict.outdated]

    async def sandbox(self, record: Record) -> None:
        """See what the host says of one sandbox, and follow it."""
        for verdict, known in await self._judge(record.spec.provider):
            if verdict.id == record.id:
                await self._act(verdict, known)

    async def _judge(self, name: str, *, rebuild: bool = False) -> Sequence[tuple[Verdict, Record | None]]:
        """Verdicts, each with the record it is about. What changed while the host was asked is left to its changer."""
        filter = Filter(provider=name, include_ended=True)
        before = {record.id: record.version for record in await self._store.list(filter)}
        boxes = await self._boxes(name)
        records = {record.id: record for record in await self._store.list(filter)}
        now = Now(
            time=time.time(),
            boot_id=owners.boot_id(),
            instance=self._store.instance,
            is_alive=owners.is_alive,
            me=owners.this_process(),
            making=frozenset(owners.making),
            rebuild=rebuild,
        )
        verdicts = decide(name, records.values(), boxes, now)
        return [
            (verdict, record)
            for verdict in verdicts
            if (record := records.get(verdict.id)) is None or before.get(verdict.id) == record.version
        ]

    async def _boxes(self, name: str) -> Mapping[SandboxId, BoxStatus] | None:
        try:
            async with asyncio.timeout(_PROVIDER_DEADLINE_S):
                return await self._provider(name).discover()
        except (SkerryError, TimeoutError, OSError):
            return None  # no answer is not an answer: nothing is known

    async def _act(self, verdict: Verdict, record: Record | None) -> None:
        try:
            if verdict.action is Action.DESTROY:
                await self._destroy(verdict, record)
            elif record is None or verdict.to is None:
                return
            elif verdict.action is Action.REBUILD:
                await Remaker(self._store, self._maker).remake(record, self._provider(verdict.provider))
            elif verdict.action is Action.LOST and record.remaker is not None:
                await self._lose_unmade(verdict, record)
            elif verdict.action is Action.FINISH and not await self._answers(record):
                await self._destroy(_failed(verdict), record)
            else:
                kind = "adopted" if verdict.action in (Action.ADOPT, Action.FINISH) else None
                await self._store.change(record, to=verdict.to, cause=verdict.cause, kind=kind)
        except Conflict:
            return  # somebody else was quicker; the next reconcile sees what came of it

    async def _destroy(self, verdict: Verdict, record: Record | None) -> None:
        if record is None or not record.is_live:
            volumes = record is not None and record.volumes
            await self._provider(verdict.provider).destroy(verdict.id, volumes=volumes)
            return
        if verdict.cause is not None and not record.doomed:
            # once only: if somebody changed it meanwhile, the verdict was about something else
            volumes = ending.takes_volumes(record, verdict.cause)
            record = await self._store.change(
                record, doomed=True, volumes=volumes or None, cause=verdict.cause, kind="doomed"
            )
        await ending.finish(self._store, self._provider, record)

    async def _lose_unmade(self, verdict: Verdict, record: Record) -> None:
        """Remove what may be half a box. Until that is done it is ours to make, and nobody else's."""
        me, detail = owners.this_process(), f"{verdict.why}; {ASK_AGAIN}"
        owners.making.add(record.id)
        try:
            record = await self._store.change(record, to=State.CREATING, remaker=me, kind="remaking")
            await self._provider(verdict.provider).destroy(record.id)
            await self._store.change(record, to=State.LOST, cause=verdict.cause, detail=detail)
        finally:
            owners.making.discard(record.id)

    async def _answers(self, record: Record) -> bool:
        """Whether there is an agent in the box: a box may run whose agent never came."""
        try:
            stream = await self._provider(record.spec.provider).dial(record.id)
            (await AgentClient.greet(stream, timeout_s=_GREETING_S)).close()
        except (AgentError, NotFound):
            return False
        return True

    async def _remove_leftovers(self, name: str) -> None:
        """The snapshots of forks that came to no end, or have ended."""
        try:
            snapshots: CanSnapshot = lifecycle.able(self._provider(name), Capability.SNAPSHOT)
        except SkerryError:
            return  # it has none, or cannot be loaded
        try:
            async with asyncio.timeout(_PROVIDER_DEADLINE_S):
                there = await snapshots.snapshots()
            records = await self._store.list(Filter(provider=name, include_ended=True))
            for leftover in leftovers(there, records):
                with suppress(Conflict, NotFound):
                    await snapshots.remove_snapshot(leftover)
        except (ProviderError, TimeoutError, OSError):
            return  # nothing is known, as of its boxes


def _is_unfinished(record: Record) -> bool:
    if record.remaker is not None and record.state is not State.LOST:
        return not owners.is_remade(record)
    depends_on_owner = record.ephemeral or record.state is State.CREATING
    return record.doomed or (depends_on_owner and owners.is_alive(record.owner) is False)


def _failed(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(
        verdict, action=Action.DESTROY, to=State.DESTROYED, cause=Cause.CREATION_FAILED, why="its agent never came"
    )
