"""Events of a fleet, told to a listener and to the log as they happen, and the report at the end of a start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

import msgspec

_log = logging.getLogger("skerry.fleet")
_log.addHandler(logging.NullHandler())  # silent for whoever set up no logging


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """One step of a phase."""

    _LINE: ClassVar[str]
    """Its line in the log."""
    phase: str

    @property
    def line(self) -> str:
        """It in words."""
        return self._LINE.format(self)


class PhaseStarted(FleetEvent, frozen=True):
    """All that it waits for is ready."""

    _LINE = "phase {0.phase} starts, {0.total} members"
    total: int


class MemberCreating(FleetEvent, frozen=True):
    _LINE = "{0.member} is creating"
    member: str


class MemberReady(FleetEvent, frozen=True):
    """Its agent answers, and files, setup and healthcheck are done."""

    _LINE = "{0.member} is ready after {0.duration_s:.3f} s ({0.id})"
    member: str
    id: str
    duration_s: float
    kept: bool = False
    """It was there already, as it should be."""

    @property
    def line(self) -> str:
        return f"{self.member} was ready already ({self.id})" if self.kept else super().line


class MemberFailed(FleetEvent, frozen=True):
    _LINE = "{0.member} failed: {0.error}"
    member: str
    error: str


class MemberDestroyed(FleetEvent, frozen=True):
    _LINE = "{0.member} is destroyed: {0.why}"
    member: str
    why: str


class PhaseReady(FleetEvent, frozen=True):
    _LINE = "phase {0.phase} is ready after {0.duration_s:.3f} s, {0.ready}/{0.total}"
    ready: int
    total: int
    duration_s: float


class PhaseFailed(FleetEvent, frozen=True):
    """It is not whole; `state` tells how far it came, as in the report."""

    _LINE = "phase {0.phase} {0.state}, {0.ready}/{0.total} ready after {0.duration_s:.3f} s: {0.error}"
    state: str
    ready: int
    total: int
    duration_s: float
    error: str


OnEvent = Callable[[FleetEvent], object]


class Notifier(msgspec.Struct):
    """Notifies the log and a listener of each event; a listener that fails does not hold up a fleet."""

    _fleet: str
    _on_event: OnEvent | None = None

    def notify(self, event: FleetEvent) -> None:
        failed = isinstance(event, MemberFailed | PhaseFailed)
        _log.log(logging.WARNING if failed else logging.INFO, "fleet %s: %s", self._fleet, event.line)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # what it does is not ours
            _log.exception("fleet %s: whoever listens to its events failed", self._fleet)


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
    """Outcome of one phase."""

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
    """Outcome of a start, phase by phase."""

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
