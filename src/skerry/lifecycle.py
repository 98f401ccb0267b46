"""States and the one table of their transitions; create-or-nothing; refusal of what cannot be honoured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from skerry.errors import Conflict, SkerryError, Unsupported, WrongState
from skerry.providers.base import OPTIONAL_FIELDS, Capability, Enforcement, Provider
from skerry.spec import SandboxId, Spec

T = TypeVar("T")
_LEFT = "and what was begun could not be removed"


class State(StrEnum):
    CREATING = "creating"
    READY = "ready"
    PAUSED = "paused"
    STOPPED = "stopped"
    ERROR = "error"
    """The box failed; what is left of it can only be destroyed."""
    LOST = "lost"
    """The box is gone or out of sight; it may be adopted again."""
    DESTROYED = "destroyed"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.CREATING: frozenset({State.READY, State.ERROR, State.LOST, State.DESTROYED}),
    State.READY: frozenset({State.CREATING, State.PAUSED, State.STOPPED, State.ERROR, State.LOST, State.DESTROYED}),
    State.PAUSED: frozenset({State.CREATING, State.READY, State.STOPPED, State.ERROR, State.LOST, State.DESTROYED}),
    State.STOPPED: frozenset({State.CREATING, State.READY, State.PAUSED, State.ERROR, State.LOST, State.DESTROYED}),
    State.ERROR: frozenset({State.LOST, State.DESTROYED}),
    State.LOST: frozenset({State.CREATING, State.READY, State.PAUSED, State.STOPPED, State.ERROR, State.DESTROYED}),
    State.DESTROYED: frozenset(),
}
"""Back to `creating` leads only a box that is made anew under its id."""

_WAYS_ON: Mapping[State, str] = {
    State.CREATING: "wait until it is ready",
    State.PAUSED: "unpause it",
    State.STOPPED: "start it",
    State.ERROR: "destroy it",
    State.LOST: "reconcile, or destroy it",
}


def move(current: State, to: State) -> State:
    """`to`, if the table allows it. Staying where one is, is always allowed."""
    if to is not current and to not in TRANSITIONS[current]:
        raise WrongState(f"a sandbox that is {current} cannot become {to}")
    return to


def unusable(state: State) -> str:
    """Why nothing runs in a sandbox of that state, and what to do."""
    way_on = _WAYS_ON.get(state)
    return f"it is {state}: {way_on}" if way_on else f"it is {state}"


def able(provider: Provider, capability: Capability) -> Any:
    """The provider as one that has the verbs of a capability; raises if it has not."""
    if capability not in provider.capabilities:
        raise Unsupported(capability.value, provider.name, f"it has no {capability}; choose another provider")
    return provider


def refuse_unenforced(provider: Provider, spec: Spec, enforced: Mapping[str, Enforcement]) -> None:
    """Raise for the first limit that was asked for and that this host cannot hold."""
    for field in spec.asked():
        enforcement = enforced.get(field)
        if enforcement is not None and not enforcement.by:
            raise Unsupported(field, provider.name, enforcement.why_not)


def refuse_unknown(provider: Provider, spec: Spec) -> None:
    """Raise for the first optional field that was asked for and that this provider does not know."""
    for field in sorted(spec.asked() & (OPTIONAL_FIELDS - provider.honours)):
        raise Unsupported(field, provider.name, "it has no such thing; leave it out, or choose another provider")


async def admit(provider: Provider, spec: Spec) -> Mapping[str, Enforcement]:
    """How each limit of the spec will be held; raises, before anything exists, for what cannot be."""
    refuse_unknown(provider, spec)
    enforced = await provider.enforcement(spec)
    refuse_unenforced(provider, spec, enforced)
    return enforced


async def create_or_nothing(provider: Provider, id: SandboxId, spec: Spec, *, keep_volumes: bool = False) -> None:
    """Create the box, or leave nothing of it behind, whatever happens: failure, cancellation.

    A cancelled create is first awaited to its end, since many engines go on creating, and then destroyed. The data of
    a name was perhaps there before, so only what has no name goes with the box.
    """
    volumes = spec.name is None and not keep_volumes
    creating = asyncio.ensure_future(provider.create(id, spec))
    try:
        await asyncio.shield(creating)
    except BaseException as error:
        try:
            await run_to_end(_undo(provider, id, creating, volumes))
        except (SkerryError, OSError) as failure:
            error.add_note(f"{_LEFT}: {failure}")
        raise


def is_left(error: BaseException) -> bool:
    """Whether a create that failed may have left something behind, since it could not be undone."""
    return any(note.startswith(_LEFT) for note in getattr(error, "__notes__", ()))


async def _undo(provider: Provider, id: SandboxId, creating: asyncio.Future[None], volumes: bool) -> None:
    await asyncio.wait([creating])
    if not creating.cancelled() and isinstance(creating.exception(), Conflict):
        return  # the id is another box's: there is nothing of ours, and that one is not ours to destroy
    await provider.destroy(id, volumes=volumes)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if we are cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
