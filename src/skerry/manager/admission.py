"""Admission: whether this host has memory for another box, seen before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skerry.errors import HostFull
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.units import format_size

_MEMORY = "/proc/meminfo"
_AVAILABLE = b"MemAvailable:"
_promised = 0
"""Bytes that boxes may take which this process is making: of them nothing is seen on the host yet."""


def free_memory() -> int | None:
    """Bytes that new processes of this host can have without swapping; None if it does not tell."""
    try:
        with open(_MEMORY, "rb") as file:
            for line in file:
                if line.startswith(_AVAILABLE):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


ReadMemory = Callable[[], int | None]


@contextmanager
def room_for(spec: Spec, provider: Provider, min_free: int, read: ReadMemory | None = None) -> Iterator[None]:
    """Keep room for a box while it is made: so much as it may take, beside `min_free` and what others take that are
    being made. Raises HostFull if there is not so much. Boxes of daemons on other hosts, and of clusters, need none of
    this one's, and theirs is not looked at; where this one tells nothing all are let in."""
    global _promised
    asked = spec.memory or 0
    if not min_free or not provider.takes_memory_here or (free := (read or free_memory)()) is None:
        yield
        return
    if free - _promised - asked < min_free:
        taken = f", {format_size(_promised)} of it for boxes that are being made" if _promised else ""
        wanted = f"the sandbox may take {format_size(asked)}, and " if asked else ""
        raise HostFull(
            f"the host has {format_size(free)} of memory free{taken}: {wanted}{format_size(min_free)} must stay free "
            "(min_free_memory); destroy some sandboxes, ask for less, or retry later"
        )
    _promised += asked
    try:
        yield
    finally:
        _promised -= asked
