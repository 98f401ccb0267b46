"""Making a sandbox's box anew, under the same id and with its volumes: for another snapshot, or a newer image.

The registry knows at each step how far it is, for whoever finds it half done. While the old box may still be there
the record has a `remaker` and is otherwise as it was; from then on it is `creating`. One that came to no end is `lost`
until the same is asked for again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from skerry import lifecycle, owners, workspace
from skerry.errors import Conflict, SkerryError, WrongState
from skerry.lifecycle import State
from skerry.making import Maker
from skerry.providers.base import BoxState, Provider
from skerry.records import Cause, Record
from skerry.spec import Spec
from skerry.store import Store

REMADE = frozenset({State.READY, State.PAUSED, State.STOPPED, State.LOST})
"""In which states a sandbox can be made anew."""
ASK_AGAIN = "its files are gone, its volumes are kept: restore it again, or reconcile with rebuild"


class Remaker:
    def __init__(self, store: Store, maker: Maker) -> None:
        self._store = store
        self._maker = maker

    async def remake(
        self, record: Record, provider: Provider, *, snapshot: str | None = None, env: Mapping[str, str] | None = None
    ) -> Record:
        """Destroy its box, keep its volumes, and make it again; ready, or lost."""
        _refuse(record)
        spec = msgspec.structs.replace(record.spec, snapshot=snapshot or record.spec.snapshot)
        boxed = msgspec.structs.replace(record.spec_from(time.time(), env), snapshot=spec.snapshot)
        if boxed.snapshot is not None:
            boxed = workspace.for_box(boxed)  # the work is in the snapshot
        enforced = await lifecycle.admit(provider, workspace.for_box(boxed))
        owners.making.add(record.id)
        try:
            record = await self._clear(record, spec, provider)
            await self._boot(record, boxed, provider)
            return await lifecycle.run_to_end(self._welcome(record, provider, msgspec.to_builtins(dict(enforced))))
        finally:
            owners.making.discard(record.id)

    async def _clear(self, record: Record, spec: Spec, provider: Provider) -> Record:
        """Until the old box is gone nothing is lost, whatever fails."""
        me = owners.this_process()
        if record.state is not State.LOST:
            record = await self._store.change(record, remaker=me, kind="remaking")
            try:
                await provider.destroy(record.id)
            except BaseException as error:
                await lifecycle.run_to_end(self._let_go(record, provider, error))
                raise
            return await lifecycle.run_to_end(self._store.change(record, to=State.CREATING, spec=spec))
        record = await self._store.change(record, to=State.CREATING, spec=spec, remaker=me)
        try:
            await provider.destroy(record.id)  # what the last attempt has left
        except BaseException as error:
            await lifecycle.run_to_end(self._lose(record, error))
            raise
        return record

    async def _let_go(self, record: Record, provider: Provider, error: BaseException) -> None:
        """It is as it was, unless the box is gone all the same."""
        try:
            status = (await provider.discover()).get(record.id)
            is_gone = status is None or status.state is BoxState.DEAD
        except (SkerryError, OSError):
            is_gone = False
        if is_gone:
            await self._lose(record, error)
            return
        with suppress(SkerryError):  # somebody else has it now, or nobody can be told: then our end is seen
            await self._store.change(record, to=record.state)

    async def _boot(self, record: Record, spec: Spec, provider: Provider) -> None:
        try:
            async with workspace.opened(self._maker.spec_of_box(record, spec, provider)) as work:
                await self._maker.wait_for_slot(record)
                await work.make_box(provider, record.id, keep_volumes=True)
        except BaseException as error:
            await lifecycle.run_to_end(self._lose(record, error))
            raise

    async def _lose(self, record: Record, error: BaseException) -> None:
        why = "it was cancelled" if isinstance(error, asyncio.CancelledError) else str(error) or type(error).__name__
        detail = f"it could not be made anew ({why[-2048:]}); {ASK_AGAIN}"
        try:
            await self._store.change(record, to=State.LOST, cause=Cause.CREATION_FAILED, detail=detail)
        except SkerryError as failure:
            error.add_note(f"and the registry could not be told: {failure}")

    async def _welcome(self, record: Record, provider: Provider, enforced: dict[str, object]) -> Record:
        """The box is made: say so, unless somebody has decided its end meanwhile."""
        try:
            return await self._store.change(record, to=State.READY, enforced=enforced, boot_id=owners.boot_id())
        except Conflict:
            current = await self._store.get(record.id)
            if current.is_live and not current.doomed:
                raise
            await provider.destroy(record.id, volumes=current.volumes)
            raise WrongState(f"sandbox {record.id} was destroyed while it was made anew") from None


def _refuse(record: Record) -> None:
    if record.doomed or record.state not in REMADE:
        what = "being destroyed" if record.doomed else record.state
        raise WrongState(f"sandbox {record.id} cannot be made anew: it is {what}")
    if owners.is_remade(record):
        raise Conflict(f"sandbox {record.id} is being made anew by another: wait for that")
    if record.ends_at is not None and record.ends_at <= time.time():
        raise WrongState(f"sandbox {record.id} cannot be made anew: its lifetime is over")
