"""What happens to a fleet while something is done with it, told as it happens and written to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

log = logging.getLogger("skerry.fleet")
log.addHandler(logging.NullHandler())  # silent for whoever set up no logging


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """One step of a phase."""

    phase: str


class PhaseStarted(FleetEvent, frozen=True):
    """All that it waits for is ready."""

    total: int


class MemberCreating(FleetEvent, frozen=True):
    member: str


class MemberReady(FleetEvent, frozen=True):
    """Its agent answers, and files, setup and healthcheck are done."""

    member: str
    id: str
    duration_s: float
    kept: bool = False
    """It was there already, as it should be."""


class MemberFailed(FleetEvent, frozen=True):
    member: str
    error: str


class MemberDestroyed(FleetEvent, frozen=True):
    member: str
    why: str


class PhaseReady(FleetEvent, frozen=True):
    ready: int
    total: int
    duration_s: float


class PhaseFailed(FleetEvent, frozen=True):
    """It is not whole; `state` tells how far it came, as in the report."""

    state: str
    ready: int
    total: int
    duration_s: float
    error: str


OnEvent = Callable[[FleetEvent], object]


class Teller:
    """Tells each event to the log and to whoever listens; a listener that fails does not hold up a fleet."""

    def __init__(self, fleet: str, on_event: OnEvent | None = None) -> None:
        self._fleet = fleet
        self._on_event = on_event

    def tell(self, event: FleetEvent) -> None:
        failed = isinstance(event, MemberFailed | PhaseFailed)
        log.log(logging.WARNING if failed else logging.INFO, "fleet %s: %s", self._fleet, _words(event))
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # what it does is not ours
            log.exception("fleet %s: whoever listens to its events failed", self._fleet)


def _words(event: FleetEvent) -> str:
    match event:
        case PhaseStarted():
            return f"phase {event.phase} starts, {event.total} members"
        case MemberCreating():
            return f"{event.member} is creating"
        case MemberReady():
            how = "was ready already" if event.kept else f"is ready after {event.duration_s:.3f} s"
            return f"{event.member} {how} ({event.id})"
        case MemberFailed():
            return f"{event.member} failed: {event.error}"
        case MemberDestroyed():
            return f"{event.member} is destroyed: {event.why}"
        case PhaseReady():
            return f"phase {event.phase} is ready after {event.duration_s:.3f} s, {event.ready}/{event.total}"
        case PhaseFailed():
            done = f"{event.ready}/{event.total} ready after {event.duration_s:.3f} s"
            return f"phase {event.phase} {event.state}, {done}: {event.error}"
        case _:
            return repr(event)
