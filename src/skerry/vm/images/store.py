"""Store of images for machines in a cache folder: found by their names, and by ids that change with every byte."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from skerry.errors import ConfigError, Conflict, ImageNotFound, InvalidSpec, ProviderError
from skerry.host import folders, sparse
from skerry.model.results import OnProgress, Progress
from skerry.oci import packing, roots, stores
from skerry.oci.archives import ImageSettings
from skerry.oci.roots import Entry
from skerry.vm.base import Kernel
from skerry.vm.images import debian, ext4, recipes, tree
from skerry.vm.images.artifact_cache import ArtifactCache, read_note, stamp_of
from skerry.vm.images.kernels import KernelStore, busybox
from skerry.vm.images.recipes import Recipe

_log = logging.getLogger("skerry.vm")

_Change = Callable[[Sequence[Entry]], Sequence[Entry]]
_ABOUT = "image.json"
_ROOTFS = "rootfs.ext4"
_DIGEST = "sha256:"
_CHANGING = "a change of names"
_BRIEF_S = 60.0
_COPY_S = 3600.0
_MAX_PATH = 240
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")


class _Image(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    names: tuple[str, ...] = ()
    env: dict[str, str] = {}
    user: str = ""
    cwd: str = ""
    command: tuple[str, ...] = ()
    size: int
    created_at: float
    brings_python: bool = False
    """Whether the agent's interpreter is in it."""


class ImageInfo(_Image, frozen=True, kw_only=True):
    """Record of an image."""

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


class VmImage(_Image, frozen=True, kw_only=True):
    """An image as a machine boots it."""

    rootfs: Path
    kernel: Kernel


class ImageStore:
    """Images by name and id. Several processes may share it; who dies in the middle leaves nothing that counts."""

    def __init__(self, cache: Path, kernel: Path | None = None) -> None:
        """`kernel` is a file of the user's, which machines boot instead of the cache's kernels."""
        self.kernels = KernelStore(cache)
        self._kernel_files = KernelStore(cache, "kernel-files")
        self._kernel_file = kernel
        self._cache = ArtifactCache(cache / "images")
        self._names = Names(cache / "names")
        self._stamps = Names(cache / "stamps")

    def all(self) -> list[ImageInfo]:
        """All images, the newest first."""
        named = self._names.by_id()
        found = []
        for path in self._cache.folder.glob(f"[!.]*/{_ABOUT}"):
            info = read_note(path, ImageInfo)
            if info is not None and info.id == f"{_DIGEST}{path.parent.name}":
                found.append(msgspec.structs.replace(info, names=tuple(sorted(named.get(info.id, ())))))
        return sorted(found, key=lambda info: info.created_at, reverse=True)

    def find(self, name: str) -> ImageInfo:
        """Find an image by a name, an id or the beginning of one. Raises ImageNotFound."""
        id = name if name.startswith(_DIGEST) else f"{_DIGEST}{name}"
        for info in self.all():
            if name in info.names or (len(name) >= 12 and info.id.startswith(id)):
                return info
        made = f"`skerry image build --vm --recipe {name}`" if name in recipes.RECIPES else "`skerry image build --vm`"
        raise ImageNotFound(f"no image for machines is called {name!r}: make it with {made} or `skerry image import`")

    async def resolve(self, name: str) -> VmImage:
        """Find what a machine boots, by a name or an id, or by the path of a file system. Raises ImageNotFound,
        InvalidSpec for a path that leads to none, or ProviderError for an image that is damaged."""
        info = await self._of_file(Path(name)) if name.startswith("/") else self.find(name)
        if not await self._is_whole(info):
            raise ProviderError(f"the image {name} is damaged: make it again, by the same name")
        kernel = await self.kernel(info.kernel)
        same = {field: getattr(info, field) for field in _Image.__struct_fields__}
        return VmImage(rootfs=self._folder(info.id) / _ROOTFS, kernel=kernel, **same)

    async def kernel(self, version: str = "") -> Kernel:
        """Kernel to boot, of that version if it is given. Raises NotFound, ConfigError or ProviderError."""
        if self._kernel_file is None:
            return await self.kernels.get(version)
        try:
            found = await self._kernel_files.from_file(self._kernel_file)
        except InvalidSpec as error:
            raise ConfigError(f"the setting {error}") from error
        if version not in ("", found.version):
            reason = f"the image has modules of the kernel {version}, and {self._kernel_file} is {found.version}"
            raise ProviderError(f"{reason}: leave the setting `kernel` out for it")
        return found

    async def build_recipe(self, name: str, recipe: str, on_progress: OnProgress, *, again: bool = False) -> ImageInfo:
        """Make an image by a recipe, or give a name to one that was, unless it is to be made `again`."""
        self._names.check(name)
        chosen = recipes.find(recipe)
        kernel = await self.kernels.get_or_fetch(on_progress)
        key = chosen.key(kernel.version)
        async with self._cache.locked(f"the recipe {recipe} ({key})", 3600.0):
            made = next((info for info in self.all() if info.recipe == key), None)
            if made is not None and not again and await self._is_whole(made):
                async with self._cache.locked(_CHANGING, _BRIEF_S):
                    self._names.put(name, made.id)
                return self.find(made.id)
            with self._cache.aside() as scratch:
                await self._cook(chosen, kernel, scratch, on_progress)
                version = kernel.version if chosen.modules and not kernel.own else ""
                asked = ImageSettings(env=chosen.env)
                origin = f"recipe {recipe}"
                brings = chosen.brings_python
                return await self._put(scratch, name, asked, origin, recipe=key, kernel=version, brings_python=brings)

    async def import_(self, source: Path, name: str, on_progress: OnProgress) -> ImageInfo:
        """Import an image archive, an OCI layout or a root file system: each a folder or a tar, the last also as a file
        with an ext4 file system. Raises InvalidSpec or ProviderError."""
        self._names.check(name)
        if self._kernel_file is None:
            await self.kernels.get_or_fetch(on_progress)
        on_progress(Progress(f"looking at {source.name}"))
        if await asyncio.to_thread(ext4.is_one, source):
            return await self._copy(source.absolute(), name)
        with self._cache.aside() as scratch:
            tell = _progress_from_thread(on_progress)
            write = partial(_write_source, source, scratch / _ROOTFS, lambda found: found, tell)
            asked = await packing.in_thread(write)
            return await self._put(scratch, name, asked, str(source.absolute()))

    async def _of_file(self, path: Path) -> ImageInfo:
        """Image of a file system by its path, which is its name: a copy, made when it is first asked for and whenever
        the file has changed since."""
        if len(quote(str(path), safe="")) > _MAX_PATH:
            raise InvalidSpec(f"image: the path {path} is too long: import it under a name", field="image")
        async with self._cache.locked(f"the file {path}", _COPY_S):
            known = self._stamps.get(await _stamp(path))
            made = next((info for info in self.all() if info.id == known), None)
            if made is None or not await self._is_whole(made):
                return await self._copy(path, str(path))
            if str(path) not in made.names:
                self._names.put(str(path), made.id)
            return made

    async def _copy(self, source: Path, name: str) -> ImageInfo:
        """Make an image of a file with a file system. Nobody writes to the file, nor to the copy."""
        stamp = await _stamp(source)
        with self._cache.aside() as scratch:
            await packing.in_thread(partial(_copy_root, source, scratch / _ROOTFS))
            if await _stamp(source) != stamp:
                raise ProviderError(f"{source} was changed while it was read: try again once nobody writes to it")
            made = await self._put(scratch, name, ImageSettings(), str(source))
            self._stamps.put(stamp, made.id)
            return made

    async def remove(self, name: str, *, force: bool = False) -> None:
        """Remove a name, and the image with its last one. Raises Conflict for the id of one with several names."""
        info = self.find(name)
        async with self._cache.locked(_CHANGING, _BRIEF_S):
            if len(info.names) > 1 and not force:
                if name in info.names:
                    self._names.remove(name)
                    return
                raise Conflict(f"{name} has several names ({', '.join(info.names)}): remove those, or use force")
            for each in info.names:
                self._names.remove(each)
            with self._cache.aside() as scratch:
                self._folder(info.id).rename(scratch / "gone")

    async def _cook(self, recipe: Recipe, kernel: Kernel, scratch: Path, on_progress: OnProgress) -> None:
        made, tell = scratch / _ROOTFS, _progress_from_thread(on_progress)
        if not recipe.suite:
            entries = recipes.minimal_root(await busybox(scratch, on_progress))
            await packing.in_thread(partial(_write_entries, entries, made, "writing", tell))
            return
        tar, modules = scratch / "root.tar", None
        if recipe.modules and not kernel.own:
            modules = scratch / "modules"
            debian.copy_modules(self.kernels.modules(kernel.version), modules / kernel.version, recipe.modules)
        await debian.make(recipe, tar, modules, on_progress)
        await packing.in_thread(partial(_write_source, tar, made, partial(debian.trimmed, recipe), tell))

    async def _put(
        self,
        scratch: Path,
        name: str,
        asked: ImageSettings,
        source: str,
        *,
        recipe: str = "",
        kernel: str = "",
        brings_python: bool = False,
    ) -> ImageInfo:
        rootfs = scratch / _ROOTFS
        rootfs.chmod(0o444)
        content = await packing.in_thread(partial(digest, rootfs))
        parts: tuple[Any, ...] = (content, sorted(asked.env.items()), asked.user, asked.folder, kernel)
        identity = msgspec.json.encode((*parts, asked.command) if asked.command else parts)
        status = rootfs.stat()
        info = ImageInfo(
            id=f"{_DIGEST}{hashlib.sha256(identity).hexdigest()}",
            env=asked.env,
            user=asked.user,
            cwd=asked.folder,
            command=asked.command,
            size=status.st_size,
            created_at=time.time(),
            brings_python=brings_python,
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
        async with self._cache.locked(_CHANGING, _BRIEF_S):
            place = self._folder(info.id)
            there = read_note(place / _ABOUT, ImageInfo)
            if there is None or not await self._is_whole(there):
                if place.exists():
                    _log.warning("the image %s is damaged, and replaced", info.id)
                    place.rename(scratch / "damaged")
                self._cache.put(folder, place.name)
            self._names.put(name, info.id)
        return self.find(info.id)

    async def _is_whole(self, info: ImageInfo) -> bool:
        """Judge by size and time; where those are others, each byte counts."""
        path = self._folder(info.id) / _ROOTFS
        try:
            status = path.stat()
        except OSError:
            return False
        is_same = status.st_mtime_ns == info.written_at_ns
        return status.st_size == info.size and (
            is_same or await packing.in_thread(partial(digest, path)) == info.content
        )

    def _folder(self, id: str) -> Path:
        return self._cache.folder / id.removeprefix(_DIGEST)


class Names:
    """Names of images: one small file each, so that to change one touches no other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.startswith(_DIGEST):
            why = f"{name[:140]!r} cannot be an image's name: letters, digits and . _ / : - can"
            raise InvalidSpec(why, field="name")

    def by_id(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self._folder.glob("[!.]*"):
            try:
                found.setdefault(path.read_text().strip(), []).append(unquote(path.name))
            except (OSError, UnicodeDecodeError) as error:  # it was removed this moment, or is damaged
                _log.debug("the name in %s means no image: %s", path, error)
        return found

    def get(self, name: str) -> str | None:
        try:
            return self._place(name).read_text().strip()
        except OSError:
            return None

    def put(self, name: str, id: str) -> None:
        """Let it mean this image from now on, and no other."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with folders.whole_or_not_at_all(self._place(name), 0o644) as write:
            write(memoryview(id.encode()))

    def remove(self, name: str) -> None:
        self._place(name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        return self._folder / quote(name, safe="")


def _progress_from_thread(on_progress: OnProgress) -> OnProgress:
    """Wrap a callback so that a thread may call it."""
    loop = asyncio.get_running_loop()

    def tell(progress: Progress) -> None:
        loop.call_soon_threadsafe(on_progress, progress)

    return tell


def _write_source(source: Path, made: Path, change: _Change, on_progress: OnProgress, stop: Event) -> ImageSettings:
    """Write the root of an image archive, an OCI layout or a root file system. Raises InvalidSpec or ProviderError."""
    left_out: list[str] = []
    with (
        stores.reading(source),
        stores.opened(source, stop) as store,
        roots.opened(source, store, stop, left_out) as (entries, asked),
    ):
        _write_entries(change(entries), made, f"writing {source.name}", on_progress, stop)
    if left_out:
        on_progress(Progress(f"left out {len(left_out)} devices, sockets or mounts, such as {left_out[0]}"))
    return asked


async def _stamp(path: Path) -> str:
    """Digest that changes with a file of the user's. Raises InvalidSpec."""
    return hashlib.sha256(os.fsencode(await asyncio.to_thread(stamp_of, path, "image"))).hexdigest()


def _copy_root(source: Path, made: Path, _stop: Event) -> None:
    """Copy a file with a file system, without its holes. Raises InvalidSpec, or ProviderError if there is no room."""
    ext4.check(source)
    with _writing(made):
        sparse.copy(source, made)
    ext4.check(made)


@contextmanager
def _writing(made: Path) -> Iterator[None]:
    """Raise ProviderError if there is no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ProviderError(f"there is no room for the image in {made.parent.parent}: {error.strerror}") from error


def _write_entries(entries: Sequence[Entry], made: Path, message: str, on_progress: OnProgress, stop: Event) -> None:
    """Write the file system, with progress. Raises ProviderError if there is no room."""
    root = tree.of(entries)
    total = sum(entry.info.size for entry in entries)
    done = said = 0

    def took(count: int) -> None:
        nonlocal done, said
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")
        done += count
        if done - said >= 1 << 24:
            said = done
            on_progress(Progress(message, min(done, total), total))

    with _writing(made):
        ext4.write(root, made, took)
    on_progress(Progress(message, total, total))


def digest(path: Path, stop: Event) -> str:
    """Digest of a whole file."""
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(packing.PIECE):
            if stop.is_set():
                raise InterruptedError(errno.EINTR, "interrupted")
            found.update(piece)
    return found.hexdigest()
