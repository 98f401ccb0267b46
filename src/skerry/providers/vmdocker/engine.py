"""The Docker in a project's machine: an engine like others, but never one of this host."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import NotFound
from skerry.providers.base import Volume
from skerry.providers.engine import EngineConfig, EngineProvider, Habits, image_config, tars
from skerry.providers.engine.image_config import full_name
from skerry.providers.engine.info import Info
from skerry.providers.engine.telling import Telling, converse

NAME = "vmdocker"
_NOTHING = "skerry-nothing"
"""An image without a file, for containers that never run."""


class ProjectEngine(EngineProvider):
    name = NAME
    Config = EngineConfig
    fix = "see the console of the project's machine; `skerry reconcile` clears one that has ended"
    habits = Habits(may_be_here=False)

    def close(self) -> None:
        self._reach.close()

    async def ping(self, timeout_s: float) -> None:
        """Raises ProviderUnavailable."""
        async with self._engine.stream("GET", "/_ping", timeout_s=timeout_s, whole_s=timeout_s) as answer:
            await answer.whole()

    async def volumes_of(self, project: str, *, sizes: bool = False) -> tuple[Volume, ...]:
        """A machine has those of its project; what it says of others is not believed."""
        return tuple(volume for volume in await self.volumes(sizes=sizes) if volume.project == project)

    async def image_id(self, name: str) -> str | None:
        """What a name means there now."""
        try:
            return (await image_config.resolve(self._engine, full_name(name))).id
        except NotFound:
            return None

    async def load(self, archive: Path, name: str) -> None:
        await converse(self._engine, "/images/load", {}, Telling(f"the loading of {name}"), tars.pieces(archive))

    async def warm(self) -> None:
        """Have what every box needs, and no box."""
        content = tars.folder("tmp", mode=0o1777)
        await self._engine.post("/images/create", query={"fromSrc": "-", "repo": _NOTHING}, body=content)
        await self._runtime.prepare(_NOTHING)


def assumed() -> Info:
    """What its account will be, before it runs."""
    return Info(elsewhere=True, default_runtime="runc")
