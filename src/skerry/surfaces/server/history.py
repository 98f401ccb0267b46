"""Metrics over time: what live sandboxes used in the last half hour, as long as somebody looks.

Boxes are asked only while somebody has asked for their history within the last minutes, and by a call that only looks:
one that is idle stays so, and ends by its idle time as if nobody had looked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from skerry.aio import end
from skerry.errors import SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter, Record
from skerry.model.results import Metrics
from skerry.model.spec import SandboxId
from skerry.model.states import State

_log = logging.getLogger("skerry.server")
EVERY_S = 5.0
_KEPT = 360
"""Samples of one sandbox: half an hour."""
_ASKED_S = 180.0
"""How long after the last question samples are taken."""
_ANSWER_S = 3.0
_AT_ONCE = 16
_MOST = 2000
"""Sandboxes of which samples are kept."""
_SKIPPED = 6
"""Rounds in which one that did not answer is not asked."""
_COLUMNS = 6
_READY = Filter(states=frozenset({State.READY}))


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a sandbox, the oldest first: one list for each measure, all of the same length."""

    id: str
    every_s: float = EVERY_S
    """Seconds between two samples, where none is missing."""
    time: list[float]
    """Seconds since 1970."""
    cpu_percent: list[float]
    memory_bytes: list[float]
    disk_bytes: list[float]
    processes: list[float]
    load: list[float]


class Ring:
    """The newest samples of a sandbox, in little room."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, now: float, metrics: Metrics) -> None:
        self._values.extend(
            (now, metrics.cpu_percent, metrics.memory_bytes, metrics.disk.used, metrics.processes, metrics.load)
        )
        if len(self._values) >= 2 * _KEPT * _COLUMNS:  # seldom, and then half of it
            del self._values[: -_KEPT * _COLUMNS]

    def view(self, id: str, since: float, points: int) -> HistoryView:
        times = self._values[::_COLUMNS]
        begin = max(0, len(times) - min(points, _KEPT))
        while begin < len(times) and times[begin] <= since:
            begin += 1
        columns = [self._values[begin * _COLUMNS + column :: _COLUMNS].tolist() for column in range(_COLUMNS)]
        time, cpu, memory, disk, processes, load = columns
        return HistoryView(
            id=id, time=time, cpu_percent=cpu, memory_bytes=memory, disk_bytes=disk, processes=processes, load=load
        )


class History:
    """Samples of the sandboxes that somebody asks for."""

    def __init__(self, manager: AsyncSandboxManager) -> None:
        self._manager = manager
        self._rings: dict[SandboxId, Ring] = {}
        self._asked: dict[SandboxId, float] = {}
        """Until when each is sampled."""
        self._silent: dict[SandboxId, int] = {}
        self._sampler: asyncio.Task[None] | None = None
        self._is_new = asyncio.Event()

    def of(self, records: Iterable[Record], *, since: float = 0.0, points: int = _KEPT) -> list[HistoryView]:
        """What is known of these, which are sampled from now on for a while; of one that is new, nothing yet."""
        until = time.monotonic() + _ASKED_S
        found = []
        for record in records:
            if record.state is State.READY and (record.id in self._asked or len(self._asked) < _MOST):
                if record.id not in self._asked:
                    self._is_new.set()
                self._asked[record.id] = until
            found.append(self._rings.get(record.id, _EMPTY).view(record.id, since, points))
        if self._asked and (self._sampler is None or self._sampler.done()):
            self._sampler = asyncio.create_task(self._run(), name="skerry-history")
        return found

    async def aclose(self) -> None:
        if self._sampler is not None:
            await end(self._sampler)

    async def _run(self) -> None:
        """Sample until nobody asks any more; then all is forgotten."""
        while self._asked:
            began = time.monotonic()
            self._is_new.clear()
            try:
                await self._sample()
            except SkerryError as error:
                _log.debug("no samples are taken: %s", error)
            try:
                async with asyncio.timeout(max(0.1, EVERY_S - (time.monotonic() - began))):
                    await self._is_new.wait()  # whoever looks at a new one need not wait for its first sample
            except TimeoutError:
                continue
        self._rings.clear()
        self._silent.clear()

    async def _sample(self) -> None:
        """Ask each sandbox that is ready once; forget the others, and those that nobody asks for."""
        now = time.monotonic()
        ready = {record.id for record in await self._manager.list(_READY)}
        for id in [id for id, until in self._asked.items() if until < now or id not in ready]:
            self._asked.pop(id)
            self._rings.pop(id, None)
            self._silent.pop(id, None)
        room = asyncio.Semaphore(_AT_ONCE)

        async def measure(id: SandboxId) -> None:
            async with room:
                await self._measure(id)

        async with asyncio.TaskGroup() as group:
            for id in self._due():
                group.create_task(measure(id))

    def _due(self) -> Sequence[SandboxId]:
        """Those to be asked in this round: one that was silent is left alone for some."""
        due = []
        for id in self._asked:
            if self._silent.get(id, 0) > 0:
                self._silent[id] -= 1
            else:
                due.append(id)
        return due

    async def _measure(self, id: SandboxId) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                metrics = await (await self._manager.get(id)).metrics()
        except (SkerryError, TimeoutError) as error:
            _log.debug("sandbox %s is not sampled: %s", id, error)
            self._silent[id] = _SKIPPED
            return
        self._rings.setdefault(id, Ring()).add(time.time(), metrics)


_EMPTY = Ring()
