"""The gate of this machine, as a server looks after it: it is there while the server is, and what it says is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from skerry import aio
from skerry.errors import SkerryError
from skerry.gate.journal import Pulse, log_again
from skerry.manager.manager import AsyncSandboxManager
from skerry.surfaces.server.metrics import Sample

_LOOK_S = 0.5
"""Seconds until a gate is seen that somebody else has started, and until one that died is started again."""
_RETRY_S = (_LOOK_S, 15.0)
_STEADY_S = 30.0
"""Seconds after which the death of a gate is not one of a row."""
_log = logging.getLogger("skerry.server")


class GateKeeper:
    """Starts the gate with the server, and again when it dies. A machine on which no sandbox ever had rules has none:
    the first that has starts it."""

    def __init__(self, manager: AsyncSandboxManager) -> None:
        self._manager = manager
        self._networks = manager.handles.networks
        self._pulse: Pulse | None = None
        self._starts = 0

    async def run(self) -> None:
        """Until cancelled: have a gate, and hear of it. In the end it stays if a sandbox needs it."""
        if not self._networks.is_shared:
            return
        gate, waits = self._networks.gate, aio.backoff(*_RETRY_S)
        try:
            while True:
                began = time.monotonic()
                try:
                    if gate.has_run():
                        await self._keep()
                except (SkerryError, OSError) as error:
                    _log.warning("the gate is not well: %s", error)
                finally:
                    self._pulse = None
                is_steady = time.monotonic() - began > _STEADY_S or not gate.has_run()
                waits = aio.backoff(*_RETRY_S) if is_steady else waits
                await asyncio.sleep(next(waits))
        finally:
            await aio.run_to_end(gate.retire())

    async def _keep(self) -> None:
        """Start the gate if there is none, and hear of it until it ends. Raises GateUnavailable or StoreError."""
        gate = self._networks.gate
        if not gate.is_running():
            await self._networks.ensure(await self._manager.list())  # which also offers it values of secrets
            await gate.ensure()
            self._starts += 1
        await gate.follow(self._told)
        why = "" if gate.is_running() else gate.last_error() or "it was killed, or told to end"
        _log.warning("the gate is gone, and starts again: %s", why or "it listens to nobody")

    def _told(self, pulse: Pulse) -> None:
        self._pulse = pulse
        log_again(pulse)

    def samples(self) -> Iterator[Sample]:
        """What metrics tell of it, where there is one or was."""
        if not self._networks.is_shared or not self._networks.gate.has_run():
            return
        pulse = self._pulse
        yield Sample("skerry_gate_up", "1 while the gate of this machine answers.", {}, pulse is not None)
        yield Sample("skerry_gate_starts_total", "Gates that this server had to start.", {}, self._starts, "counter")
        for name, help, value in (
            ("sandboxes", "Sandboxes with rules that the gate serves.", pulse and pulse.sandboxes),
            ("sandboxes_up", "Those whose network is up.", pulse and pulse.up),
            ("connections", "Connections of sandboxes through the gate.", pulse and pulse.connections),
        ):
            yield Sample(f"skerry_gate_{name}", help, {}, value or 0)
