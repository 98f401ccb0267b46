"""Images of all projects: archives on the host, which a machine's Docker loads when a box is first made of one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skerry.errors import Conflict, ImageNotFound, ProviderError, Unsupported
from skerry.host import folders
from skerry.model.results import OnProgress, Progress
from skerry.model.spec import Network
from skerry.oci import upload
from skerry.providers.base import Image, ImageBuild
from skerry.providers.dockerapi import build_context
from skerry.providers.dockerapi.image_config import full_name
from skerry.providers.dockerapi.images import upload_of, with_registry
from skerry.providers.vmdocker.engine import NAME, ProjectEngine, VmDockerConfig
from skerry.providers.vmdocker.lifecycle import MachineLifecycle
from skerry.providers.vmdocker.projects import Projects
from skerry.vm.folder import read_note, write_note

if TYPE_CHECKING:
    from skerry.providers.vmdocker.machines import ProjectMachines

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """Image in a file."""

    name: str
    id: str
    """Docker's id of the image once it is loaded."""
    size: int
    created_at: float

    @property
    def file(self) -> str:
        return f"{hashlib.sha256(f'{self.name} {self.id}'.encode()).hexdigest()[:24]}.tar"


class Archives:
    """Archives of a folder, each with a note of its own, so that one name is changed without any other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, archive: Archive) -> Path:
        return self._folder / archive.file

    def get(self, name: str) -> Archive | None:
        return self._read(self._place(full_name(name)))

    def all(self, used_by: Mapping[str, int]) -> list[Image]:
        """Newest first; `used_by` has the number of boxes by the name that they asked for."""
        found = [archive for path in self._folder.glob("*.json") if (archive := self._read(path)) is not None]
        found.sort(key=lambda archive: (-archive.created_at, archive.name))
        return [_as_image(archive, used_by) for archive in found]

    async def take(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        """Keep `source` as an image, in place of the one of that name. Raises ProviderError."""
        name = full_name(name, digest=False)
        on_progress(Progress(f"looking at {source.name}"))
        folders.make(self._folder)
        architecture = _ARCHITECTURES.get(os.uname().machine, os.uname().machine)
        with tempfile.NamedTemporaryFile(prefix=".new-", dir=self._folder) as draft:
            async with (
                upload_of(source, with_registry(name), architecture) as prepared,
                upload.sending(prepared, source, on_progress) as pieces,
            ):
                async for piece in pieces:
                    await asyncio.to_thread(draft.write, piece)
                await asyncio.to_thread(draft.flush)
            id = await asyncio.to_thread(_image_id, Path(draft.name))
            about = Archive(name=name, id=id, size=os.path.getsize(draft.name), created_at=time.time())
            self._put(about, Path(draft.name))
        return _as_image(about, {})

    async def bring(self, engine: ProjectEngine, image: str) -> None:
        """Load an image into a machine, unless it has that one already."""
        archive = self.get(image) if image else None
        if archive is not None and await engine.image_id(archive.name) != archive.id:
            await engine.load(self.path(archive), archive.name)

    def remove(self, name: str, used_by: Mapping[str, int]) -> None:
        archive = self.get(name)
        if archive is None:
            raise ImageNotFound(missing(name))
        if count := used_by.get(archive.name, 0):
            raise Conflict(f"the image {name} is used by {count} sandboxes: end them first, with `skerry rm ID`")
        self._place(archive.name).unlink(missing_ok=True)
        self.path(archive).unlink(missing_ok=True)

    def _put(self, about: Archive, draft: Path) -> None:
        """Put the archive in place, then its note, and remove the one that is named no more."""
        before = self.get(about.name)
        archive = self.path(about)
        archive.unlink(missing_ok=True)
        os.link(draft, archive)
        write_note(self._place(about.name), about)
        if before is not None and before.file != about.file:
            self.path(before).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"

    def _read(self, path: Path) -> Archive | None:
        found = read_note(path, Archive)
        return found if found is not None and self.path(found).exists() else None


class ProjectImages:
    """Verbs of images: those of all projects, and builds in machines that are there for one build."""

    def __init__(
        self,
        archives: Archives,
        projects: Projects,
        machines: ProjectMachines,
        lifecycle: MachineLifecycle,
        config: VmDockerConfig,
    ) -> None:
        self._archives = archives
        self._projects = projects
        self._machines = machines
        self._lifecycle = lifecycle
        self._config = config

    async def images(self) -> Sequence[Image]:
        return self._archives.all(self._used())

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        with tempfile.TemporaryDirectory(prefix="skerry-image-") as folder:
            archive = Path(folder, "image.tar")
            await self.build_archive(build, archive, on_progress)
            return await self._archives.take(archive, build.name, on_progress)

    async def build_archive(self, build: ImageBuild, target: Path, on_progress: OnProgress) -> None:
        """Build from a Dockerfile. Raises Unsupported and ImageNotFound before a machine is started."""
        full_name(build.name, digest=False)
        network = build.network is not Network.NONE
        if network:
            await self._check_network("network", "leave it at none")
        self._config.check_memory(build.memory or 0)
        build_context.check_dockerfile(build.dockerfile, build.network)
        needed = build_context.base_images(build.dockerfile, build.args, build.target)
        for name in needed:
            if self._archives.get(name) is None and not network:
                raise ImageNotFound(missing(name))
        on_progress(Progress("starting a machine to build in"))
        async with self._lifecycle.for_once(self._projects.get(f"build of {build.name}"), network=network) as engine:
            for name in needed:
                await self._archives.bring(engine, name)
            inside = msgspec.structs.replace(build, memory=build.memory or self._config.room)
            await engine.build_archive(inside, target, on_progress, most=self._config.size("vm_disk"))

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        """Pull in a machine that is there for this pull alone. Raises Unsupported before one is started."""
        full_name(name, digest=False)
        otherwise = f"or `docker save {name}` elsewhere, and `skerry image import` it"
        await self._check_network("image pull", otherwise)
        on_progress(Progress("starting a machine to pull in"))
        project = self._projects.get(f"pull of {name}")
        with tempfile.TemporaryDirectory(prefix="skerry-image-") as folder:
            archive = Path(folder, "image.tar")
            async with self._lifecycle.for_once(project, network=True) as engine:
                await engine.pull_archive(name, archive, on_progress, most=self._config.size("vm_disk"))
            return await self._archives.take(archive, name, on_progress)

    async def _check_network(self, field: str, otherwise: str) -> None:
        """Raise Unsupported if no machine of ours has a network."""
        if (why := await self._machines.why_no_network()) is not None:
            raise Unsupported(field, NAME, f"{why}; {otherwise}")

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        return await self._archives.take(source, name, on_progress)

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        self._archives.remove(name, self._used())

    def _used(self) -> Counter[str]:
        return Counter(full_name(box.image) for box in self._projects.boxes().values() if box.image)


def missing(name: str) -> str:
    return (
        f"vmdocker has no image {name!r}. Give it one with `skerry image import PATH {name} --provider vmdocker`; PATH "
        "may be what `docker save` writes, an OCI layout or a root file system"
    )


def _as_image(archive: Archive, used_by: Mapping[str, int]) -> Image:
    return Image(
        id=archive.id,
        names=(archive.name,),
        size=archive.size,
        created_at=archive.created_at,
        used_by=used_by.get(archive.name, 0),
    )


def _image_id(archive: Path) -> str:
    """Digest of an image's configuration, which is its id in Docker. Raises ProviderError."""
    try:
        with tarfile.open(archive) as tar:
            manifest = msgspec.json.decode(_content(tar, "manifest.json"), type=list[dict[str, Any]])
            return f"sha256:{hashlib.sha256(_content(tar, manifest[0]['Config'])).hexdigest()}"
    except (tarfile.TarError, KeyError, IndexError, msgspec.MsgspecError, RecursionError) as error:
        raise ProviderError(f"the archive that was made has no image in it: {error}") from error


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
