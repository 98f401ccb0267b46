"""Images for sandboxes, by way of any provider that has them; the registry knows nothing of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from skerry import providers
from skerry.core import ManagerCore
from skerry.errors import InvalidSpec, ProviderUnavailable, SkerryError, Unsupported
from skerry.providers.base import (
    Capability,
    ExportsImages,
    HasImages,
    HasKernels,
    Image,
    ImageBuild,
    OnProgress,
    Progress,
    Provider,
)

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelInfo


class ImageMethods(ManagerCore):
    """`provider` names one whose boxes are made of images; without it the configuration does."""

    async def images(self, *, provider: str | None = None) -> Sequence[Image]:
        """All that sandboxes can be made of, the newest first."""
        return await self._with_images(provider).images()

    async def build_base_image(
        self,
        dockerfile: str | Path = "",
        *,
        name: str | None = None,
        context: str | os.PathLike[str] | None = None,
        args: Mapping[str, str] | None = None,
        target: str | None = None,
        no_cache: bool = False,
        recipe: str | None = None,
        provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Build an image from the text of a Dockerfile, or from the file at a Path; for machines also by a `recipe`.

        Without a `context` its COPY finds nothing; without a `name` it is called after the text or the recipe. For
        machines Docker or Podman runs the Dockerfile, and what comes of it is imported.
        """
        text = _text(dockerfile)
        build = ImageBuild(
            dockerfile=text,
            recipe=recipe or "",
            name=name or recipe or f"skerry-base:{hashlib.sha256(text.encode()).hexdigest()[:12]}",
            context=None if context is None else Path(context),
            args=dict(args or {}),
            target=target,
            no_cache=no_cache,
        )
        chosen = self._with_images(provider)
        tell = on_progress or _silent
        if recipe is None and hasattr(chosen, "kernels"):
            return await self._built_elsewhere(build, chosen, tell)
        return await chosen.build_image(build, tell)

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

    async def kernels(self, *, provider: str | None = None) -> Sequence[KernelInfo]:
        """What machines boot: our own first, then the newest."""
        return self._with_kernels(provider).kernels.all()

    async def fetch_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        """Get the newest of Debian's kernels for machines."""
        store = self._with_kernels(provider).kernels
        return store.find((await store.fetch(on_progress or _silent, again=True)).key)

    async def build_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        """Build a kernel for machines from Debian's source, which takes long; it boots faster and needs no modules."""
        from skerry.vm.images import own_kernel

        store = self._with_kernels(provider).kernels
        return store.find((await own_kernel.build(store, on_progress or _silent)).key)

    async def remove_kernel(self, key: str, *, provider: str | None = None) -> None:
        """Machines that run keep what they have read of it."""
        self._with_kernels(provider).kernels.remove(key)

    async def _built_elsewhere(self, build: ImageBuild, chosen: HasImages, on_progress: OnProgress) -> Image:
        engine = await self._engine(cast("Provider", chosen).name)
        there = f"skerry-machine:{hashlib.sha256(build.name.encode()).hexdigest()[:12]}"
        await engine.build_image(msgspec.structs.replace(build, name=there), on_progress)
        with tempfile.TemporaryDirectory(prefix="skerry-image-") as folder:
            archive = Path(folder, "image.tar")
            await cast("ExportsImages", engine).export_image(there, archive, on_progress)
            return await chosen.import_image(archive, build.name, on_progress)

    async def _engine(self, asker: str) -> HasImages:
        """The first that answers and gives out what it built."""
        for name in _those_with_images():
            if hasattr(providers.provider_class(name), "export_image"):
                engine = self.provider(name)
                try:
                    await engine.check()
                except ProviderUnavailable:
                    continue
                return cast("HasImages", engine)
        reason = (
            "Docker or Podman builds what a Dockerfile says, and none answers here. Start one, or take another way: "
            "`skerry image build --vm --recipe NAME`, or `skerry image import` of an archive that was built elsewhere"
        )
        raise Unsupported("dockerfile", asker, reason)

    def _with_images(self, name: str | None) -> HasImages:
        chosen = self.provider(name or self.config.provider)
        if Capability.IMAGES not in chosen.capabilities:
            others = ", ".join(_those_with_images()) or "none that is installed"
            reason = f"its boxes are not made of images. Choose a provider whose boxes are, with `--provider`: {others}"
            raise Unsupported("images", chosen.name, reason)
        return cast("HasImages", chosen)

    def _with_kernels(self, name: str | None) -> HasKernels:
        chosen = self.provider(name or self.config.provider)
        if not hasattr(chosen, "kernels"):
            raise Unsupported("kernels", chosen.name, "its boxes have the host's: choose one of machines, or say --vm")
        return cast("HasKernels", chosen)


def provider_of_machines(configured: str) -> str:
    """The configured provider if its boxes are machines with images, else the first that there is."""
    found = [name for name in _those_with_images() if hasattr(providers.provider_class(name), "kernels")]
    if not found:
        raise Unsupported("images for machines", configured, "no provider of machines is installed")
    return configured if configured in found else found[0]


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
