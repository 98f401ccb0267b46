"""What machines are made of: images with their kernels, the drive with the agent, and disks to begin with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from skerry.errors import NotFound, SkerryError
from skerry.providers.base import Enforcement
from skerry.vm.base import Drive, Kernel
from skerry.vm.images import disks
from skerry.vm.images.store import ImageStore, VmImage

DEFAULT = "minimal"
"""The image of a box that asks for none."""
_SMALLEST = 1 << 20


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """An image, and the agent that goes with it."""

    asked: str
    image: VmImage
    runtime_key: str
    runtime: Path

    @property
    def drives(self) -> tuple[Drive, ...]:
        """What every machine of it has and none can change."""
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
    def __init__(self, cache: Path) -> None:
        self.store = ImageStore(cache)
        self._cache = cache
        self._kernel: Kernel | None = None

    def kernel(self) -> Kernel | None:
        """One to try a hypervisor with; None if none has been found yet."""
        return self._kernel

    async def find_kernel(self) -> None:
        """Look for a kernel; without one there is nothing to try a hypervisor with."""
        if self._kernel is None:
            with suppress(NotFound):
                self._kernel = await self.store.kernels.get()

    async def find(self, name: str | None) -> Source:
        """By a name or an id. Raises ImageNotFound."""
        asked = DEFAULT if name is None else name
        image = await self.store.resolve(asked)
        key, runtime = await disks.runtime_disk(self._cache)
        return Source(asked=asked, image=image, runtime_key=key, runtime=runtime)

    async def blank(self, size: int = _SMALLEST, *, journal: bool = False) -> Path:
        """An empty disk, to be copied or put a layer on; without a size, one that is only there to be there."""
        return await disks.blank_disk(self._cache, size, journal=journal)

    def ids(self) -> dict[str, str]:
        """Which image each name means now."""
        return {name: info.id for info in self.store.all() for name in info.names}

    async def told(self) -> Enforcement:
        """For people: whether there is an image for boxes that ask for none."""
        try:
            return (await self.find(None)).told()
        except SkerryError as error:
            return Enforcement(why_not=str(error))
