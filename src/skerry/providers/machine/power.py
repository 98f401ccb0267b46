"""Power of a machine: held for a while, paused, asleep with memory in files, shut down. Who calls holds the box."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from skerry.agent.client import CONTROL_TIMEOUT_S
from skerry.errors import AgentError, CallInterrupted, Conflict, CreateFailed, ProviderError, SkerryError, WrongState
from skerry.providers.machine import memory, plan
from skerry.providers.machine.boxes import MachineBox, Mark
from skerry.providers.shared.dialer import FirstStreams
from skerry.vm import guest
from skerry.vm.base import AGENT_PORT, Hypervisor

_log = logging.getLogger("skerry.providers")

_CONTROL_S = 5.0
_FREEZE_S = 30.0
"""How long a guest may take to write out what it has in memory."""
_ADVICE = "stop it and start it again: its files are whole, and what ran in it is gone"


class MachinePower:
    def __init__(self, hypervisor: Hypervisor, first_streams: FirstStreams) -> None:
        self._hypervisor = hypervisor
        self._first_streams = first_streams

    async def pause(self, box: MachineBox) -> None:
        """Pause it once its files are written out; quiet if it is. Raises ProviderError if its guest does not do it."""
        if not await self.is_paused(box):
            async with self._resumed_if_it_fails(box):
                await self._pause(box)

    async def is_paused(self, box: MachineBox) -> bool:
        return await self._hypervisor.is_paused(box.vm)

    async def resume(self, box: MachineBox) -> None:
        """Let it go on. Raises ProviderError if its guest does not; the next call tries again."""
        is_held = box.has(Mark.HELD)
        if not is_held and not box.has(Mark.PAUSED):
            return
        await self._hypervisor.resume(box.vm)
        try:
            async with guest.control(box.vm, _CONTROL_S) as client:
                if is_held:
                    await guest.reseed_and_thaw(client, plan.hostname(box.id), plan.machine_id(box.id))
                else:
                    await client.call("thaw", type=dict[str, Any])
                    await client.call("sync_clock", {"time": time.time()}, type=dict[str, Any])
        except AgentError as error:
            reason = f"box {box.id} was resumed, and its guest does not go on: {error}"
            raise ProviderError(f"{reason}; try again, or stop and start it") from error
        box.mark(Mark.PAUSED, False)
        box.mark(Mark.HELD, False)

    @contextlib.asynccontextmanager
    async def still(self, box: MachineBox) -> AsyncIterator[None]:
        """Hold its disk still, with all that was written on it."""
        if box.vm.is_running() and box.has(Mark.HELD):  # by somebody who did not come to its end
            await self.hold(box)
            yield
            return
        if not box.vm.is_running() or (box.has(Mark.PAUSED) and await self.is_paused(box)):
            yield
            return
        async with self._resumed_if_it_fails(box):
            await self._pause(box)
            yield
        await self.resume(box)

    async def sleep(self, box: MachineBox) -> None:
        """Keep its memory in files, and end its processes. Until the files are in their place it is only paused."""
        if not box.is_asleep():
            started = _started(box)
            async with self._resumed_if_it_fails(box):
                await self.hold(box)
                with box.falling_asleep() as folder:
                    await memory.keep(self._hypervisor, box.vm, folder, box.id, started, lasting=True)
        await self._hypervisor.kill(box.vm)

    @contextlib.asynccontextmanager
    async def with_memory(self, box: MachineBox, into: Path) -> AsyncIterator[None]:
        """Keep its memory in an empty folder, and its disk still as it was at that moment. After that it is as it was
        before: it goes on, is paused, or sleeps."""
        if box.is_asleep():
            await asyncio.to_thread(memory.link, box.asleep, into)
            yield
            return
        started = _started(box)
        was_paused = box.has(Mark.HELD) or (box.has(Mark.PAUSED) and await self.is_paused(box))
        async with self._resumed_if_it_fails(box):
            await self.hold(box)
            await memory.keep(self._hypervisor, box.vm, into, box.id, started)
            yield
            await self.resume(box)
            if was_paused:
                await self._pause(box)

    async def hold(self, box: MachineBox) -> None:
        """Let nothing of its user's go on until it is resumed, also if that is elsewhere. Raises ProviderError."""
        if box.has(Mark.PAUSED) or box.has(Mark.HELD):
            await self._hypervisor.resume(box.vm)
        box.mark(Mark.HELD)
        await self._tell(box, "hold")

    async def wake(self, box: MachineBox) -> None:
        """Bring one that sleeps back. Until it is there whole, and stands still, it sleeps on. Raises Conflict if its
        memory cannot be used; it sleeps on then too."""
        await self._hypervisor.kill(box.vm)  # what somebody has begun
        try:
            started = memory.read(box.asleep, box.id).started
            await memory.bring_back(self._hypervisor, box.vm, started.machine, started.limits, box.asleep)
        except (Conflict, CreateFailed, FileNotFoundError) as error:
            await self._hypervisor.kill(box.vm)
            raise Conflict(f"box {box.id} cannot wake: {error}; {_ADVICE}") from error
        except BaseException:
            await self._hypervisor.kill(box.vm)
            raise
        box.mark(Mark.HELD)
        box.wake_up()
        await self.resume(box)
        await asyncio.to_thread(box.clear_memory)

    async def greet(self, box: MachineBox) -> None:
        """See that its agent answers; the stream is kept for whoever dials first."""
        stream = await box.vm.dial(AGENT_PORT, CONTROL_TIMEOUT_S)
        async with self._first_streams.first_client(box.id, stream, CONTROL_TIMEOUT_S):
            """It has answered."""

    async def shut_down(self, box: MachineBox) -> None:
        """Let it write out its data. One that does not listen is killed all the same, by the caller."""
        if not box.has(Mark.WHOLE) or not box.vm.is_running() or box.is_asleep():
            return
        try:
            await self.resume(box)
            await guest.call(box.vm, _CONTROL_S, "shutdown", {"grace_s": 0})
        except CallInterrupted:
            """It has ended before it could answer."""
        except SkerryError as error:
            _log.warning("box %s does not write out its files, and is killed: %s", box.id, error)
            return
        if not await box.vm.wait(_FREEZE_S):
            _log.warning("box %s is killed before it has written out its files, after %g s", box.id, _FREEZE_S)

    async def _pause(self, box: MachineBox) -> None:
        box.mark(Mark.PAUSED)
        await self._tell(box, "freeze")
        await self._hypervisor.pause(box.vm)

    async def _tell(self, box: MachineBox, method: str) -> None:
        try:
            await guest.call(box.vm, _FREEZE_S, method)
        except AgentError as error:
            raise ProviderError(f"box {box.id} does not write out its files: {error}; stop or destroy it") from error

    @contextlib.asynccontextmanager
    async def _resumed_if_it_fails(self, box: MachineBox) -> AsyncIterator[None]:
        """Resume it if the code within fails, whose error is the one that counts."""
        try:
            yield
        except BaseException:
            try:
                if not box.is_asleep():
                    await self.resume(box)
            except SkerryError as error:
                _log.warning("%s", error)
            raise


def _started(box: MachineBox) -> memory.Started:
    started = memory.read_started(box.started)
    if started is None:
        raise WrongState(f"box {box.id} was started by an older version: stop and start it first")
    return started
