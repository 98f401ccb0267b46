"""Members of a cluster, and the placement of a new box: by what runs on each and what is on its way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from skerry.errors import LimitReached, NotFound, ProviderError, Unsupported
from skerry.model.spec import SandboxId, Spec
from skerry.providers.base import log
from skerry.providers.incus import instances
from skerry.providers.incus.api import PROVIDER, IncusApi
from skerry.providers.incus.info import IncusInfo
from skerry.providers.shared import layout

_ANSWER_S = 3.0
"""How long a member may take to answer before another is chosen."""
_AWAY_S = 15.0
"""About as long as Incus takes to see for itself that a member is gone."""


class ClusterMember(msgspec.Struct, frozen=True):
    """A member of a cluster, as far as it matters here."""

    name: str
    is_online: bool = True
    groups: tuple[str, ...] = ("default",)
    scheduler: str = "all"
    """Which boxes it may be given: `all`, those that ask for a `group` of its own, or for itself (`manual`)."""


class Cluster:
    """Chooses members for boxes: Incus's own choice does not see what is being made at the same time."""

    def __init__(self, api: IncusApi) -> None:
        self._api = api
        self._in_flight: dict[str, str] = {}
        """Members by the names of the containers that this process makes on them."""
        self._away: dict[str, float] = {}
        """Members that did not answer, and until when that is believed."""

    @asynccontextmanager
    async def member(self, id: SandboxId, spec: Spec, info: IncusInfo, home: str | None) -> AsyncIterator[str | None]:
        """Choose the member that a box is made on; None where there is no cluster. `home` is the one with its data."""
        if not info.server.server_clustered:
            yield None
            return
        if home is not None:
            if spec.target not in (None, home):
                raise Unsupported("target", PROVIDER, f"its data is on member {home!r}: choose that, or another name")
            spec = msgspec.structs.replace(spec, target=home)
        before = {**self._in_flight}  # what is done while we ask is in neither of the other two
        members, running = await self._members(), await self._running()
        name, tried = layout.container_name(id), set[str]()
        while True:
            # Without a wait from here to there, so that those who choose at the same time see each other.
            known = members if spec.target is not None else [self._believed(each, tried) for each in members]
            chosen = choose(known, running, {**before, **self._in_flight}, spec)
            self._in_flight[name] = chosen
            try:
                if spec.target is not None or await self._answers(chosen):
                    yield chosen
                    return
            finally:
                del self._in_flight[name]
            tried.add(chosen)

    def _believed(self, member: ClusterMember, tried: set[str]) -> ClusterMember:
        """The member, offline if it did not answer: Incus calls it online for a while after it is gone."""
        is_away = member.name in tried or time.monotonic() < self._away.get(member.name, 0.0)
        return msgspec.structs.replace(member, is_online=member.is_online and not is_away)

    async def _answers(self, member: str) -> bool:
        """Ask a member before anything is made there, as afterwards nobody could tell what was."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._api.get(f"/1.0/cluster/members/{member}/state", dict[str, Any])
        except (ProviderError, TimeoutError) as error:
            log.info("incus: member %s does not answer, another is chosen: %s", member, error)
            self._away[member] = time.monotonic() + _AWAY_S
            return False
        return True

    async def _running(self) -> dict[str, str]:
        """Members by container, without those that were stopped; none at all while a member is silent."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await instances.listed(self._api)
        except TimeoutError:
            log.debug("incus: what runs on the cluster is not told within %g s", _ANSWER_S)
            return {}
        return {each.name: each.location for each in found if not each.was_stopped}

    async def _members(self) -> list[ClusterMember]:
        found = await self._api.get("/1.0/cluster/members", list[dict[str, Any]], query={"recursion": "1"})
        return [
            ClusterMember(
                name=str(each["server_name"]),
                is_online=each.get("status") == "Online",
                groups=tuple(each.get("groups") or ()),
                scheduler=(each.get("config") or {}).get("scheduler.instance", "all"),
            )
            for each in found
        ]


def choose(
    members: Sequence[ClusterMember], running: Mapping[str, str], in_flight: Mapping[str, str], spec: Spec
) -> str:
    """Choose the least busy member that the spec allows. Both mappings are members by container: each counts once."""
    allowed = _allowed(members, spec)
    online = [each.name for each in allowed if each.is_online]
    if not online:
        raise LimitReached(
            f"{_wish(spec)}no member of the cluster that may have the box is online: it is for {_names(allowed)}; see "
            "`incus cluster list`"
        )
    load = Counter({**running, **in_flight}.values())
    return min(online, key=lambda name: (load[name], name))


def _allowed(members: Sequence[ClusterMember], spec: Spec) -> list[ClusterMember]:
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


def _is_allowed(member: ClusterMember, spec: Spec) -> bool:
    if spec.group is not None and spec.group not in member.groups:
        return False
    if spec.target is not None:
        return member.name == spec.target
    return member.scheduler == "all" or (member.scheduler == "group" and spec.group is not None)


def _wish(spec: Spec) -> str:
    wished = [f"{field} {value}" for field, value in (("target", spec.target), ("group", spec.group)) if value]
    return f"{' and '.join(wished)}: " if wished else ""


def _names(members: Sequence[ClusterMember]) -> str:
    return ", ".join(sorted(each.name if each.is_online else f"{each.name} (offline)" for each in members)) or "none"
