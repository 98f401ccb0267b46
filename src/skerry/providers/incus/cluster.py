"""The members of a cluster, and which of them a new box goes to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from skerry.errors import ProviderError, Unsupported
from skerry.providers import layout
from skerry.providers.incus import instances
from skerry.providers.incus.api import PROVIDER, Api
from skerry.providers.incus.info import Info
from skerry.providers.incus.placement import Member, choose
from skerry.spec import SandboxId, Spec

_ONLINE = "Online"
_ANSWER_S = 3.0
"""How long a member may take to answer before another is chosen."""
_AWAY_S = 15.0
"""About as long as Incus takes to see for itself that a member is gone."""


class Cluster:
    """Incus's own choice does not see what is being made at the same time, so we choose."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._in_flight: dict[str, str] = {}
        """Members by the names of the containers that this process makes on them."""
        self._away: dict[str, float] = {}
        """Members that did not answer, and until when that is believed."""

    @asynccontextmanager
    async def member(self, id: SandboxId, spec: Spec, info: Info, home: str | None) -> AsyncIterator[str | None]:
        """The name of the member that a box is made on meanwhile; None where there is no cluster. At `home` lies its
        data, which cannot be reached from elsewhere."""
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

    def _believed(self, member: Member, tried: set[str]) -> Member:
        """Incus calls a member online for a while after it is gone."""
        is_away = member.name in tried or time.monotonic() < self._away.get(member.name, 0.0)
        return msgspec.structs.replace(member, is_online=member.is_online and not is_away)

    async def _answers(self, member: str) -> bool:
        """Asked before anything is made there, as afterwards nobody could tell what was."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._api.get(f"/1.0/cluster/members/{member}/state", dict[str, Any])
        except (ProviderError, TimeoutError):
            self._away[member] = time.monotonic() + _AWAY_S
            return False
        return True

    async def _running(self) -> dict[str, str]:
        """One that has only just been made counts; one that was stopped does not. While a member is silent nobody
        tells of any: then what is on its way is all that is known."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await instances.listed(self._api)
        except TimeoutError:
            return {}
        return {each.name: each.location for each in found if not each.was_stopped}

    async def _members(self) -> list[Member]:
        found = await self._api.get("/1.0/cluster/members", list[dict[str, Any]], query={"recursion": "1"})
        return [
            Member(
                name=str(each["server_name"]),
                is_online=each.get("status") == _ONLINE,
                groups=tuple(each.get("groups") or ()),
                scheduler=(each.get("config") or {}).get("scheduler.instance", "all"),
            )
            for each in found
        ]
