"""The images of an engine: list, build, pull, import and remove them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, Unsupported
from skerry.providers.base import Image, ImageBuild, OnProgress, Progress
from skerry.providers.engine import context, importing
from skerry.providers.engine.api import Engine
from skerry.providers.engine.image_config import full_name, in_path, is_id, missing
from skerry.providers.engine.telling import Building, Pulling, Telling, converse
from skerry.sources import packing, parcels

_NO_NAME = "<none>"
_EXPORT_S = 3600.0
_HUB = ("docker.io/library/", "docker.io/")


class _Listed(msgspec.Struct, rename="pascal"):
    id: str
    repo_tags: list[str] | None = None
    repo_digests: list[str] | None = None
    labels: dict[str, str] | None = None
    size: int = 0
    created: int | str | None = None


class _Container(msgspec.Struct, rename="pascal"):
    id: str
    image_i_d: str = msgspec.field(name="ImageID", default="")
    names: list[str] | None = None
    labels: dict[str, str] | None = None


class _Version(msgspec.Struct, rename="pascal"):
    arch: str


class Images:
    """All that an engine's boxes can be made of."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def images(self) -> Sequence[Image]:
        """All but snapshots, the newest first."""
        listed = await self._engine.get("/images/json", list[_Listed])
        boxes = await self._containers(ours=True)
        found = [_image(each, boxes) for each in listed if "skerry.snapshot" not in (each.labels or {})]
        return sorted(found, key=lambda image: (-(image.created_at or 0), image.id))

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        """Build with the engine's own builder; a step that fails is told with the end of its output."""
        name = full_name(build.name, digest=False)
        if build.recipe:
            raise Unsupported("recipe", self._engine.provider, "recipes are for machines; give a Dockerfile")
        if not build.dockerfile.strip():
            raise InvalidSpec("the Dockerfile is empty: it needs at least a FROM", field="dockerfile")
        query: dict[str, Any] = {
            "dockerfile": context.DOCKERFILE,
            "t": name,
            "buildargs": build.args,
            "target": build.target,
            "nocache": build.no_cache,
            "rm": True,
            "forcerm": True,
        }
        telling = Building(name, on_progress)
        async with aclosing(packing.from_thread(context.pack(build.dockerfile, build.context))) as pieces:
            body = parcels.counted(pieces, "sending the context", None, on_progress)
            await converse(self._engine, "/build", query, telling, body)
        return await self._one(telling.id or name)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        """From its registry. Without a tag `latest` is meant, and never all tags there are."""
        name = full_name(name)
        named, _, digest = name.partition("@")
        repository = _untagged(named)
        query = {"fromImage": repository, "tag": digest or named[len(repository) + 1 :]}
        await converse(self._engine, "/images/create", query, Pulling(name, self._engine.provider, on_progress))
        return await self._one(name)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        """Whole or not at all: what makes an image of it is sent last."""
        name = full_name(name, digest=False)
        on_progress(Progress(f"looking at {source.name}"))
        async with (
            importing.parcel(source, with_registry(name), await self._architecture()) as parcel,
            parcels.sending(parcel, source, on_progress) as body,
        ):
            await converse(self._engine, "/images/load", {}, Telling(f"the import of {name}"), body)
        return await self._one(name)

    async def export_image(self, name: str, target: Path, on_progress: OnProgress) -> None:
        """As `docker save` writes it."""
        path = f"/images/{in_path(name)}/get"
        done = 0
        with target.open("xb") as file:
            async with self._engine.stream("GET", path, timeout_s=_EXPORT_S, whole_s=_EXPORT_S) as answer:
                async for piece in answer:
                    await asyncio.to_thread(file.write, piece)
                    done += len(piece)
                    on_progress(Progress(f"taking {name} out of {self._engine.provider}", done))

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        """With `force` also if it has more names than this one. What a box is made of always stays."""
        image = await self._one(name)
        users = [each for each in await self._containers() if _same(each.image_i_d, image.id)]
        ours = [sandbox for each in users if (sandbox := (each.labels or {}).get("skerry.sandbox"))]
        if ours:
            raise Conflict(
                f"the image {name} is used by {_few('sandbox', ours)}. End them first, with `skerry rm ID`: "
                "their boxes cannot be started again without it"
            )
        if force and users:  # some engines would take the containers away with it
            names = [(each.names or [each.id[:12]])[0].lstrip("/") for each in users]
            raise Conflict(f"the image {name} is used by {_few('container', names)}, which skerry did not make")
        if not force and is_id(name) and len(image.names) > 1:
            raise Conflict(f"the image has several names ({', '.join(image.names)}): remove it under each, or force it")
        try:
            await self._engine.delete(f"/images/{in_path(name)}", query={"force": force})
        except NotFound as error:
            raise ImageNotFound(missing(self._engine.provider, name)) from error

    async def _one(self, name: str) -> Image:
        try:
            found = await self._engine.get(f"/images/{in_path(name)}/json", _Listed)
        except NotFound as error:
            raise ImageNotFound(missing(self._engine.provider, name)) from error
        return _image(found, await self._containers(ours=True))

    async def _containers(self, *, ours: bool = False) -> list[_Container]:
        """Those there are, running or not."""
        filters = {"label": [f"skerry={self._engine.provider}"]} if ours else {}
        return await self._engine.get("/containers/json", list[_Container], query={"all": True, "filters": filters})

    async def _architecture(self) -> str:
        return (await self._engine.get("/version", _Version)).arch


def with_registry(name: str) -> str:
    """What a short name means, spelled out, as some engines take one in an archive to be of their own."""
    head, slash, _ = name.partition("/")
    if slash and (head == "localhost" or "." in head or ":" in head):
        return name
    return f"{_HUB[1]}{name}" if slash else f"{_HUB[0]}{name}"


def _untagged(name: str) -> str:
    head, _, last = name.rpartition("/")
    return f"{head}/{last.partition(':')[0]}" if head else last.partition(":")[0]


def _image(found: _Listed, boxes: Iterable[_Container]) -> Image:
    tags = [tag for tag in found.repo_tags or () if _NO_NAME not in tag]
    return Image(
        id=found.id if found.id.startswith("sha256:") else f"sha256:{found.id}",
        names=tuple(_familiar(tag) for tag in tags),
        size=found.size,
        created_at=_moment(found.created),
        digests=tuple(_familiar(digest) for digest in found.repo_digests or () if _NO_NAME not in digest),
        used_by=sum(_same(each.image_i_d, found.id) for each in boxes),
    )


def _familiar(name: str) -> str:
    """Some engines say which registry a short name means, others do not; people write it short."""
    return next((name.removeprefix(prefix) for prefix in _HUB if name.startswith(prefix)), name)


def _moment(created: int | str | None) -> float | None:
    if isinstance(created, str):
        try:
            created = int(datetime.fromisoformat(created).timestamp())
        except ValueError:
            return None
    return float(created) if created and created > 0 else None


def _same(one: str, other: str) -> bool:
    return one.removeprefix("sha256:") == other.removeprefix("sha256:")


def _few(word: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    plural = {"sandbox": "sandboxes"}.get(word, f"{word}s")
    return f"the {word if len(names) == 1 else plural} {', '.join(names[:5])}{more}"
