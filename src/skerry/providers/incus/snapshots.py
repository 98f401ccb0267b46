"""Snapshots as images, from which a box can be made on any member: the root of a box, its work folder included."""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import msgspec

from skerry.errors import Conflict, LimitReached, NotFound, ProviderError
from skerry.providers import layout
from skerry.providers.base import Snapshot
from skerry.providers.incus import instances
from skerry.providers.incus.api import Api
from skerry.providers.incus.image_config import CONFIG, Found, ImageConfig, config_of
from skerry.providers.incus.images import SNAPSHOTS, listed
from skerry.spec import SandboxId

_FROM = "skerry.from"
_COPY_TIMEOUT_S = 600.0
_KEPT = timedelta(days=1)
"""Long enough for clocks that differ."""


class Snapshots:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def take(self, id: SandboxId, name: str) -> Snapshot:
        """Incus publishes no container that runs, so it is held still first, by a snapshot of Incus's own, which Incus
        itself removes some time if we do not come to it."""
        box = await instances.inspect(self._api, id)
        if await self.find(name) is not None:
            raise Conflict(f"there is a snapshot {name!r} already; remove it, or choose another name")
        aside = f"skerry-{secrets.token_hex(8)}"
        own = f"{instances.path(id)}/snapshots"
        held = {"name": aside, "expires_at": (datetime.now(UTC) + _KEPT).isoformat()}
        try:
            await self._api.do("POST", own, json=held, timeout_s=_COPY_TIMEOUT_S)
            body = {
                "source": {"type": "snapshot", "name": f"{layout.container_name(id)}/{aside}"},
                "properties": {_FROM: id, **await self._asked(box.image)},
                "aliases": [{"name": f"{SNAPSHOTS}{name}"}],
                "compression_algorithm": "none",
            }
            await self._api.do("POST", "/1.0/images", json=body, timeout_s=_COPY_TIMEOUT_S)
        finally:
            with suppress(NotFound, LimitReached, ProviderError):
                await self._api.do("DELETE", f"{own}/{aside}", timeout_s=_COPY_TIMEOUT_S)
        found = await self.find(name)
        if found is None:
            raise ProviderError(f"snapshot {name!r} was made, and is not there")
        return found

    async def _asked(self, image: str) -> dict[str, str]:
        """What the box's own image asked for is the snapshot's too."""
        with suppress(NotFound):
            found = await self._api.get(f"/1.0/images/{image}", Found)
            return {key: value for key, value in (found.properties or {}).items() if key == CONFIG}
        return {}

    async def all(self) -> list[Snapshot]:
        return [snapshot for each in await listed(self._api) if (snapshot := _as_snapshot(each)) is not None]

    async def find(self, name: str) -> Snapshot | None:
        return next((each for each in await self.all() if each.name == name), None)

    async def resolve(self, name: str) -> ImageConfig:
        """The image that a box of this snapshot is made of."""
        path = f"/1.0/images/aliases/{quote(SNAPSHOTS + name, safe='')}"
        try:
            alias = await self._api.get(path, dict[str, Any])
            found = await self._api.get(f"/1.0/images/{alias['target']}", Found)
            # It is not compressed; what its first image took is not what it takes.
            return msgspec.structs.replace(config_of(found), size=found.size + found.size // 4)
        except NotFound:
            raise NotFound(f"incus has no snapshot {name!r}") from None

    async def remove(self, name: str) -> None:
        found = await self.find(name)
        if found is None:
            raise NotFound(f"there is no snapshot {name!r}")
        if any(box.image == found.id for box in (await instances.of_boxes(self._api)).values()):
            raise Conflict(f"snapshot {name!r} is in use: end the sandboxes that were made of it first")
        await self._api.do("DELETE", f"/1.0/images/{found.id}")


def _as_snapshot(image: Found) -> Snapshot | None:
    name = next((name for name in image.names if name.startswith(SNAPSHOTS)), None)
    if name is None:
        return None
    return Snapshot(
        name=name.removeprefix(SNAPSHOTS),
        id=image.fingerprint,
        sandbox=(image.properties or {}).get(_FROM, ""),
        size=image.size,
        created_at=image.made_at or 0.0,
    )
