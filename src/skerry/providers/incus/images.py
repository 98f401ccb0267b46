"""The images of Incus: list, import and remove them; and what each asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, Unsupported
from skerry.providers.base import Image, ImageBuild, OnProgress
from skerry.providers.incus import instances
from skerry.providers.incus.api import PROVIDER, Api
from skerry.providers.incus.image_config import Alias, Found, ImageConfig, config_of

SNAPSHOTS = "skerry-snapshot/"
"""What the alias of a snapshot begins with."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,200}")
_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")


class Images:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def images(self) -> Sequence[Image]:
        boxes = await instances.of_boxes(self._api)
        used = Counter(box.image for box in boxes.values())
        return [
            Image(
                id=each.fingerprint,
                names=tuple(each.names),
                size=each.size,
                created_at=each.made_at,
                used_by=used[each.fingerprint],
            )
            for each in await listed(self._api)
            if not is_snapshot(each) and each.type == "container"
        ]

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        reason = "it builds none: build with another tool, then `skerry image import` its OCI layout or archive"
        raise Unsupported("image build", PROVIDER, reason)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        reason = f"it pulls from image servers of its own: `incus image copy images:{name} local: --alias {name}`"
        raise Unsupported("image pull", PROVIDER, reason)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        from skerry.providers.incus import importing

        check_name(name)
        if name.startswith(SNAPSHOTS):
            raise InvalidSpec(f"image: names that begin with {SNAPSHOTS!r} are those of snapshots", field="image")
        fingerprint = await importing.send(self._api, source, on_progress)
        await self._name(name, fingerprint)
        found = [each for each in await self.images() if each.id == fingerprint]
        if not found:
            raise ImageNotFound(f"incus: image {name!r} was imported, and is not there")
        return found[0]

    async def _name(self, name: str, fingerprint: str) -> None:
        """Under this name it is found from now on; what had the name before keeps its other ones."""
        try:
            await self._api.do("POST", "/1.0/images/aliases", json={"name": name, "target": fingerprint})
        except Conflict:
            await self._api.do("PUT", f"/1.0/images/aliases/{quote(name, safe='')}", json={"target": fingerprint})

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        image = await resolve(self._api, name)
        boxes = [id for id, box in (await instances.of_boxes(self._api)).items() if box.image == image.id]
        if boxes and not force:
            raise Conflict(f"image {name!r} is in use by {len(boxes)} sandboxes, such as {boxes[0]}: end them first")
        others = [each.names for each in await listed(self._api) if each.fingerprint == image.id]
        if others and name in others[0] and len(others[0]) > 1:
            await self._api.do("DELETE", f"/1.0/images/aliases/{quote(name, safe='')}")
            return
        await self._api.do("DELETE", f"/1.0/images/{image.id}")


def is_snapshot(image: Found) -> bool:
    return any(name.startswith(SNAPSHOTS) for name in image.names)


async def listed(api: Api) -> list[Found]:
    return await api.get("/1.0/images", list[Found], query={"recursion": "1"})


async def resolve(api: Api, name: str) -> ImageConfig:
    """By its name, or by the beginning of its fingerprint."""
    check_name(name)
    target = name if _FINGERPRINT.fullmatch(name) else ""
    with suppress(NotFound):
        target = (await api.get(f"/1.0/images/aliases/{quote(name, safe='')}", Alias)).target
    try:
        if not target:
            raise NotFound(name)
        found = await api.get(f"/1.0/images/{target}", Found)
    except NotFound:
        raise ImageNotFound(
            f"incus has no image {name!r}. Make it with `skerry image import`, or copy one from an image server: "
            f"`incus image copy images:{name} local: --alias {name}`"
        ) from None
    return config_of(found)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"image: {name!r} is not a name that Incus knows images by", field="image")
