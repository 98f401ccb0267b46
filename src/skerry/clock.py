"""The clock by which things end: seconds since this host was started, its sleep included.

Nobody sets it, and all processes of a host read the same. The wall clock jumps, by a second or by years: it is for
people, and nothing is decided by it.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path

import msgspec

from skerry import mac

_CLOCK = time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME
"""On a Mac the monotonic one counts sleep too."""


class Moment(msgspec.Struct, frozen=True):
    """A moment on one host, in one of its boots."""

    machine: str
    boot: str
    at: float
    """Seconds since that boot."""

    def __str__(self) -> str:
        return f"{self.machine}/{self.boot}/{self.at:.3f}"

    @classmethod
    def parse(cls, text: str) -> Moment | None:
        """The moment that `str` wrote; None if the text is no moment."""
        try:
            machine, boot, at = text.split("/")
            return cls(machine, boot, float(at))
        except ValueError:
            return None

    def age_s(self, now: Moment) -> float | None:
        """Seconds since then; at least so many, if the host was started again since; None if it was on another
        machine, whose clock means nothing here."""
        if self.boot == now.boot:
            return now.at - self.at
        return now.at if self.machine == now.machine else None


class End(msgspec.Struct, frozen=True):
    """End of the time of something, as the rest of it when that was noted last."""

    noted: Moment
    left_s: float
    early_s: float = 0.0
    """Seconds by which the agent may end it sooner: it counts from its own start, which nobody else knows so well."""

    def left_at(self, now: Moment) -> float | None:
        """Seconds that are left, below zero when it is over; None if another machine counts it. Of a restart nobody
        knows how long it took, so what was noted last counts on from where the host is seen again: nothing ends too
        soon."""
        if self.noted.boot == now.boot:
            return self.left_s - (now.at - self.noted.at)
        return self.left_s if self.noted.machine == now.machine else None

    def noted_at(self, now: Moment) -> End:
        """The same end, noted now; another machine's is left as it is."""
        left_s = self.left_at(now)
        return self if left_s is None else End(now, left_s, self.early_s)


def now() -> Moment:
    return Moment(machine_id(), boot_id(), time.clock_gettime(_CLOCK))


@cache
def machine_id() -> str:
    return _read("/etc/machine-id")


@cache
def boot_id() -> str:
    return mac.boot_id() if sys.platform == "darwin" else _read("/proc/sys/kernel/random/boot_id")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
