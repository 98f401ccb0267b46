"""The verbs of images, for providers that have a part of their own which does them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from skerry.providers.base import HasImages, Image, ImageBuild, OnProgress


class ImageVerbs:
    @cached_property
    def _images(self) -> HasImages:
        raise NotImplementedError

    async def images(self) -> Sequence[Image]:
        return await self._images.images()

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        return await self._images.build_image(build, on_progress)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        return await self._images.pull_image(name, on_progress)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        return await self._images.import_image(source, name, on_progress)

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        await self._images.remove_image(name, force=force)
