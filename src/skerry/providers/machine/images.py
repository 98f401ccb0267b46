"""Images of machines: what boxes are made of, and the verbs of images. All providers that share a cache share them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from skerry.errors import Conflict, ImageNotFound, NotFound, SkerryError, Unsupported
from skerry.providers.base import Enforcement, Image, ImageBuild, OnProgress
from skerry.providers.machine.boxes import all_metas
from skerry.vm.base import Drive, Kernel
from skerry.vm.images import disks
from skerry.vm.images.store import ImageInfo, ImageStore, VmImage

_log = logging.getLogger("skerry.providers")

DEFAULT = "minimal"
"""Image of a box that asks for none."""
_SMALLEST = 1 << 20
_FEW = 5


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Image of a box, and the agent's drive that goes with it."""

    asked: str
    image: VmImage
    runtime_key: str
    runtime: Path

    @property
    def drives(self) -> tuple[Drive, ...]:
        """Read-only drives that every machine of it has."""
        return (
            Drive(name="root", path=str(self.image.rootfs), read_only=True),
            Drive(name="runtime", path=str(self.runtime), read_only=True),
        )

    @property
    def contents(self) -> tuple[str, ...]:
        return self.image.id, self.runtime_key

    def told(self) -> Enforcement:
        return Enforcement(by=f"{self.asked} at {self.image.id.removeprefix('sha256:')[:12]}")


class Sources:
    """Images with their kernels, the agent's drive, and blank disks, in a cache folder."""

    def __init__(self, cache: Path, kernel: Path | None = None) -> None:
        self.store = ImageStore(cache, kernel)
        self._cache = cache
        self._kernel: Kernel | None = None

    def kernel(self) -> Kernel | None:
        """Kernel to probe a hypervisor with; None if none has been found yet."""
        return self._kernel

    async def find_kernel(self) -> None:
        """Look for a kernel to probe a hypervisor with."""
        if self._kernel is None:
            try:
                self._kernel = await self.store.kernel()
            except NotFound as error:
                _log.debug("no kernel to probe a hypervisor with: %s", error)

    async def find(self, name: str | None, *, has_python: bool = True) -> Source:
        """Source of a name, an id or a path; without `has_python` of one that brings the agent's interpreter. Its
        kernel is as good as any to probe a hypervisor with. Raises ImageNotFound, or InvalidSpec for a path."""
        asked = DEFAULT if name is None else name
        image = await self.store.resolve(asked)
        self._kernel = self._kernel or image.kernel
        if not (has_python or image.brings_python):
            raise ImageNotFound(f"the image {asked} brings no interpreter for the agent: build it again, on Linux")
        key, runtime = await disks.runtime_disk(self._cache, has_python=has_python)
        return Source(asked=asked, image=image, runtime_key=key, runtime=runtime)

    async def blank(self, size: int = _SMALLEST, *, journal: bool = False) -> Path:
        """Path of an empty disk, to be copied or put a layer on; without a size, a placeholder."""
        return await disks.blank_disk(self._cache, size, journal=journal)

    def ids(self) -> dict[str, str]:
        """Id of the image that each name means now."""
        return {name: info.id for info in self.store.all() for name in info.names}

    async def told(self) -> Enforcement:
        """Image of boxes that ask for none, for people."""
        try:
            return (await self.find(None)).told()
        except SkerryError as error:
            return Enforcement(why_not=str(error))


class MachineImages:
    """Verbs of images: those in a cache folder, with the boxes of a state folder that are made of them."""

    def __init__(self, cache: Path, state_dir: Path, kernel: Path | None = None) -> None:
        self.store = ImageStore(cache, kernel)
        self._state_dir = state_dir

    async def images(self) -> Sequence[Image]:
        """All images, the newest first."""
        users = self._users()
        return [_image(info, users) for info in self.store.all()]

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        """Build by a recipe. Raises Unsupported for a Dockerfile: an engine builds that, and its image is imported."""
        if not build.recipe:
            reason = "machines build none: Docker or Podman does, and `skerry image import` takes what it made"
            raise Unsupported("dockerfile", "machines", reason)
        info = await self.store.build_recipe(build.name, build.recipe, on_progress, again=build.no_cache)
        return _image(info, self._users())

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        reason = (
            "a machine's image comes from no registry: `skerry image build --vm --recipe NAME` makes one, and "
            f"`skerry image import` takes what `docker save {name}` writes"
        )
        raise Unsupported("image pull", "machines", reason)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        return _image(await self.store.import_(source, name, on_progress), self._users())

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        """Raises Conflict while a box is made of it, forced or not: that could not be started again."""
        info = self.store.find(name)
        users = self._users().get(info.id, [])
        if users and (force or len(info.names) < 2 or name not in info.names):
            more = f" and {len(users) - _FEW} more" if len(users) > _FEW else ""
            raise Conflict(
                f"the image {name} is used by {', '.join(users[:_FEW])}{more}: end them first, with `skerry rm`"
            )
        await self.store.remove(name, force=force)

    def _users(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for id, meta in all_metas(self._state_dir):
            found.setdefault(meta.image, []).append(id)
        return found


def _image(info: ImageInfo, users: Mapping[str, list[str]]) -> Image:
    used_by = len(users.get(info.id, ()))
    return Image(id=info.id, names=info.names, size=info.size, created_at=info.created_at, used_by=used_by)
