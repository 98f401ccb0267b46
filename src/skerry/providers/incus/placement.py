"""Which member of a cluster a box goes to: by what runs there and what is on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from skerry.errors import LimitReached, NotFound
from skerry.spec import Spec


class Member(msgspec.Struct, frozen=True):
    """A member of a cluster, as far as it matters here."""

    name: str
    is_online: bool = True
    groups: tuple[str, ...] = ("default",)
    scheduler: str = "all"
    """Which boxes its administrator lets it be given: all, those that ask for one of its groups (`group`), or those
    that ask for itself (`manual`)."""


def choose(members: Sequence[Member], running: Mapping[str, str], in_flight: Mapping[str, str], spec: Spec) -> str:
    """The member that has the least to do, among those that the spec allows. Both mappings are members by the names of
    their containers: one that is being made may already be listed, and counts once."""
    allowed = _allowed(members, spec)
    online = [each.name for each in allowed if each.is_online]
    if not online:
        raise LimitReached(
            f"{_wish(spec)}no member of the cluster that may have the box is online: it is for {_names(allowed)}; see "
            "`incus cluster list`"
        )
    load = Counter({**running, **in_flight}.values())
    return min(online, key=lambda name: (load[name], name))


def _allowed(members: Sequence[Member], spec: Spec) -> list[Member]:
    if spec.target is not None and spec.target not in {each.name for each in members}:
        raise NotFound(f"target: the cluster has no member {spec.target!r}; it has {_names(members)}")
    groups = sorted({group for each in members for group in each.groups})
    if spec.group is not None and spec.group not in groups:
        raise NotFound(f"group: no member of the cluster is in {spec.group!r}; there is {', '.join(groups) or 'none'}")
    allowed = [each for each in members if _is_allowed(each, spec)]
    if not allowed:
        raise NotFound(
            f"{_wish(spec)}no member of the cluster may have the box; it has {_names(members)}, each with its "
            "groups and its setting scheduler.instance: see `incus cluster show NAME`"
        )
    return allowed


def _is_allowed(member: Member, spec: Spec) -> bool:
    if spec.group is not None and spec.group not in member.groups:
        return False
    if spec.target is not None:
        return member.name == spec.target
    return member.scheduler == "all" or (member.scheduler == "group" and spec.group is not None)


def _wish(spec: Spec) -> str:
    wished = [f"{field} {value}" for field, value in (("target", spec.target), ("group", spec.group)) if value]
    return f"{' and '.join(wished)}: " if wished else ""


def _names(members: Sequence[Member]) -> str:
    return ", ".join(sorted(each.name if each.is_online else f"{each.name} (offline)" for each in members)) or "none"
