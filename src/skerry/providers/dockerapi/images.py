"""Images of an engine: list, build, pull, import and remove them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from skerry.errors import (
    Conflict,
    ImageNotFound,
    InvalidSpec,
    NotFound,
    ProviderError,
    ProviderUnavailable,
    Unsupported,
)
from skerry.model.spec import Network
from skerry.oci import archives, packing, roots, stores, upload
from skerry.oci.stores import FolderStore, TarStore
from skerry.oci.upload import Upload
from skerry.providers.base import Image, ImageBuild, OnProgress, Progress
from skerry.providers.dockerapi import build_context
from skerry.providers.dockerapi.api import Engine, Quirks
from skerry.providers.dockerapi.containers import Listed, full_id, list_all
from skerry.providers.dockerapi.creation import find_network
from skerry.providers.dockerapi.image_config import FoundImage, full_name, in_path, is_id, missing
from skerry.providers.dockerapi.progress import BuildWork, EngineWork, PullWork, follow
from skerry.providers.shared.layout import ADMIN_CAPABILITIES
from skerry.units import format_size

_NO_NAME = "<none>"
_EXPORT_S = 3600.0
BUILD_MEMORY = 2 << 30
_HUB = ("docker.io/library/", "docker.io/")


class _Version(msgspec.Struct, rename="pascal"):
    arch: str


class EngineImages:
    """Images that boxes of an engine are made of."""

    def __init__(self, engine: Engine, quirks: Quirks) -> None:
        self._engine = engine
        self._quirks = quirks

    async def images(self) -> Sequence[Image]:
        """All but snapshots, the newest first."""
        listed = await self._engine.get("/images/json", list[FoundImage])
        boxes = await self._boxes()
        found = [_image(each, boxes) for each in listed if "skerry.snapshot" not in (each.labels or {})]
        return sorted(found, key=lambda image: (-(image.created_at or 0), image.id))

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        """Build with the engine's own builder; a step that fails is told with the end of its output."""
        name = full_name(build.name, digest=False)
        if build.recipe:
            raise Unsupported("recipe", self._engine.provider, "recipes are for machines; give a Dockerfile")
        work = build_work(build, name, on_progress)
        build_context.check_dockerfile(build.dockerfile, build.network)
        for base in build_context.base_images(build.dockerfile, build.args, build.target):
            await self._check_base(base, build.network, work, on_progress)
        query: dict[str, Any] = {
            **await self._walls(build),
            "dockerfile": build_context.DOCKERFILE,
            "t": name,
            "buildargs": build.args,
            "target": build.target,
            "nocache": build.no_cache,
            "rm": True,
            "forcerm": True,
        }
        async with aclosing(packing.from_thread(build_context.pack(build.dockerfile, build.context))) as pieces:
            body = upload.counted(pieces, "sending the context", None, on_progress)
            await follow(self._engine, "/build", query, work, body)
        return await self._one(work.id or name)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        """From its registry. Without a tag `latest` is meant, and never all tags there are."""
        name = full_name(name)
        named, _, digest = name.partition("@")
        repository = re.sub(":[^/]*$", "", named)  # a colon before the last slash is that of a registry's port
        query = {"fromImage": repository, "tag": digest or named[len(repository) + 1 :]}
        await follow(self._engine, "/images/create", query, PullWork(name, self._engine.provider, on_progress))
        return await self._one(name)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        """Whole or not at all: what makes an image of it is sent last."""
        name = full_name(name, digest=False)
        on_progress(Progress(f"looking at {source.name}"))
        architecture = (await self._engine.get("/version", _Version)).arch
        async with (
            upload_of(source, with_registry(name), architecture) as prepared,
            upload.sending(prepared, source, on_progress) as body,
        ):
            await follow(self._engine, "/images/load", {}, EngineWork(f"the import of {name}"), body)
        return await self._one(name)

    async def build_archive(
        self, build: ImageBuild, target: Path, on_progress: OnProgress, *, most: int | None = None
    ) -> None:
        """Build, and save as `docker save` does. Raises ProviderError beyond `most` bytes, holes filled."""
        built = await self.build_image(build, on_progress)
        await self._save(built, build.name, target, on_progress, stores.MAX_BYTES if most is None else most)

    async def pull_archive(self, name: str, target: Path, on_progress: OnProgress, *, most: int) -> None:
        """Pull, and save as `docker save` does. Raises ProviderError beyond `most` bytes, holes filled."""
        await self._save(await self.pull_image(name, on_progress), name, target, on_progress, most)

    async def _save(self, image: Image, name: str, target: Path, on_progress: OnProgress, most: int) -> None:
        path = f"/images/{in_path(image.id)}/get"
        done = 0
        with target.open("xb") as file:
            async with self._engine.stream("GET", path, timeout_s=_EXPORT_S, whole_s=_EXPORT_S) as answer:
                async for piece in answer:
                    done += len(piece)
                    if done > most:
                        raise ProviderError(f"the image {name} is larger than {format_size(most)}")
                    await asyncio.to_thread(file.write, piece)
                    on_progress(Progress(f"taking {name} out of {self._engine.provider}", done))

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        """With `force` also if it has more names than this one. What a box is made of always stays."""
        image = await self._one(name)
        users = [each for each in await list_all(self._engine) if full_id(each.image_id) == image.id]
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

    async def _walls(self, build: ImageBuild) -> dict[str, Any]:
        """The least that the engine's builder can be told to give; Docker's gives a step Docker's capabilities."""
        memory = build.memory or BUILD_MEMORY
        limits = {"memory": memory, "memswap": memory}
        if not self._quirks.builds_with_buildah:
            return {**limits, "networkmode": (await find_network(self._engine, build.network)).name}
        return {
            **limits,
            "nsoptions": [{"Name": "network", "Host": False}],
            "networkmode": "NetworkDisabled" if build.network is Network.NONE else "NetworkEnabled",
            "dropcaps": ["ALL"],
            "addcaps": [f"CAP_{name}" for name in ADMIN_CAPABILITIES],
        }

    async def _check_base(self, name: str, network: Network, work: BuildWork, on_progress: OnProgress) -> None:
        """Have an image that is built on, so that no Dockerfile sends the engine anywhere or runs steps of an image."""
        path = f"/images/{in_path(name)}/json"
        try:
            found = await self._engine.get(path, FoundImage)
        except NotFound:
            if network is Network.NONE:
                reason = f"it builds on {name}, which is not here, and has no network to get it (--network bridge)"
                raise work.failure(f"{reason}. {missing(self._engine.provider, name)}") from None
            try:
                await self.pull_image(name, on_progress)
            except (ImageNotFound, ProviderUnavailable) as error:
                raise work.failure(error.message) from error
            found = await self._engine.get(path, FoundImage)
        if found.config and found.config.on_build:
            reason = f"FROM {name}: it has ONBUILD steps, which are not run; write them into the Dockerfile"
            raise InvalidSpec(reason, field="dockerfile")

    async def _one(self, name: str) -> Image:
        try:
            found = await self._engine.get(f"/images/{in_path(name)}/json", FoundImage)
        except NotFound as error:
            raise ImageNotFound(missing(self._engine.provider, name)) from error
        return _image(found, await self._boxes())

    async def _boxes(self) -> list[Listed]:
        return await list_all(self._engine, f"skerry={self._engine.provider}")


def build_work(build: ImageBuild, name: str, on_progress: OnProgress) -> BuildWork:
    walls = "no network (--network bridge gives one) and " if build.network is Network.NONE else ""
    hint = f"its steps have {walls}{format_size(build.memory or BUILD_MEMORY)} of memory (--memory)"
    return BuildWork(name, on_progress, hint)


def with_registry(name: str) -> str:
    """Spell a short name out: some engines take one in an archive to be of their own."""
    head, slash, _ = name.partition("/")
    if slash and (head == "localhost" or "." in head or ":" in head):
        return name
    return f"{_HUB[1]}{name}" if slash else f"{_HUB[0]}{name}"


def _image(found: FoundImage, boxes: Iterable[Listed]) -> Image:
    return Image(
        id=full_id(found.id),
        names=tuple(_familiar(tag) for tag in found.repo_tags or () if _NO_NAME not in tag),
        size=found.size,
        created_at=_moment(found.created),
        digests=tuple(_familiar(digest) for digest in found.repo_digests or () if _NO_NAME not in digest),
        used_by=sum(full_id(each.image_id) == full_id(found.id) for each in boxes),
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


def _few(word: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    plural = {"sandbox": "sandboxes"}.get(word, f"{word}s")
    return f"the {word if len(names) == 1 else plural} {', '.join(names[:5])}{more}"


def upload_of(source: Path, name: str, architecture: str) -> AbstractAsyncContextManager[Upload]:
    """Make an image archive of a source, whatever that is: an archive, a layout, a root."""

    @contextmanager
    def look(stop: Event) -> Iterator[Upload]:
        with stores.reading(source), stores.opened(source, stop) as store:
            yield _upload(source, store, name, architecture)

    return upload.prepared(look)


def _upload(source: Path, store: FolderStore | TarStore, name: str, architecture: str) -> Upload:
    if store.size(archives.MANIFEST) >= 0:
        parts = archives.in_archive(store)
    elif store.size(archives.INDEX) >= 0:
        parts = archives.in_layout(store, architecture)
    else:
        left_out: list[str] = []
        entries = roots.root_of(source, store, left_out)
        pieces = upload.readable(source, roots.pack(entries, name, architecture))
        return Upload(pieces, roots.check_size(source, entries), left_out)
    pieces = upload.readable(source, archives.pack(store, parts, name))
    return Upload(pieces, archives.total(store, parts), [])
