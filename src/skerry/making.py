"""Making a sandbox: a record, then a box, then the word that it is ready; or nothing of all three."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from skerry import ending, lifecycle, owners, workspace
from skerry.config import Config
from skerry.errors import SkerryError, WrongState
from skerry.lifecycle import State
from skerry.providers.base import Provider
from skerry.reconcile import INSTANCE_LABEL
from skerry.records import Cause, Record
from skerry.spec import SandboxId, Spec, Workspace
from skerry.store import Store

_SLOT_WAIT_S = (0.005, 0.1)
"""First and longest wait between two looks for a free place to boot."""


class Maker:
    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config

    async def make(
        self,
        id: SandboxId,
        spec: Spec,
        provider: Provider,
        *,
        ephemeral: bool = False,
        key: str | None = None,
        take_files: Callable[[], Awaitable[object]] | None = None,
        on_known: Callable[[], None] | None = None,
    ) -> tuple[Record, bool]:
        """A sandbox that is ready, and True; or the one that was asked for by this key before, and False.

        `on_known` hears of it when the registry has it, long before it is ready. `take_files` makes the snapshot that
        it begins with, once the registry knows of it; its work is in there.
        """
        enforced = await lifecycle.admit(provider, workspace.for_box(spec))
        owners.making.add(id)
        try:
            record, is_new = await self._reserve(id, spec, ephemeral, key)
            if on_known is not None:
                on_known()
            if is_new:
                told = msgspec.to_builtins(dict(enforced))
                record = await self._boot(record, spec, provider, told, take_files)
        finally:
            owners.making.discard(id)
        if not is_new and record.state is State.CREATING and not record.remaker and owners.is_abandoned(record):
            await self._give_up(record, WrongState("it was begun while the registry was out of reach"))
        return record, is_new

    async def _boot(
        self,
        record: Record,
        spec: Spec,
        provider: Provider,
        enforced: dict[str, Any],
        take_files: Callable[[], Awaitable[object]] | None,
    ) -> Record:
        boxed = self.spec_of_box(record, spec, provider)
        try:
            async with workspace.opened(boxed if take_files is None else workspace.for_box(boxed)) as work:
                await self.wait_for_slot(record)
                if take_files is not None:
                    await take_files()
                await work.make_box(provider, record.id)
        except BaseException as error:
            await lifecycle.run_to_end(self._give_up(record, error))
            raise
        try:
            return await lifecycle.run_to_end(self._welcome(record, provider, enforced, work.spec.workspace))
        except asyncio.CancelledError:  # it is ready, and nobody waits for it any more
            await lifecycle.run_to_end(self._take_back(record, provider))
            raise

    async def _reserve(self, id: SandboxId, spec: Spec, ephemeral: bool, key: str | None) -> tuple[Record, bool]:
        """A place in the registry. If we are cancelled meanwhile, it is given back."""
        reserving = asyncio.ensure_future(
            self._store.reserve(
                id,
                spec,
                owner=owners.this_process(),
                boot_id=owners.boot_id(),
                ephemeral=ephemeral,
                key=key,
                max_sandboxes=self._config.max_sandboxes,
            )
        )
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError as cancelled:
            await asyncio.wait([reserving])
            if not reserving.cancelled() and reserving.exception() is None and reserving.result()[1]:
                await lifecycle.run_to_end(self._give_up(reserving.result()[0], cancelled))
            raise

    def spec_of_box(self, record: Record, spec: Spec, provider: Provider) -> Spec:
        """What the provider is told: whose box it is; and that one which nobody finds again keeps nothing."""
        labels = {**spec.labels, INSTANCE_LABEL: self._store.instance}
        keeps_nothing = record.ephemeral and spec.name is None and spec.data is None and "data" in provider.honours
        return msgspec.structs.replace(spec, labels=labels, data=False if keeps_nothing else spec.data)

    async def wait_for_slot(self, record: Record) -> None:
        """So many boots at once, over all programs; the rest wait their turn."""
        wait, longest = _SLOT_WAIT_S
        while not await self._store.boot_slot(
            record.id, max_boots=self._config.max_boots, owner_alive=lambda owner: owners.is_alive(owner) is not False
        ):
            await asyncio.sleep(wait)
            wait = min(wait * 2, longest)

    async def _give_up(self, record: Record, error: BaseException) -> None:
        """Write down that nothing came of it. If that fails too, reconcile sees that nobody makes it."""
        why = str(error) or type(error).__name__
        try:
            current = await self._store.get(record.id)
            if current.is_live:
                cause = current.cause if current.doomed else Cause.CREATION_FAILED
                if lifecycle.is_left(error):  # the next reconcile goes on with it
                    volumes = ending.takes_volumes(record, Cause.CREATION_FAILED) or None
                    await self._store.change(
                        current, doomed=True, volumes=volumes, cause=cause, detail=why[-4096:], kind="doomed"
                    )
                else:
                    await self._store.change(current, to=State.DESTROYED, cause=cause, detail=why[-4096:])
        except SkerryError as failure:
            error.add_note(f"and the registry could not be told: {failure}")

    async def _welcome(
        self, record: Record, provider: Provider, enforced: dict[str, Any], filled: Workspace | None
    ) -> Record:
        """The box is made: say so, unless somebody has decided its end meanwhile."""
        try:
            current = await self._store.get(record.id)
            if current.doomed or not current.is_live:
                raise WrongState(f"sandbox {record.id} was destroyed while it was made")
            spec = None if filled is None else msgspec.structs.replace(current.spec, workspace=filled)
            return await self._store.change(current, to=State.READY, enforced=enforced, spec=spec)
        except BaseException as error:
            await provider.destroy(record.id, volumes=record.name is None)
            await self._give_up(record, error)
            raise

    async def _take_back(self, record: Record, provider: Provider) -> None:
        record = await ending.doom(self._store, await self._store.get(record.id), Cause.CREATION_FAILED)
        await ending.finish(self._store, lambda _name: provider, record)
