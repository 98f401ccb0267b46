"""Admission: a box is made or started when this host has room for it; until then that waits in line, for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from skerry.config import Config
from skerry.errors import HostFull
from skerry.host import room
from skerry.host.room import Room
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.units import format_size

T = TypeVar("T")
_log = logging.getLogger("skerry.manager")
Look = Callable[..., Room]
"""`skerry.host.room.look`."""

_ROOM_WAIT_S = (0.02, 0.25)
"""First and longest wait between two looks for room."""
_SLOT_WAIT_S = (0.005, 0.025)
"""The same for a free place to boot."""
_MIN_INODES = 1000
_LITTLE = 10
"""Part of the memory from which on what is free is little. While there is more, pressure comes from boxes at their own
limits, who are not to keep others out."""
_making = 0
"""Bytes that boxes may take which this process is making: of them nothing is seen on the host yet."""


class HostRoom(Room, frozen=True, kw_only=True):
    """What this host has left for boxes, and what it was told to keep."""

    memory_promised_bytes: int = 0
    """The most that the sandboxes of this host may take together."""
    memory_promisable_bytes: int | None = None
    """The most that they may be promised; None is any amount."""
    overcommit: float = 0.0
    min_free_memory: int = 0
    min_free_disk: int = 0
    max_cpu_pressure: float = 0.0
    max_memory_pressure: float = 0.0
    wait_s: float = 0.0
    waiting: int = 0
    """Creates that wait for room, of the process that tells this."""
    short: str = ""
    """Why no box would be made now, however small; empty if one would."""

    def __str__(self) -> str:
        """One line of it for people."""
        total, free = self.memory_bytes, self.memory_free_bytes
        parts = [f"{_size(free)} of {_size(total)} memory free, {format_size(self.memory_promised_bytes)} promised"]
        most = self.memory_promisable_bytes
        parts[0] += " of any amount" if most is None else f" of {format_size(most)} (overcommit {self.overcommit:g})"
        if self.cpu_pressure is not None and self.memory_pressure is not None:
            parts.append(f"pressure: cpu {self.cpu_pressure:.0f}%, memory {self.memory_pressure:.0f}%")
        parts.append(f"{_size(self.disk_free_bytes)} of disk free")
        return "; ".join([*parts, *([f"{self.waiting} creates wait"] if self.waiting else ())])


class Line:
    """Creates of this process that wait for the same thing, first come, first served. Only the first of them looks
    whether it is there: when something has ended here, and every now and then for what others end."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.waiting = 0
        self._waits_s = first_s, longest_s
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    def look_again(self) -> None:
        """Have the first look at once."""
        self._ended.set()

    async def get(self, attempt: Callable[[], Awaitable[T]], until: float | None = None) -> T:
        """What `attempt` gives as soon as it does not raise HostFull; what it raises then, when it is `until` by the
        loop's clock. An attempt itself is never cut short but by the caller's end."""
        if not self.waiting:
            try:
                return await attempt()
            except HostFull as error:
                if _is_over(until):
                    raise
                _log.info("a sandbox waits: %s", error)
        self.waiting += 1
        try:
            return await self.in_turn(attempt, until)
        finally:
            self.waiting -= 1

    async def in_turn(self, attempt: Callable[[], Awaitable[T]], until: float | None = None) -> T:
        """The same, for what is best attempted by one at a time."""
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            return await attempt()
        try:
            wait_s, longest_s = self._waits_s
            while True:
                self._ended.clear()
                try:
                    return await attempt()
                except HostFull:
                    if _is_over(until):
                        raise
                next_look = asyncio.get_running_loop().time() + wait_s
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_look if until is None else min(next_look, until)):
                        await self._ended.wait()
                wait_s = min(2 * wait_s, longest_s)
        finally:
            self._turn.release()


class Admission:
    """What creates of this process wait for: room on the host, and a place among those that boot."""

    def __init__(self, look: Look = room.look) -> None:
        self._look = look
        self._room, self._slots = Line(*_ROOM_WAIT_S), Line(*_SLOT_WAIT_S)

    def ended(self) -> None:
        """Say that something has ended here: perhaps there is room now for one that waits."""
        self._room.look_again()
        self._slots.look_again()

    def promisable(self, config: Config) -> int:
        """The most memory that sandboxes of this host may be promised together; 0 is any amount."""
        return promisable(self.look(config), config) if config.admission.overcommit else 0

    async def reserved(self, reserve: Callable[[], Awaitable[T]], until: float) -> T:
        """A place in the registry, as soon as it promises no more memory than it may. Raises HostFull."""
        return await self._room.get(reserve, until)

    async def slot(self, take: Callable[[], Awaitable[bool]]) -> None:
        """Wait until there is a place among those that boot, over all programs."""

        async def attempt() -> None:
            if not await take():
                raise HostFull("as many boot as may")

        await self._slots.in_turn(attempt)

    @asynccontextmanager
    async def room_for(self, spec: Spec, provider: Provider, config: Config, until: float) -> AsyncIterator[None]:
        """Keep room for a box while it is made, once there is any: so much memory as it may take, beside what must
        stay free and what others take that are being made. Raises HostFull if there is none in time. Boxes of daemons
        on other hosts, and of clusters, need none of this one's, which is not looked at; what it does not tell is no
        reason to refuse."""
        asked = spec.memory or 0

        async def enter() -> None:
            global _making
            if why := shortage(self.look(config), config, asked, _making):
                raise HostFull(f"{why}, or retry later")
            _making += asked

        if not provider.takes_memory_here:
            yield
            return
        await self._room.get(enter, until)
        try:
            yield
        finally:
            _end_making(asked)

    def describe(self, config: Config, promised: int) -> HostRoom:
        """What this host has left for boxes, whose sandboxes were promised so much of its memory."""
        return msgspec.structs.replace(describe(config, promised, self._look), waiting=self._room.waiting)

    def look(self, config: Config) -> Room:
        """What the host has left of that which is bounded."""
        bounds = config.admission
        return self._look(config.state_dir, cpu=bounds.max_cpu_pressure > 0, memory=bounds.max_memory_pressure > 0)


def shortage(found: Room, config: Config, asked: int = 0, making: int = 0) -> str:
    """Why no box that may take `asked` can be made beside those that are being made, which may take `making`; empty if
    one can."""
    bounds, free = config.admission, found.memory_free_bytes
    if config.min_free_memory and free is not None and free - making - asked < config.min_free_memory:
        taken = f", {format_size(making)} of it for boxes that are being made" if making else ""
        wanted = f"the sandbox may take {format_size(asked)}, and " if asked else ""
        least = f"{wanted}{format_size(config.min_free_memory)} must stay free (min_free_memory)"
        return f"the host has {format_size(free)} of memory free{taken}: {least}; destroy some sandboxes, ask for less"
    if 0 < bounds.max_memory_pressure < (found.memory_pressure or 0.0) and _is_little(found):
        return (
            f"the host stood still for want of memory in {found.memory_pressure:g}% of the last 10 s, and has "
            f"{format_size(free or 0)} free: more than {bounds.max_memory_pressure:g}% is too much "
            "(admission.max_memory_pressure); destroy some sandboxes"
        )
    if 0 < bounds.max_cpu_pressure < (found.cpu_pressure or 0.0):
        return (
            f"something waited for a processor of the host in {found.cpu_pressure:g}% of the last 10 s: more than "
            f"{bounds.max_cpu_pressure:g}% is too much (admission.max_cpu_pressure); destroy some sandboxes"
        )
    return _shortage_of_disk(found, config) if bounds.min_free_disk else ""


def describe(config: Config, promised: int, look: Look = room.look) -> HostRoom:
    """What this host has left for boxes, and by what they are bounded."""
    found, bounds = look(config.state_dir), config.admission
    return HostRoom(
        **msgspec.structs.asdict(found),
        memory_promised_bytes=promised,
        memory_promisable_bytes=promisable(found, config) or None,
        min_free_memory=config.min_free_memory,
        short=shortage(found, config),
        **msgspec.structs.asdict(bounds),
    )


def promisable(found: Room, config: Config) -> int:
    """The most memory that sandboxes of this host may be promised together; 0 is any amount."""
    return int((found.memory_bytes or 0) * config.admission.overcommit)


def _shortage_of_disk(found: Room, config: Config) -> str:
    least, where = config.admission.min_free_disk, f"the disk of {config.state_dir}"
    advice = "must stay free (admission.min_free_disk); remove what fills it"
    if found.disk_free_bytes is not None and found.disk_free_bytes < least:
        return f"{where} has {format_size(found.disk_free_bytes)} free: {format_size(least)} {advice}"
    if found.inodes_free is not None and found.inodes_free < _MIN_INODES:
        return f"{where} has {found.inodes_free} inodes free: {_MIN_INODES} {advice}"
    return ""


def _is_little(found: Room) -> bool:
    free, all_of_it = found.memory_free_bytes, found.memory_bytes
    return free is not None and all_of_it is not None and free * _LITTLE < all_of_it


def _size(count: int | None) -> str:
    return "?" if count is None else format_size(count)


def _end_making(asked: int) -> None:
    global _making
    _making -= asked


def _is_over(until: float | None) -> bool:
    return until is not None and asyncio.get_running_loop().time() >= until
