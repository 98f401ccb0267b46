"""One installation of ours on a cluster, for tests that look at both sides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from manager.world import config_of

from skerry.manager.manager import AsyncSandboxManager

from .incus_cluster import Cluster

TIMEOUT_S = 5.0
"""How long the daemon may take to answer."""
START_S = 20.0
PATIENCE_S = 30.0


class World:
    """One installation on the cluster."""

    def __init__(self, cluster: Cluster, cache: Path, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._cache = cache

    def manager(self, **settings: Any) -> AsyncSandboxManager:
        mine = {"host": self.cluster.address, "cache_dir": str(self._cache), "timeout_s": TIMEOUT_S}
        mine |= {"start_timeout_s": START_S, **settings}
        config = config_of(self.folder, provider="incus", providers={"incus": mine})
        return AsyncSandboxManager(config, reconcile=False)

    def places(self) -> dict[str, str]:
        """The members that the sandboxes are on."""
        found = self.cluster.ask("GET", "/1.0/instances?recursion=1")
        return {each["name"].removeprefix("skerry-"): each["location"] for each in found}

    async def seen(self, member: str, *, online: bool) -> None:
        await asyncio.to_thread(self.cluster.await_seen, member, online=online)

    async def revive(self) -> None:
        """All members are there, and know of each other."""
        for name, member in self.cluster.members.items():
            self.cluster.join_again(name)
            if member._process is None:
                await asyncio.to_thread(self.cluster.start, name)
        for name in self.cluster.members:
            await self.seen(name, online=True)
