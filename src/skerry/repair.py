"""The acting half of reconcile: asks the host, has it decided, and carries the verdicts out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from skerry import ending, owners
from skerry.errors import Conflict, SkerryError
from skerry.providers.base import Provider
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
        for name in {r.spec.provider for r in records if r.doomed or owners.is_alive(r.owner) is False}:
            await self.provider(name)

    async def provider(self, name: str, *, dry_run: bool = False) -> Sequence[Verdict]:
        """Compare the registry with one provider and repair the difference; what was done, or would be."""
        verdicts = await self._decide(name)
        if not dry_run:
            records = {record.id: record for record in await self._store.list(Filter(provider=name))}
            await asyncio.gather(*(self._act(verdict, records.get(verdict.id)) for verdict in verdicts))
        return [verdict for verdict in verdicts if verdict.action is not Action.LEAVE]

    async def sandbox(self, record: Record) -> None:
        """See what the host says of one sandbox, and follow it."""
        for verdict in await self._decide(record.spec.provider, record.id):
            await self._act(verdict, record)

    async def _decide(self, name: str, only: SandboxId | None = None) -> Sequence[Verdict]:
        boxes = None
        try:
            async with asyncio.timeout(_PROVIDER_DEADLINE_S):
                boxes = await self._provider(name).discover()
        except (SkerryError, TimeoutError, OSError):
            pass  # no answer is not an answer: nothing is known
        records = await self._store.list(Filter(provider=name, include_ended=True))
        now = Now(time=time.time(), boot_id=owners.boot_id(), instance=self._store.instance, is_alive=owners.is_alive)
        return [each for each in decide(name, records, boxes, now) if only in (None, each.id)]

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
