"""What a pool should do next, decided without touching anything."""

from __future__ import annotations

import msgspec

from skerry.spec import SandboxId

WATCH_S = 0.5
"""How often a pool looks whether another program has claimed a sandbox of its."""
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0


class Warm(msgspec.Struct, frozen=True):
    """A sandbox that waits to be handed out."""

    id: SandboxId
    since: float


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan depends on. Times are of one clock, which never goes back."""

    size: int
    max_boots: int
    max_age_s: float
    ready: tuple[Warm, ...] = ()
    """The oldest first."""
    booting: int = 0
    failures: int = 0
    """Boots that failed since the last that did not."""
    failed_at: float = 0.0
    closing: bool = False


class Boot(msgspec.Struct, frozen=True):
    count: int


class Drop(msgspec.Struct, frozen=True):
    id: SandboxId


class Look(msgspec.Struct, frozen=True):
    """Plan again by then, whatever happens before."""

    at: float


Step = Boot | Drop | Look


def plan(state: PoolState, now: float) -> list[Step]:
    """What to drop, how many to boot, and when to look again."""
    if state.closing:
        return [*(Drop(each.id) for each in state.ready), Look(now + WATCH_S)]
    fresh = [each for each in state.ready if now - each.since < state.max_age_s]
    kept = fresh[max(0, len(fresh) - state.size) :]
    dropped = {each.id for each in state.ready} - {each.id for each in kept}
    steps: list[Step] = [Drop(each.id) for each in state.ready if each.id in dropped]
    boots = _boots(state, len(kept), now)
    if boots:
        steps.append(Boot(boots))
    due = [each.since + state.max_age_s for each in kept]
    return [*steps, Look(min([now + WATCH_S, *due]))]


def retry_at(state: PoolState) -> float:
    """When to boot again after failures: each takes twice as long as the one before it, up to a bound."""
    if not state.failures:
        return state.failed_at
    return state.failed_at + min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(state.failures - 1, 16))


def _boots(state: PoolState, kept: int, now: float) -> int:
    if state.failures and now < retry_at(state):
        return 0
    at_once = 1 if state.failures else state.max_boots  # one boot is enough to see whether they work again
    return max(0, min(state.size - kept - state.booting, at_once - state.booting))
