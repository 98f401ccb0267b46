"""Images and kernels for sandboxes, of any provider that has them; the registry knows nothing of them."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import msgspec

from skerry import providers
from skerry.config import Config
from skerry.errors import ConfigError, InvalidSpec, ProviderUnavailable, SkerryError, Unsupported
from skerry.manager.providers import Providers
from skerry.model.spec import Network
from skerry.providers.base import (
    BuildsArchives,
    Capability,
    HasImages,
    HasKernels,
    Image,
    ImageBuild,
    Isolation,
    OnProgress,
    Progress,
    Provider,
)
from skerry.units import parse_size

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelInfo, KernelStore

_log = logging.getLogger("skerry.manager")


class BuildOptions(TypedDict, total=False):
    """The keywords of `build_base_image` that say how."""

    name: str | None
    context: str | os.PathLike[str] | None
    args: Mapping[str, str] | None
    target: str | None
    no_cache: bool
    recipe: str | None
    network: str
    memory: int | str | None


class Images:
    """Images and kernels of providers; a name of None is the configuration's provider."""

    def __init__(self, config: Config, providers: Providers) -> None:
        self._config = config
        self._providers = providers

    async def build(self, build: ImageBuild, provider: str | None, builder: str | None, tell: OnProgress) -> Image:
        """Build an image, or have `builder` do so and import what comes of it."""
        chosen = self.of(provider)
        own = cast("Provider", chosen)
        is_by_engine = builder is not None or (not build.recipe and own.needs_builder)
        if builder == own.name or not is_by_engine:
            return await chosen.build_image(build, tell)
        engine = await self._builder(own.name, builder)
        there = f"skerry-machine:{hashlib.sha256(build.name.encode()).hexdigest()[:12]}"
        with tempfile.TemporaryDirectory(prefix="skerry-image-") as folder:
            archive = Path(folder, "image.tar")
            await engine.build_archive(msgspec.structs.replace(build, name=there), archive, tell)
            return await chosen.import_image(archive, build.name, tell)

    async def fetch_kernel(self, provider: str | None, tell: OnProgress) -> KernelInfo:
        store = self.kernels(provider)
        return store.find((await store.fetch(tell, again=True)).key)

    async def build_kernel(self, provider: str | None, tell: OnProgress) -> KernelInfo:
        store = self.kernels(provider)
        return store.find((await store.build_own(tell)).key)

    def of(self, name: str | None) -> HasImages:
        """The provider as one whose boxes are made of images. Raises Unsupported if they are not."""
        chosen = self._providers.get(name or self._config.provider)
        if Capability.IMAGES not in chosen.capabilities:
            others = ", ".join(_those_with_images()) or "none that is installed"
            reason = f"its boxes are not made of images. Choose a provider whose boxes are, with `--provider`: {others}"
            raise Unsupported("images", chosen.name, reason)
        return cast("HasImages", chosen)

    def kernels(self, name: str | None) -> KernelStore:
        """The kernels of a provider of machines. Raises Unsupported if its boxes have the host's."""
        chosen = self._providers.get(name or self._config.provider)
        if not hasattr(chosen, "kernels"):
            raise Unsupported("kernels", chosen.name, "its boxes have the host's: choose one of machines, or say --vm")
        return cast("HasKernels", chosen).kernels

    async def _builder(self, asker: str, name: str | None) -> BuildsArchives:
        """The one that is named, or the first that answers and gives out what it built."""
        able = [each for each in _those_with_images() if hasattr(providers.provider_class(each), "build_archive")]
        if name is not None and name not in able:
            raise Unsupported("builder", asker, f"{name} builds nothing from a Dockerfile; these do: {', '.join(able)}")
        if name is not None:
            return cast("BuildsArchives", self._providers.get(name))
        for name in able:
            if providers.provider_class(name).isolation is Isolation.CONTAINER:
                engine = cast("BuildsArchives", self._providers.get(name))
                try:
                    await engine.check_builder()
                except ProviderUnavailable as error:
                    _log.debug("builder %s is passed over: %s", name, error)
                    continue
                return engine
        recipes = "`skerry image build --vm --recipe NAME`, or "
        reason = (
            f"{asker} builds nothing from a Dockerfile itself, and there is no builder here. Start Docker or Podman, "
            "install Podman or Buildah, or take another way: "
            f"{recipes if hasattr(providers.provider_class(asker), 'kernels') else ''}"
            "`skerry image import` of an archive that was built elsewhere"
        )
        raise Unsupported("dockerfile", asker, reason)


def provider_of_machines(config: Config) -> str:
    """The configured provider if its boxes are machines with images, else the one that has settings, else the first
    that there is: all share a cache, unless they have settings. Raises Unsupported, or ConfigError where several have
    settings and keep their images apart."""
    found = [name for name in _those_with_images() if hasattr(providers.provider_class(name), "kernels")]
    if not found:
        raise Unsupported("images for machines", config.provider, "no provider of machines is installed")
    if config.provider in found:
        return config.provider
    chosen = [name for name in found if name in config.providers]
    if len({config.providers[name].get("cache_dir", "") for name in chosen}) > 1:
        reason = "do not share a cache_dir: say whose images with --provider, or SKERRY_PROVIDER"
        raise ConfigError(f"{' and '.join(f'providers.{name}' for name in chosen)} {reason}")
    return [*chosen, *found][0]


def _those_with_images() -> list[str]:
    found = []
    for name in providers.names():
        try:
            capabilities = providers.provider_class(name).capabilities
        except SkerryError as error:  # it lacks a package of its own
            _log.debug("provider %s is passed over: %s", name, error)
            continue
        if Capability.IMAGES in capabilities:
            found.append(name)
    return found


def build_of(dockerfile: str | Path, options: BuildOptions) -> ImageBuild:
    """The build that is asked for. Raises InvalidSpec."""
    network, memory, context = options.get("network", "none"), options.get("memory"), options.get("context")
    if network not in list(Network):
        raise InvalidSpec(f"network: {network!r} is neither none nor bridge", field="network")
    text, recipe = _dockerfile_text(dockerfile), options.get("recipe") or ""
    return ImageBuild(
        dockerfile=text,
        recipe=recipe,
        name=options.get("name") or recipe or f"skerry-base:{hashlib.sha256(text.encode()).hexdigest()[:12]}",
        context=None if context is None else Path(context),
        args=dict(options.get("args") or {}),
        target=options.get("target"),
        no_cache=options.get("no_cache", False),
        network=Network(network),
        memory=None if memory is None else parse_size(memory, "memory"),
    )


def _dockerfile_text(dockerfile: str | Path) -> str:
    """The text itself, or that of a file. Raises InvalidSpec if it cannot be read."""
    if isinstance(dockerfile, str):
        return dockerfile
    try:
        return dockerfile.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidSpec(f"the Dockerfile {dockerfile} cannot be read: {reason}", field="dockerfile") from error


def silent(_: Progress) -> None:
    """Progress that nobody wants to hear of."""
