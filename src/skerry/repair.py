"""The acting half of reconcile: asks the host, has it decided, and carries the verdicts out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from skerry import ending, owners
from skerry.errors import Conflict, SkerryError
from skerry.lifecycle import State
from skerry.providers.base import BoxStatus, Provider
from skerry.reconcile import Action, Now, Verdict, decide
from skerry.records import Filter, Record
from skerry.spec import SandboxId
from skerry.store import Store

_PROVIDER_DEADLINE_S = 60.0
"""How long a provider may take to say which boxes it holds, before it counts as not answering."""


class Repair:
    def __init__(self, store: Store, provider: Callable[[str], Provider]) -> None:
        self._store = store
        self._provider = provider

    async def unfinished(self) -> None:
        """Go on with what somebody who is dead has begun. One query, where there is nothing to do."""
        records = await self._store.list()
        for name in {record.spec.provider for record in records if _is_unfinished(record)}:
            with suppress(SkerryError):  # what cannot be repaired now must not keep anybody from working
                await self.provider(name)

    async def provider(self, name: str, *, dry_run: bool = False) -> Sequence[Verdict]:
        """Compare the registry with one provider and repair the difference; what was done, or would be."""
        judged = await self._judge(name)
        if not dry_run:
            done = await asyncio.gather(*(self._act(*each) for each in judged), return_exceptions=True)
            for error in done:
                if error is not None:
                    raise error  # told once all others are done
        return [verdict for verdict, _ in judged if verdict.action is not Action.LEAVE]

    async def sandbox(self, record: Record) -> None:
        """See what the host says of one sandbox, and follow it."""
        for verdict, known in await self._judge(record.spec.provider):
            if verdict.id == record.id:
                await self._act(verdict, known)

    async def _judge(self, name: str) -> Sequence[tuple[Verdict, Record | None]]:
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
            elif verdict.to is not None and record is not None:
                kind = "adopted" if verdict.action in (Action.ADOPT, Action.FINISH) else None
                await self._store.change(record, to=verdict.to, cause=verdict.cause, kind=kind)
        except Conflict:
            return  # somebody else was quicker; the next reconcile sees what came of it

    async def _destroy(self, verdict: Verdict, record: Record | None) -> None:
        if record is None or not record.is_live:
            await self._provider(verdict.provider).destroy(verdict.id)
            return
        if verdict.cause is not None and not record.doomed:
            # once only: if somebody changed it meanwhile, the verdict was about something else
            record = await self._store.change(record, doomed=True, cause=verdict.cause, kind="doomed")
        await ending.finish(self._store, self._provider, record)


def _is_unfinished(record: Record) -> bool:
    depends_on_owner = record.ephemeral or record.state is State.CREATING
    return record.doomed or (depends_on_owner and owners.is_alive(record.owner) is False)
