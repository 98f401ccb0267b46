"""Images of Incus, and snapshots, which are images too, so that a box can be made of one on any member."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import msgspec

from skerry.errors import (
    Conflict,
    ImageNotFound,
    InvalidSpec,
    LimitReached,
    NotFound,
    ProviderError,
    TooLarge,
    Unsupported,
)
from skerry.model.spec import SandboxId
from skerry.providers.base import Image, ImageBuild, OnProgress, Snapshot, log
from skerry.providers.incus import instances
from skerry.providers.incus.api import PROVIDER, IncusApi
from skerry.providers.shared import layout
from skerry.units import format_size

SNAPSHOTS = "skerry-snapshot/"
"""Beginning of a snapshot's alias."""
CONFIG = "skerry.config"
"""Property of an imported image with its configuration, as JSON."""
_UNPACKED = 4
"""Factor by which an image of unknown size may be larger than its file: most are compressed."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,200}")
_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")
_FROM = "skerry.from"
_COPY_TIMEOUT_S = 600.0
_KEPT = timedelta(days=1)
"""Long enough for clocks that differ."""
_HEADERS = 16 << 20


class IncusImageConfig(msgspec.Struct, frozen=True):
    """Wishes of an image. The policy of boxes decides what of it is granted."""

    id: str = ""
    env: dict[str, str] = {}
    user: str = ""
    """Another than root, or empty."""
    folder: str = ""
    command: tuple[str, ...] = ()
    size: int = 0
    """About what it takes when it is unpacked."""


class _Alias(msgspec.Struct):
    name: str
    target: str = ""


class FoundImage(msgspec.Struct):
    fingerprint: str
    size: int = 0
    type: str = "container"
    created_at: str = ""
    uploaded_at: str = ""
    properties: dict[str, str] | None = None
    aliases: list[_Alias] | None = None

    @property
    def names(self) -> list[str]:
        return [alias.name for alias in self.aliases or []]

    @property
    def made_at(self) -> float | None:
        text = self.uploaded_at or self.created_at
        return datetime.fromisoformat(text).timestamp() if text else None


class IncusImages:
    def __init__(self, api: IncusApi) -> None:
        self._api = api

    async def images(self) -> Sequence[Image]:
        used = Counter(box.image for box in (await instances.of_boxes(self._api)).values())
        return [
            Image(
                id=each.fingerprint,
                names=tuple(each.names),
                size=each.size,
                created_at=each.made_at,
                used_by=used[each.fingerprint],
            )
            for each in await listed(self._api)
            if each.type == "container" and not any(name.startswith(SNAPSHOTS) for name in each.names)
        ]

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        """Raises Unsupported: the manager has an engine build from a Dockerfile, and imports what comes of it."""
        reason = "it builds none itself: an engine builds from a Dockerfile, and recipes are for machines"
        raise Unsupported("recipe" if build.recipe else "dockerfile", PROVIDER, reason)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        reason = f"it pulls from image servers of its own: `incus image copy images:{name} local: --alias {name}`"
        raise Unsupported("image pull", PROVIDER, reason)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        from skerry.providers.incus import importing

        check_name(name)
        if name.startswith(SNAPSHOTS):
            raise InvalidSpec(f"image: names that begin with {SNAPSHOTS!r} are those of snapshots", field="image")
        fingerprint = await importing.send(self._api, source, on_progress)
        try:
            await self._api.do("POST", "/1.0/images/aliases", json={"name": name, "target": fingerprint})
        except Conflict:  # what has the name keeps its other ones
            await self._api.do("PUT", _alias_path(name), json={"target": fingerprint})
        found = [each for each in await self.images() if each.id == fingerprint]
        if not found:
            raise ImageNotFound(f"incus: image {name!r} was imported, and is not there")
        return found[0]

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        image = await resolve(self._api, name)
        boxes = [id for id, box in (await instances.of_boxes(self._api)).items() if box.image == image.id]
        if boxes and not force:
            raise Conflict(f"image {name!r} is in use by {len(boxes)} sandboxes, such as {boxes[0]}: end them first")
        others = [each.names for each in await listed(self._api) if each.fingerprint == image.id]
        if others and name in others[0] and len(others[0]) > 1:
            await self._api.do("DELETE", _alias_path(name))
        else:
            await self._api.do("DELETE", f"/1.0/images/{image.id}")


class IncusSnapshots:
    """Roots of boxes, their work folders included, kept as images."""

    def __init__(self, api: IncusApi, disk: int) -> None:
        """`disk` is the room of a box whose pool holds no limits."""
        self._api = api
        self._disk = disk

    async def take(self, id: SandboxId, name: str) -> Snapshot:
        """Publish a snapshot of Incus's own, since it publishes nothing that runs; one that is left Incus removes after
        a day. Raises Conflict, and TooLarge if it is larger, holes filled, than the box may be."""
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
            try:
                await self._api.do("DELETE", f"{own}/{aside}", timeout_s=_COPY_TIMEOUT_S)
            except (NotFound, LimitReached, ProviderError) as error:
                log.debug("incus: %s of sandbox %s is left for Incus to remove: %s", aside, id, error)
        found = await self.find(name)
        if found is None:
            raise ProviderError(f"snapshot {name!r} was made, and is not there")
        most = int(box.devices.get("root", {}).get("size", self._disk))
        if found.size > 2 * most + _HEADERS:  # a tar has some more than the content of its files
            await self._api.do("DELETE", f"/1.0/images/{found.id}")
            raise TooLarge(
                f"no snapshot is taken: with the holes in its files filled it has {format_size(found.size)}, and the "
                f"box may hold {format_size(most)}. Remove such files, or set providers.incus.disk"
            )
        return found

    async def _asked(self, image: str) -> dict[str, str]:
        """The configuration of the box's own image, which becomes the snapshot's too."""
        with suppress(NotFound):
            found = await self._api.get(f"/1.0/images/{image}", FoundImage)
            return {key: value for key, value in (found.properties or {}).items() if key == CONFIG}
        return {}

    async def all(self) -> list[Snapshot]:
        return [snapshot for each in await listed(self._api) if (snapshot := _as_snapshot(each)) is not None]

    async def find(self, name: str) -> Snapshot | None:
        return next((each for each in await self.all() if each.name == name), None)

    async def resolve(self, name: str) -> IncusImageConfig:
        """Find the image of a snapshot. Raises NotFound."""
        try:
            alias = await self._api.get(_alias_path(f"{SNAPSHOTS}{name}"), _Alias)
            found = await self._api.get(f"/1.0/images/{alias.target}", FoundImage)
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


async def listed(api: IncusApi) -> list[FoundImage]:
    return await api.get("/1.0/images", list[FoundImage], query={"recursion": "1"})


async def resolve(api: IncusApi, name: str) -> IncusImageConfig:
    """Find an image by its name, or by the beginning of its fingerprint. Raises ImageNotFound."""
    check_name(name)
    target = name if _FINGERPRINT.fullmatch(name) else ""
    with suppress(NotFound):
        target = (await api.get(_alias_path(name), _Alias)).target
    try:
        if not target:
            raise NotFound(name)
        found = await api.get(f"/1.0/images/{target}", FoundImage)
    except NotFound:
        raise ImageNotFound(
            f"incus has no image {name!r}. Make it with `skerry image import`, or copy one from an image server: "
            f"`incus image copy images:{name} local: --alias {name}`"
        ) from None
    return config_of(found)


def _alias_path(name: str) -> str:
    return f"/1.0/images/aliases/{quote(name, safe='')}"


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"image: {name!r} is not a name that Incus knows images by", field="image")


def config_of(image: FoundImage) -> IncusImageConfig:
    try:
        asked = msgspec.json.decode((image.properties or {}).get(CONFIG, "{}"), type=IncusImageConfig)
    except msgspec.DecodeError as error:
        log.debug("incus: the configuration of image %s cannot be read: %s", image.fingerprint, error)
        asked = IncusImageConfig()
    return msgspec.structs.replace(asked, id=image.fingerprint, size=asked.size or _UNPACKED * image.size)


def _as_snapshot(image: FoundImage) -> Snapshot | None:
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
