"""What came of starting a fleet, phase by phase."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PhaseState(StrEnum):
    READY = "ready"
    EMPTY = "empty"
    """It has no members, so there was nothing to wait for."""
    PARTIAL = "partial"
    """Some failed, and the phase goes on without them."""
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"
    """What it waits for did not get ready, or the fleet's time was over before its turn."""
    STOPPED = "stopped"
    """Somebody stopped it while it started."""


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True):
    state: PhaseState
    total: int
    ready: int = 0
    """How many are there now."""
    came_up: tuple[str, ...] = ()
    """Who got ready, also those that were taken back because the phase failed."""
    duration_s: float = 0.0
    errors: dict[str, str] = {}
    """By member, and by phase name what holds for all of it."""

    @property
    def ok(self) -> bool:
        return self.state in (PhaseState.READY, PhaseState.EMPTY)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    fleet: str
    phases: dict[str, PhaseReport]
    duration_s: float
    destroyed: tuple[str, ...] = ()
    """Members that were too many, or of phases that are gone."""
    errors: dict[str, str] = {}
    """By member: which of those could not be destroyed."""

    @property
    def ok(self) -> bool:
        return not self.errors and all(phase.ok for phase in self.phases.values())
