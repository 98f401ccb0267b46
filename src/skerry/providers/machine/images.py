"""The images that machines boot: all providers of machines that share a cache folder share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from skerry.errors import Conflict, Unsupported
from skerry.providers.base import Image, ImageBuild, OnProgress
from skerry.providers.machine.boxes import all_boxes
from skerry.vm.images.store import ImageInfo, ImageStore

_FEW = 5


class MachineImages:
    """Those in a cache folder, and how many of the boxes in a state folder are made of each."""

    def __init__(self, cache: Path, state_dir: Path) -> None:
        self.store = ImageStore(cache)
        self._state_dir = state_dir

    async def images(self) -> Sequence[Image]:
        """All there are, the newest first."""
        users = self._users()
        return [_image(info, users) for info in self.store.all()]

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        """By a recipe. What a Dockerfile makes is built by an engine and imported then."""
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
        """What a box is made of stays, whatever is asked: it could not be started again."""
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
        for box in all_boxes(self._state_dir):
            meta = box.read_meta()
            if meta is not None:
                found.setdefault(meta.image, []).append(box.id)
        return found


def _image(info: ImageInfo, users: Mapping[str, list[str]]) -> Image:
    return Image(
        id=info.id,
        names=info.names,
        size=info.size,
        created_at=info.created_at,
        used_by=len(users.get(info.id, ())),
    )
