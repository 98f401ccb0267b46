"""Images for sandboxes, by way of any provider that has them; the registry knows nothing of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from skerry import providers
from skerry.core import ManagerCore
from skerry.errors import InvalidSpec, SkerryError, Unsupported
from skerry.providers.base import Capability, HasImages, Image, ImageBuild, OnProgress, Progress


class ImageMethods(ManagerCore):
    """`provider` names one whose boxes are made of images; without it the configuration does."""

    async def images(self, *, provider: str | None = None) -> Sequence[Image]:
        """All that sandboxes can be made of, the newest first."""
        return await self._with_images(provider).images()

    async def build_base_image(
        self,
        dockerfile: str | Path,
        *,
        name: str | None = None,
        context: str | os.PathLike[str] | None = None,
        args: Mapping[str, str] | None = None,
        target: str | None = None,
        no_cache: bool = False,
        provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Build an image from the text of a Dockerfile, or from the file at a Path.

        Without a `context` its COPY finds nothing; without a `name` it is called after the text.
        """
        text = _text(dockerfile)
        build = ImageBuild(
            dockerfile=text,
            name=name or f"skerry-base:{hashlib.sha256(text.encode()).hexdigest()[:12]}",
            context=None if context is None else Path(context),
            args=dict(args or {}),
            target=target,
            no_cache=no_cache,
        )
        return await self._with_images(provider).build_image(build, on_progress or _silent)

    async def pull_image(
        self, name: str, *, provider: str | None = None, on_progress: OnProgress | None = None
    ) -> Image:
        """Get an image from its registry."""
        return await self._with_images(provider).pull_image(name, on_progress or _silent)

    async def import_image(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Make an image of an image archive, an OCI layout or a root file system; each may be a folder or a tar."""
        return await self._with_images(provider).import_image(Path(source), name, on_progress or _silent)

    async def remove_image(self, name: str, *, force: bool = False, provider: str | None = None) -> None:
        """Raises Conflict, which names the sandboxes, while one is made of it. `force` takes all its names."""
        await self._with_images(provider).remove_image(name, force=force)

    def _with_images(self, name: str | None) -> HasImages:
        chosen = self.provider(name or self.config.provider)
        if Capability.IMAGES not in chosen.capabilities:
            others = ", ".join(_those_with_images()) or "none that is installed"
            reason = f"its boxes are not made of images. Choose a provider whose boxes are, with `--provider`: {others}"
            raise Unsupported("images", chosen.name, reason)
        return cast("HasImages", chosen)


def _those_with_images() -> list[str]:
    found = []
    for name in providers.names():
        try:
            capabilities = providers.provider_class(name).capabilities
        except SkerryError:
            continue  # it lacks a package of its own
        if Capability.IMAGES in capabilities:
            found.append(name)
    return found


def _text(dockerfile: str | Path) -> str:
    if isinstance(dockerfile, str):
        return dockerfile
    try:
        return dockerfile.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidSpec(f"the Dockerfile {dockerfile} cannot be read: {reason}", field="dockerfile") from error


def _silent(_: Progress) -> None:
    return
