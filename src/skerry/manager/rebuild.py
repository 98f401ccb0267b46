"""Rebuild a sandbox's box, under the same id and with its volumes: for another snapshot, or a newer image.

The registry knows at each step how far it is, for whoever finds it half done. While the old box may still be there
the record has a `remaker` and is otherwise as it was; from then on it is `creating`. One that came to no end is `lost`
until the same is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

import msgspec

from skerry import aio
from skerry.clock import Moment
from skerry.errors import Conflict, SkerryError, WrongState
from skerry.manager import identity, workspace
from skerry.manager.create import Creator, make_box
from skerry.manager.providers import admit
from skerry.model.records import Cause, Record
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.providers.base import BoxState, Enforcement, Provider
from skerry.store import Changes, Store

REBUILT_FROM = frozenset({State.READY, State.PAUSED, State.ASLEEP, State.STOPPED, State.LOST})
"""States in which a sandbox can be rebuilt."""
ASK_AGAIN = "its files are gone, its volumes are kept: restore it again, or reconcile with rebuild"
_log = logging.getLogger("skerry.manager")


class Rebuilder:
    """Makes boxes anew for sandboxes that stay."""

    def __init__(self, store: Store, creator: Creator) -> None:
        self._store = store
        self._creator = creator

    async def rebuild(
        self, record: Record, provider: Provider, *, snapshot: str | None = None, env: Mapping[str, str] | None = None
    ) -> Record:
        """Make its box again, with its volumes; ready, or lost. Raises WrongState or Conflict if that cannot be now."""
        _refuse(record, self._store.now())
        spec = msgspec.structs.replace(record.spec, snapshot=snapshot or record.spec.snapshot)
        boxed = msgspec.structs.replace(record.spec_from(self._store.now(), env), snapshot=spec.snapshot)
        if boxed.snapshot is not None:
            boxed = workspace.for_box(boxed)  # the work is in the snapshot
        admitted = await admit(provider, workspace.for_box(boxed))
        with identity.being_made(record.id):
            record = await self._clear(record, spec, provider)
            enforced = {**admitted, **await self._boot(record, boxed, provider)}
            record = await aio.run_to_end(self._mark_ready(record, provider, enforced))
            _log.info("sandbox %s is rebuilt", record.id)
            return record

    async def _clear(self, record: Record, spec: Spec, provider: Provider) -> Record:
        """Until the old box is gone nothing is lost, whatever fails."""
        was_lost = record.state is State.LOST  # then there is only what the last attempt has left
        begun: Changes = {"to": State.CREATING, "spec": spec} if was_lost else {"kind": "remaking"}
        begun["remaker"] = identity.this_process()
        record = await self._store.change(record, **begun)
        try:
            await provider.destroy(record.id)
        except BaseException as error:
            await aio.run_to_end(self._lose(record, error) if was_lost else self._let_go(record, provider, error))
            raise
        if was_lost:
            return record
        return await aio.run_to_end(self._store.change(record, to=State.CREATING, spec=spec))

    async def _let_go(self, record: Record, provider: Provider, error: BaseException) -> None:
        """It is as it was, unless the box is gone all the same."""
        try:
            status = (await provider.discover()).get(record.id)
            is_gone = status is None or status.state in (BoxState.DEAD, BoxState.REMAINS)
        except (SkerryError, OSError) as failure:
            _log.debug("nothing is known of the box of sandbox %s: %s", record.id, failure)
            is_gone = False
        if is_gone:
            await self._lose(record, error)
            return
        try:
            await self._store.change(record, to=record.state)
        except SkerryError as failure:  # somebody else has it now, or nobody can be told: then our end is seen
            _log.debug("the rebuild of sandbox %s is not taken back: %s", record.id, failure)

    async def _boot(self, record: Record, spec: Spec, provider: Provider) -> Mapping[str, Enforcement]:
        try:
            asked = self._creator.spec_of_box(record, spec, provider)
            async with workspace.opened(asked, provider.holds(asked)) as work:
                await self._creator.wait_for_slot(record)
                await self._store.note_env(record.id, work.spec.env)
                up = partial(self._creator.networks.bring_up, record.id, spec)
                return await make_box(provider, record.id, work, up, keep_volumes=True)
        except BaseException as error:
            await aio.run_to_end(self._lose(record, error))
            raise

    async def _lose(self, record: Record, error: BaseException) -> None:
        why = "it was cancelled" if isinstance(error, asyncio.CancelledError) else str(error) or type(error).__name__
        _log.warning("sandbox %s is lost: it could not be rebuilt (%s)", record.id, type(error).__name__)
        detail = f"it could not be made anew ({why[-2048:]}); {ASK_AGAIN}"
        try:
            await self._store.change(record, to=State.LOST, cause=Cause.CREATION_FAILED, detail=detail)
        except SkerryError as failure:
            error.add_note(f"and the registry could not be told: {failure}")

    async def _mark_ready(self, record: Record, provider: Provider, enforced: dict[str, Enforcement]) -> Record:
        """Say that the box is made, unless somebody has decided its end meanwhile."""
        try:
            return await self._store.change(record, to=State.READY, enforced=enforced, boot_id=self._store.now().boot)
        except Conflict:
            current = await self._store.get(record.id)
            if current.is_live and not current.doomed:
                raise
            await provider.destroy(record.id, volumes=current.volumes)
            raise WrongState(f"sandbox {record.id} was destroyed while it was made anew") from None


def _refuse(record: Record, now: Moment) -> None:
    if record.doomed or record.state not in REBUILT_FROM:
        what = "being destroyed" if record.doomed else record.state
        raise WrongState(f"sandbox {record.id} cannot be made anew: it is {what}")
    if identity.is_rebuilt(record):
        raise Conflict(f"sandbox {record.id} is being made anew by another: wait for that")
    if record.is_over(now):
        raise WrongState(f"sandbox {record.id} cannot be made anew: its lifetime is over")
