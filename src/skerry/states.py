"""The states that a sandbox can be put into, where its provider has them: paused, stopped, and back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from skerry import lifecycle, owners
from skerry.core import ManagerCore
from skerry.errors import Conflict, SkerryError, WrongState
from skerry.lifecycle import State
from skerry.providers.base import CanPause, CanStop, Capability, Provider
from skerry.records import Cause, Record
from skerry.sandbox import AsyncSandbox

_TRIES = 20


class StateMethods(ManagerCore):
    async def pause(self, reference: str) -> None:
        """Freeze it, where the provider can."""

        async def pause(provider: Provider, record: Record) -> None:
            box: CanPause = lifecycle.able(provider, Capability.PAUSE)
            await box.pause(record.id)

        await self._switch(reference, pause, State.PAUSED)

    async def resume(self, reference: str) -> None:
        """Let a paused one go on."""

        async def resume(provider: Provider, record: Record) -> None:
            box: CanPause = lifecycle.able(provider, Capability.PAUSE)
            await box.resume(record.id)

        await self._switch(reference, resume, State.READY)

    async def stop(self, reference: str) -> None:
        """End its processes and keep its files, where the provider can. Its lifetime goes on."""

        async def stop(provider: Provider, record: Record) -> None:
            box: CanStop = lifecycle.able(provider, Capability.STOP)
            await box.stop(record.id)

        await self._switch(reference, stop, State.STOPPED)

    async def start(self, reference: str, env: Mapping[str, str] | None = None) -> None:
        """Start a stopped one again, for what is left of its lifetime. Its environment is kept nowhere: give it again,
        if it needs one."""

        async def start(provider: Provider, record: Record) -> None:
            box: CanStop = lifecycle.able(provider, Capability.STOP)
            spec = record.spec_from(time.time(), env)
            try:
                await box.start(record.id, spec)
                handle = self._handle(record)
                handle._state = State.READY
                await AsyncSandbox.set_lifetime(handle, spec.lifetime_s or None, spec.idle_s or None)
            except BaseException:
                self._handle(record)  # it is as it was
                await lifecycle.run_to_end(_stop_again(box, record))
                raise

        record = await self.record(reference)
        if record.is_live and record.ends_at is not None and record.ends_at <= time.time():
            await self.destroy(record.id, cause=Cause.LIFETIME)
            raise WrongState(f"sandbox {record.id} cannot be started: its lifetime is over, and it was destroyed")
        await self._switch(record.id, start, State.READY)

    async def _switch(self, reference: str, act: Callable[[Provider, Record], Awaitable[None]], to: State) -> None:
        """Do it, then write it down; if we die in between, the next look at the host finds it done."""
        record = await self.record(reference)
        if record.doomed:
            raise WrongState(f"sandbox {record.id} is being destroyed")
        if owners.is_remade(record):
            raise WrongState(f"sandbox {record.id} is being made anew: wait until it is ready")
        lifecycle.move(record.state, to)
        await self._handle(record).close()
        await act(self.provider(record.spec.provider), record)
        self._handle(await self._write_down(record, to))

    async def _write_down(self, record: Record, to: State) -> Record:
        """Others who watch the host may have done so already."""
        boot_id = owners.boot_id() if to is State.READY else record.boot_id
        for _ in range(_TRIES):
            try:
                return await self.store.change(record, to=to, boot_id=boot_id)
            except Conflict:
                record = await self.store.get(record.id)
            if record.state is to or record.doomed or not record.is_live:
                return record
        raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")


async def _stop_again(box: CanStop, record: Record) -> None:
    with suppress(SkerryError):  # what is half started is seen by the next reconcile
        await box.stop(record.id)
