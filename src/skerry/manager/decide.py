"""Verdicts: registry and host compared, one verdict for each sandbox, decided without touching anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from skerry.clock import Moment
from skerry.model.records import TEMPORARY, Cause, Owner, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxState, BoxStatus, Snapshot

INSTANCE_LABEL = "skerry.instance"
_CREATE_DEADLINE_S = 300.0
"""After this a create in another container of this machine, whose maker nobody here can see, is taken for dead."""
LATE_S = 5.0
"""Seconds that a box may outlive its lifetime: its agent ends it by a clock of its own. If it does not, we do."""
_EARLY_S = 1.0
"""A box that is gone so long before its lifetime was over ended for that: clocks differ."""


class Action(StrEnum):
    ADOPT = "adopt"
    """It is there again: ready."""
    FINISH = "finish"
    """Its create was cut short after the box was made: ready."""
    FOLLOW = "follow"
    """Somebody paused, stopped or started it by hand: so be it."""
    DESTROY = "destroy"
    """Remove what is left of it; volumes are kept."""
    LOST = "lost"
    """It is gone, and nobody asked for that."""
    REBUILD = "rebuild"
    """Its image is an older one than its name means now, and it was asked to make such ones anew; volumes are kept."""
    LEAVE = "leave"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    id: SandboxId
    provider: str
    action: Action
    why: str
    to: State | None = None
    cause: Cause | None = None
    outdated: bool = False
    """Its image is an older one than its name means now."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The present, as far as a verdict depends on it."""

    moment: Moment
    instance: str
    is_alive: Callable[[Owner], bool | None]
    me: Owner | None = None
    making: frozenset[SandboxId] = frozenset()
    """Sandboxes that this very process is making right now; all else that it once began is abandoned."""
    rebuild: bool = False
    """Whether what is outdated shall be made anew."""


Boxes = Mapping[SandboxId, BoxStatus]
FOLLOWED = {
    BoxState.RUNNING: State.READY,
    BoxState.PAUSED: State.PAUSED,
    BoxState.ASLEEP: State.ASLEEP,
    BoxState.STOPPED: State.STOPPED,
}


def decide(provider: str, records: Iterable[Record], boxes: Boxes | None, now: Now) -> list[Verdict]:
    """A verdict for every record of a provider and every box it holds. `boxes` is None if the provider does not answer:
    then nothing is known, and nothing is done. It must have been asked before the records were read: a record comes
    before its box, so a box without one is nobody's."""
    known = {record.id: record for record in records}
    verdicts = [_judge(record, boxes, now) for record in known.values() if record.is_live]
    if boxes is not None:
        verdicts += _judge_strays(provider, known, boxes, now)
    return verdicts


def _judge_strays(provider: str, known: Mapping[SandboxId, Record], boxes: Boxes, now: Now) -> Iterator[Verdict]:
    for id, box in boxes.items():
        record = known.get(id)
        if record is not None and record.is_live:
            continue
        label = box.labels.get(INSTANCE_LABEL)
        if record is not None and label in (None, now.instance):
            yield Verdict(id=id, provider=provider, action=Action.DESTROY, why="it was destroyed, and came after all")
        elif label == now.instance:
            yield Verdict(id=id, provider=provider, action=Action.DESTROY, why="it is ours, and nobody knows it")
        else:
            yield Verdict(id=id, provider=provider, action=Action.LEAVE, why="it is not of this registry")


def _judge(record: Record, boxes: Boxes | None, now: Now) -> Verdict:
    def verdict(action: Action, why: str, to: State | None = None, cause: Cause | None = None) -> Verdict:
        return Verdict(id=record.id, provider=record.spec.provider, action=action, why=why, to=to, cause=cause)

    if boxes is None:
        return verdict(Action.LEAVE, "the provider does not answer, so nothing is known")
    box = _seen(record, boxes.get(record.id))
    if record.doomed:
        return verdict(Action.DESTROY, "its removal was cut short", State.DESTROYED, record.cause or Cause.USER)
    if record.state is State.CREATING and record.remaker is None:
        return _judge_creating(record, box, now, verdict)
    if record.remaker is not None and record.state is not State.LOST and _is_at_it(record.remaker, record, now):
        return verdict(Action.LEAVE, "it is being made anew")
    if record.ephemeral and now.is_alive(record.owner) is False:
        return verdict(Action.DESTROY, "the program it belonged to is gone", State.DESTROYED, Cause.OWNER_DIED)
    if record.remaker is not None and (record.state is not State.LOST or box is not None):
        return _judge_unmade(record, box, now, verdict)
    if box is None and now.is_alive(record.owner) is None and not record.is_over(now.moment, LATE_S):
        return verdict(Action.LEAVE, "it was made on another machine, whose boxes may not be seen from here")
    if box is None or box.state is BoxState.DEAD:
        return _judge_gone(record, box, now, verdict)
    return _judge_there(record, box, now, verdict)


def _seen(record: Record, box: BoxStatus | None) -> BoxStatus | None:
    """Files without a box are of no use but to whoever asks for them: a sandbox that has no more is lost, and they stay
    until it is destroyed. What was only being made never was one."""
    if box is None or box.state is not BoxState.REMAINS:
        return box
    was_one = not record.doomed and record.remaker is None and record.state is not State.CREATING
    return None if was_one else msgspec.structs.replace(box, state=BoxState.DEAD)


def _judge_there(record: Record, box: BoxStatus, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    # Whoever runs in a box may talk its agent out of ending it, so that is not left to the agent alone.
    if record.is_over(now.moment, LATE_S if box.state is BoxState.RUNNING else 0.0):
        why = f"its lifetime was over while it was {box.state}"
        return verdict(Action.DESTROY, why, State.DESTROYED, Cause.LIFETIME)
    to = FOLLOWED[box.state]
    if to is record.state is State.READY and box.outdated:
        return _judge_outdated(record, now)
    if to is record.state:
        return verdict(Action.LEAVE, f"it is {record.state}")
    if record.state is State.LOST:
        return verdict(Action.ADOPT, "it is there again", to)
    return verdict(Action.FOLLOW, f"the host says that it is {box.state}", to)


def _judge_creating(record: Record, box: BoxStatus | None, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    if _is_at_it(record.owner, record, now):
        return verdict(Action.LEAVE, "it is being made")
    spec = record.spec
    has_more = spec.env or spec.workspace or spec.snapshot or spec.ports  # which come after the box
    is_whole = box is not None and box.state is BoxState.RUNNING and not has_more
    is_wanted = record.key is not None and not record.ephemeral and not record.is_over(now.moment, LATE_S)
    if is_wanted and is_whole:
        return verdict(Action.FINISH, "its maker died after it was made, and may ask again by its key", State.READY)
    return verdict(Action.DESTROY, "its maker died while making it", State.DESTROYED, Cause.CREATION_FAILED)


def _judge_unmade(record: Record, box: BoxStatus | None, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    """Whoever made it anew came to no end. A box that was begun may not be whole; the one before it was."""
    if _has_ended(record, now):
        return verdict(Action.DESTROY, "its lifetime is over", State.DESTROYED, Cause.LIFETIME)
    was_begun = record.state in (State.CREATING, State.LOST)
    if not was_begun and box is not None and box.state is not BoxState.DEAD:
        return verdict(Action.ADOPT, "whoever wanted to make it anew did not come to it", FOLLOWED[box.state])
    return verdict(Action.LOST, "its maker died while making it anew", State.LOST, Cause.CREATION_FAILED)


def _judge_outdated(record: Record, now: Now) -> Verdict:
    action, to = (Action.REBUILD, State.READY) if now.rebuild else (Action.LEAVE, None)
    why = f"its image {record.spec.image} has changed since" if record.spec.image else "its image has changed since"
    return Verdict(id=record.id, provider=record.spec.provider, action=action, why=why, to=to, outdated=True)


def _is_at_it(maker: Owner, record: Record, now: Now) -> bool:
    """Whether whoever makes it still does, as far as can be known. What another machine makes is left to that."""
    alive = False if maker == now.me and record.id not in now.making else now.is_alive(maker)
    age_s = record.age_s(now.moment)
    return bool(alive) or (alive is None and (age_s is None or age_s < _CREATE_DEADLINE_S))


def _judge_gone(record: Record, box: BoxStatus | None, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    cause = Cause.OUT_OF_MEMORY if box is not None and box.out_of_memory else cause_of_end(record, now)
    is_over = cause is Cause.LIFETIME or (cause is Cause.IDLE and record.remaker is None)
    if record.state is State.LOST:
        if box is None and not is_over:
            if record.remaker is not None and now.rebuild:
                return verdict(Action.REBUILD, "it was begun to be made anew", State.READY)
            return verdict(Action.LEAVE, "it is still lost")
        cause = record.cause or cause
    if box is not None or is_over:
        return verdict(Action.DESTROY, f"it ended by itself: {cause}", State.DESTROYED, cause)
    return verdict(Action.LOST, f"its box is gone: {cause}", State.LOST, cause)


def cause_of_end(record: Record, now: Now) -> Cause:
    """The most likely reason why a box ended that nobody ended."""
    if _has_ended(record, now):
        return Cause.LIFETIME
    if record.boot_id and record.boot_id != now.moment.boot:
        return Cause.HOST_RESTARTED
    age_s = record.age_s(now.moment)
    if record.spec.idle_s and age_s is not None and age_s >= record.spec.idle_s:
        return Cause.IDLE
    return Cause.BOX_DIED


def _has_ended(record: Record, now: Now) -> bool:
    """Whether its agent may have ended it by now, for its lifetime."""
    return record.is_over(now.moment, -_EARLY_S - (record.end.early_s if record.end is not None else 0.0))


def leftovers(snapshots: Iterable[Snapshot], records: Iterable[Record]) -> list[str]:
    """The names of the snapshots that a fork of ours was made from which is no longer there, or never was."""
    known = {record.id: record for record in records}
    temporary = [each for each in snapshots if each.name.startswith(TEMPORARY)]
    return [each.name for each in temporary if _is_left(SandboxId(each.name.removeprefix(TEMPORARY)), each, known)]


def _is_left(fork: SandboxId, snapshot: Snapshot, known: Mapping[SandboxId, Record]) -> bool:
    if fork in known:
        return not known[fork].is_live
    return snapshot.sandbox in known  # the fork's record is forgotten, or it is of another installation
