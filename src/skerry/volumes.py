"""What outlives a sandbox: the data of each, and the caches of a project."""

from __future__ import annotations

from skerry import lifecycle
from skerry.core import ManagerCore
from skerry.errors import Conflict, NotFound
from skerry.providers.base import Capability, HasVolumes, Provider, Volume


class VolumeMethods(ManagerCore):
    async def volumes(
        self, kind: str | None = None, *, sizes: bool = False, provider: str | None = None
    ) -> list[Volume]:
        """All there are, by name: those of a kind (`data` or `cache`), of one provider, or of all that have any. Their
        sizes take longer."""
        found = [
            each
            for host in await self._able_providers(Capability.VOLUMES, provider)
            for each in await _able(host).volumes(sizes=sizes)
            if kind in (None, each.kind)
        ]
        return sorted(found, key=lambda volume: volume.name)

    async def remove_volume(self, name: str, provider: str | None = None) -> None:
        """Remove a volume and all that is in it. Raises Conflict while a sandbox uses it."""
        hosts = await self._able_providers(Capability.VOLUMES, provider)
        holders = [host for host in hosts if any(each.name == name for each in await _able(host).volumes())]
        if len(holders) > 1:
            names = ", ".join(host.name for host in holders)
            raise Conflict(f"several providers have a volume {name!r} ({names}): say which one")
        for host in holders:
            return await _able(host).remove_volume(name)
        asked = ", ".join(host.name for host in hosts) or "none"
        raise NotFound(f"no volume is called {name!r}; asked were: {asked}. `--provider` (`provider=`) names another")


def _able(provider: Provider) -> HasVolumes:
    able: HasVolumes = lifecycle.able(provider, Capability.VOLUMES)
    return able
