"""States of a sandbox and the one table of their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from skerry.errors import WrongState


class State(StrEnum):
    CREATING = "creating"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    """Its memory is in files, and nothing of it runs."""
    STOPPED = "stopped"
    LOST = "lost"
    """The box is gone or out of sight; it may be adopted again."""
    DESTROYED = "destroyed"

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        """Read `error`, which older versions had in their table, as what it meant."""
        return cls.LOST if value == "error" else None


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.CREATING: frozenset({State.READY, State.LOST, State.DESTROYED}),
    State.READY: frozenset({State.CREATING, State.PAUSED, State.ASLEEP, State.STOPPED, State.LOST, State.DESTROYED}),
    State.PAUSED: frozenset({State.CREATING, State.READY, State.ASLEEP, State.STOPPED, State.LOST, State.DESTROYED}),
    State.ASLEEP: frozenset({State.CREATING, State.READY, State.PAUSED, State.STOPPED, State.LOST, State.DESTROYED}),
    State.STOPPED: frozenset({State.CREATING, State.READY, State.PAUSED, State.ASLEEP, State.LOST, State.DESTROYED}),
    State.LOST: frozenset({State.CREATING, State.READY, State.PAUSED, State.ASLEEP, State.STOPPED, State.DESTROYED}),
    State.DESTROYED: frozenset(),
}
"""Back to `creating` leads only a box that is made anew under its id."""

_WAYS_ON: Mapping[State, str] = {
    State.CREATING: "wait until it is ready",
    State.PAUSED: "unpause it",
    State.ASLEEP: "unpause it",
    State.STOPPED: "start it",
    State.LOST: "reconcile, or destroy it",
}


def move(current: State, to: State) -> State:
    """`to`, if the table allows it. Staying where one is, is always allowed."""
    if to is not current and to not in TRANSITIONS[current]:
        raise WrongState(f"a sandbox that is {current} cannot become {to}")
    return to


def unusable(state: State) -> str:
    """The reason why nothing runs in a sandbox of that state, and the way on."""
    way_on = _WAYS_ON.get(state)
    return f"it is {state}: {way_on}" if way_on else f"it is {state}"
