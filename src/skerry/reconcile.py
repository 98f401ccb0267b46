"""What the store says against what the host holds: one verdict for each sandbox, decided without touching anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from skerry.lifecycle import State
from skerry.providers.base import BoxState, BoxStatus
from skerry.records import Cause, Owner, Record
from skerry.spec import SandboxId

INSTANCE_LABEL = "skerry.instance"
_CREATE_DEADLINE_S = 300.0
"""After this a create on another machine, whose maker nobody here can see, is taken for dead."""


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
    LEAVE = "leave"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    id: SandboxId
    provider: str
    action: Action
    why: str
    to: State | None = None
    cause: Cause | None = None


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict depends on besides the two sides."""

    time: float
    boot_id: str
    instance: str
    is_alive: Callable[[Owner], bool | None]
    me: Owner | None = None
    making: frozenset[SandboxId] = frozenset()
    """What this very process is making right now; what else it once began is abandoned."""


_FOLLOWED = {BoxState.RUNNING: State.READY, BoxState.PAUSED: State.PAUSED, BoxState.STOPPED: State.STOPPED}


def decide(
    provider: str, records: Iterable[Record], boxes: Mapping[SandboxId, BoxStatus] | None, now: Now
) -> list[Verdict]:
    """A verdict for every record of a provider and every box it holds. `boxes` is None if the provider does not answer:
    then nothing is known, and nothing is done. It must have been asked before the records were read: a record comes
    before its box, so a box without one is nobody's."""
    known = {record.id: record for record in records}
    verdicts = [_judge(record, boxes, now) for record in known.values() if record.is_live]
    if boxes is not None:
        verdicts += _judge_strays(provider, known, boxes, now)
    return verdicts


def _judge_strays(
    provider: str, known: Mapping[SandboxId, Record], boxes: Mapping[SandboxId, BoxStatus], now: Now
) -> Iterator[Verdict]:
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


def _judge(record: Record, boxes: Mapping[SandboxId, BoxStatus] | None, now: Now) -> Verdict:
    def verdict(action: Action, why: str, to: State | None = None, cause: Cause | None = None) -> Verdict:
        return Verdict(id=record.id, provider=record.spec.provider, action=action, why=why, to=to, cause=cause)

    if boxes is None:
        return verdict(Action.LEAVE, "the provider does not answer, so nothing is known")
    box = boxes.get(record.id)
    if record.doomed:
        return verdict(Action.DESTROY, "its removal was cut short", State.DESTROYED, record.cause or Cause.USER)
    if record.state is State.CREATING:
        return _judge_creating(record, box, now, verdict)
    if record.ephemeral and now.is_alive(record.owner) is False:
        return verdict(Action.DESTROY, "the program it belonged to is gone", State.DESTROYED, Cause.OWNER_DIED)
    if box is None and now.is_alive(record.owner) is None:
        return verdict(Action.LEAVE, "it was made on another machine, whose boxes may not be seen from here")
    if box is None or box.state is BoxState.DEAD:
        return _judge_gone(record, box, now, verdict)
    to = _FOLLOWED[box.state]
    if to is record.state or record.state is State.ERROR:
        return verdict(Action.LEAVE, f"it is {record.state}")
    if record.state is State.LOST:
        return verdict(Action.ADOPT, "it is there again", to)
    return verdict(Action.FOLLOW, f"the host says that it is {box.state}", to)


def _judge_creating(record: Record, box: BoxStatus | None, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    is_abandoned = record.owner == now.me and record.id not in now.making
    alive = False if is_abandoned else now.is_alive(record.owner)
    if alive or (alive is None and now.time - record.updated_at < _CREATE_DEADLINE_S):
        return verdict(Action.LEAVE, "it is being made")
    if record.key is not None and not record.ephemeral and box is not None and box.state is BoxState.RUNNING:
        return verdict(Action.FINISH, "its maker died after it was made, and may ask again by its key", State.READY)
    return verdict(Action.DESTROY, "its maker died while making it", State.DESTROYED, Cause.CREATION_FAILED)


def _judge_gone(record: Record, box: BoxStatus | None, now: Now, verdict: Callable[..., Verdict]) -> Verdict:
    cause = Cause.OUT_OF_MEMORY if box is not None and box.out_of_memory else cause_of_end(record, now)
    is_over = cause in (Cause.LIFETIME, Cause.IDLE)
    if record.state is State.LOST:
        if box is None and not is_over:
            return verdict(Action.LEAVE, "it is still lost")
        cause = record.cause or cause
    if box is not None or is_over:
        return verdict(Action.DESTROY, f"it ended by itself: {cause}", State.DESTROYED, cause)
    return verdict(Action.LOST, f"its box is gone: {cause}", State.LOST, cause)


def cause_of_end(record: Record, now: Now) -> Cause:
    """The most likely reason why a box ended that nobody ended."""
    if record.ends_at is not None and now.time >= record.ends_at - 1:
        return Cause.LIFETIME
    if record.boot_id and record.boot_id != now.boot_id:
        return Cause.HOST_RESTARTED
    if record.spec.idle_s and now.time - record.updated_at >= record.spec.idle_s:
        return Cause.IDLE
    return Cause.BOX_DIED
