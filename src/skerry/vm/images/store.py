"""Images for machines in a cache folder: found by their names, and by ids that change with every byte."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from pathlib import Path

import msgspec

from skerry.errors import Conflict, ImageNotFound, ProviderError
from skerry.progress import OnProgress, Progress
from skerry.sources.configs import Asked
from skerry.vm.base import Kernel
from skerry.vm.images import debian, minimal, recipes, writing
from skerry.vm.images.kernels import KernelStore, busybox
from skerry.vm.images.names import Names
from skerry.vm.images.recipes import Recipe
from skerry.vm.images.shelf import Shelf

_ABOUT = "image.json"
_ROOTFS = "rootfs.ext4"
_DIGEST = "sha256:"
_SHORTEST_ID = 12
_CHANGING = "a change of names"
_BUILD_S = 3600.0
_BRIEF_S = 60.0


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an image."""

    id: str
    names: tuple[str, ...] = ()
    env: dict[str, str] = {}
    user: str = ""
    cwd: str = ""
    size: int
    created_at: float
    kernel: str = ""
    """The version of the kernel that it has modules of, and so needs; else any will do."""
    source: str = ""
    """What it was made of, in words."""
    recipe: str = ""
    """A digest of the recipe that it was made by."""
    content: str = ""
    """A digest of the file system."""
    written_at_ns: int = 0
    """Of its file: if that is another by now, somebody has touched it."""


class VmImage(msgspec.Struct, frozen=True, kw_only=True):
    """All that a machine needs of an image."""

    id: str
    names: tuple[str, ...]
    rootfs: Path
    kernel: Kernel
    env: dict[str, str]
    user: str
    cwd: str
    size: int
    created_at: float


class ImageStore:
    """Several processes may share one. Whatever dies in the middle leaves nothing that is taken for an image."""

    def __init__(self, cache: Path) -> None:
        self.kernels = KernelStore(cache)
        self._shelf = Shelf(cache / "images")
        self._names = Names(cache / "names")

    def all(self) -> list[ImageInfo]:
        """The newest first."""
        named = self._names.by_id()
        found = []
        for path in self._shelf.folder.glob(f"[!.]*/{_ABOUT}"):
            info = _read(path)
            if info is not None and info.id == f"{_DIGEST}{path.parent.name}":
                found.append(msgspec.structs.replace(info, names=tuple(sorted(named.get(info.id, ())))))
        return sorted(found, key=lambda info: info.created_at, reverse=True)

    def find(self, name: str) -> ImageInfo:
        """By a name, an id or the beginning of one. Raises ImageNotFound."""
        id = name if name.startswith(_DIGEST) else f"{_DIGEST}{name}"
        for info in self.all():
            if name in info.names or (len(name) >= _SHORTEST_ID and info.id.startswith(id)):
                return info
        made = f"`skerry image build --vm --recipe {name}`" if name in recipes.RECIPES else "`skerry image build --vm`"
        raise ImageNotFound(f"no image for machines is called {name!r}: make it with {made} or `skerry image import`")

    async def resolve(self, name: str) -> VmImage:
        """What a machine boots. Raises ImageNotFound, or ProviderError for one that is damaged."""
        info = self.find(name)
        if not await self._is_whole(info):
            raise ProviderError(f"the image {name} is damaged: make it again, by the same name")
        kernel = await self.kernels.get(info.kernel)
        return VmImage(
            id=info.id,
            names=info.names,
            rootfs=self._folder(info.id) / _ROOTFS,
            kernel=kernel,
            env=info.env,
            user=info.user,
            cwd=info.cwd,
            size=info.size,
            created_at=info.created_at,
        )

    async def build_recipe(self, name: str, recipe: str, on_progress: OnProgress, *, again: bool = False) -> ImageInfo:
        """Make an image by a recipe, or give a name to one that was, unless it is to be made `again`."""
        self._names.check(name)
        chosen = recipes.find(recipe)
        kernel = await self.kernels.get_or_fetch(on_progress)
        key = chosen.key(kernel.version)
        async with self._shelf.locked(f"the recipe {recipe} ({key})", _BUILD_S):
            made = next((info for info in self.all() if info.recipe == key), None)
            if made is not None and not again and await self._is_whole(made):
                return await self._named(made, name)
            with self._shelf.aside() as scratch:
                await self._cook(chosen, kernel, scratch, on_progress)
                version = kernel.version if chosen.modules and not kernel.own else ""
                asked = Asked(env=chosen.env)
                return await self._put(scratch, name, asked, f"recipe {recipe}", recipe=key, kernel=version)

    async def import_(self, source: Path, name: str, on_progress: OnProgress) -> ImageInfo:
        """From an image archive, an OCI layout or a root file system, each a folder or a tar."""
        self._names.check(name)
        await self.kernels.get_or_fetch(on_progress)
        on_progress(Progress(f"looking at {source.name}"))
        with self._shelf.aside() as scratch:
            tell = writing.told_from_thread(on_progress)
            write = partial(writing.from_source, source, scratch / _ROOTFS, lambda found: found, tell)
            asked = await writing.in_thread(write)
            return await self._put(scratch, name, asked, str(source.absolute()))

    async def remove(self, name: str, *, force: bool = False) -> None:
        """A name, and the image with its last one. By its id one with several names goes only by `force`."""
        info = self.find(name)
        async with self._shelf.locked(_CHANGING, _BRIEF_S):
            if name in info.names and not force and len(info.names) > 1:
                self._names.remove(name)
                return
            if len(info.names) > 1 and not force:
                raise Conflict(f"{name} has several names ({', '.join(info.names)}): remove those, or use force")
            for each in info.names:
                self._names.remove(each)
            with self._shelf.aside() as scratch:
                self._folder(info.id).rename(scratch / "gone")

    async def _cook(self, recipe: Recipe, kernel: Kernel, scratch: Path, on_progress: OnProgress) -> None:
        made, tell = scratch / _ROOTFS, writing.told_from_thread(on_progress)
        if not recipe.suite:
            entries = minimal.root(await busybox(scratch, on_progress))
            await writing.in_thread(partial(writing.from_entries, entries, made, "writing", tell))
            return
        tar, modules = scratch / "root.tar", None
        if recipe.modules and not kernel.own:
            modules = scratch / "modules"
            debian.copy_modules(self.kernels.modules(kernel.version), modules / kernel.version, recipe.modules)
        await debian.make(recipe, tar, modules, on_progress)
        await writing.in_thread(partial(writing.from_source, tar, made, partial(debian.trimmed, recipe), tell))

    async def _put(
        self, scratch: Path, name: str, asked: Asked, source: str, *, recipe: str = "", kernel: str = ""
    ) -> ImageInfo:
        rootfs = scratch / _ROOTFS
        rootfs.chmod(0o444)
        content = await writing.in_thread(partial(writing.digest, rootfs))
        identity = msgspec.json.encode((content, sorted(asked.env.items()), asked.user, asked.folder, kernel))
        status = rootfs.stat()
        info = ImageInfo(
            id=f"{_DIGEST}{hashlib.sha256(identity).hexdigest()}",
            env=asked.env,
            user=asked.user,
            cwd=asked.folder,
            size=status.st_size,
            created_at=time.time(),
            kernel=kernel,
            source=source,
            recipe=recipe,
            content=content,
            written_at_ns=status.st_mtime_ns,
        )
        folder = scratch / "image"
        folder.mkdir(mode=0o755)
        rootfs.rename(folder / _ROOTFS)
        (folder / _ABOUT).write_bytes(msgspec.json.encode(info))
        async with self._shelf.locked(_CHANGING, _BRIEF_S):
            place = self._folder(info.id)
            there = _read(place / _ABOUT)
            if there is None or not await self._is_whole(there):
                if place.exists():
                    place.rename(scratch / "damaged")
                self._shelf.put(folder, place.name)
            self._names.put(name, info.id)
        return self.find(info.id)

    async def _named(self, info: ImageInfo, name: str) -> ImageInfo:
        async with self._shelf.locked(_CHANGING, _BRIEF_S):
            self._names.put(name, info.id)
        return self.find(info.id)

    async def _is_whole(self, info: ImageInfo) -> bool:
        """Told by its size and time; where those are others, each byte counts."""
        path = self._folder(info.id) / _ROOTFS
        try:
            status = path.stat()
        except OSError:
            return False
        if status.st_size != info.size:
            return False
        return status.st_mtime_ns == info.written_at_ns or (
            await writing.in_thread(partial(writing.digest, path)) == info.content
        )

    def _folder(self, id: str) -> Path:
        return self._shelf.folder / id.removeprefix(_DIGEST)


def _read(path: Path) -> ImageInfo | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ImageInfo)
    except (OSError, msgspec.MsgspecError):
        return None
