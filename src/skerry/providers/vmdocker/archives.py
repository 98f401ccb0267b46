"""The images of all projects: archives on the host, which a machine's Docker loads when a box is first made of one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, ImageNotFound, ProviderError
from skerry.progress import OnProgress, Progress
from skerry.providers.base import Image
from skerry.providers.engine import importing
from skerry.providers.engine.image_config import full_name
from skerry.providers.engine.images import with_registry
from skerry.sources import parcels

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: str
    """What Docker calls the image once it is loaded."""
    size: int
    created_at: float

    @property
    def file(self) -> str:
        return f"{hashlib.sha256(f'{self.name} {self.id}'.encode()).hexdigest()[:24]}.tar"


class Archives:
    """One folder for each name, so that one name is changed without any other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, archive: Archive) -> Path:
        return self._folder / archive.file

    def get(self, name: str) -> Archive | None:
        return self._read(self._place(full_name(name)))

    def all(self, used_by: Mapping[str, int]) -> list[Image]:
        """The newest first; `used_by` has the number of boxes by the name that they asked for."""
        found = [archive for path in self._folder.glob("*.json") if (archive := self._read(path)) is not None]
        found.sort(key=lambda archive: (-archive.created_at, archive.name))
        return [_as_image(archive, used_by) for archive in found]

    async def take(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        """Keep what is at `source` as an image; the one of that name before it goes."""
        name = full_name(name, digest=False)
        on_progress(Progress(f"looking at {source.name}"))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        architecture = _ARCHITECTURES.get(os.uname().machine, os.uname().machine)
        with tempfile.NamedTemporaryFile(prefix=".new-", dir=self._folder) as draft:
            async with (
                importing.parcel(source, with_registry(name), architecture) as parcel,
                parcels.sending(parcel, source, on_progress) as pieces,
            ):
                await _save(pieces, draft)
            id = await asyncio.to_thread(_image_id, Path(draft.name))
            about = Archive(name=name, id=id, size=os.path.getsize(draft.name), created_at=time.time())
            self._put(about, Path(draft.name))
        return _as_image(about, {})

    def remove(self, name: str, used_by: Mapping[str, int]) -> None:
        archive = self.get(name)
        if archive is None:
            raise ImageNotFound(missing(name))
        if count := used_by.get(archive.name, 0):
            raise Conflict(f"the image {name} is used by {count} sandboxes: end them first, with `skerry rm ID`")
        self._place(archive.name).unlink(missing_ok=True)
        self.path(archive).unlink(missing_ok=True)

    def _put(self, about: Archive, draft: Path) -> None:
        """The archive first, then what names it, then the one that is named no more."""
        before = self.get(about.name)
        archive = self.path(about)
        archive.unlink(missing_ok=True)
        os.link(draft, archive)
        text = self._folder / f".{about.file}.{os.getpid()}"
        text.write_bytes(msgspec.json.encode(about))
        text.replace(self._place(about.name))
        if before is not None and before.file != about.file:
            self.path(before).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"

    def _read(self, path: Path) -> Archive | None:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Archive)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if self.path(found).exists() else None


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


async def _save(pieces: AsyncIterator[bytes], draft: Any) -> None:
    async for piece in pieces:
        await asyncio.to_thread(draft.write, piece)
    await asyncio.to_thread(draft.flush)


def _image_id(archive: Path) -> str:
    """The digest of its configuration, as Docker has it."""
    try:
        with tarfile.open(archive) as tar:
            manifest = msgspec.json.decode(_content(tar, "manifest.json"), type=list[dict[str, Any]])
            return f"sha256:{hashlib.sha256(_content(tar, manifest[0]['Config'])).hexdigest()}"
    except (tarfile.TarError, KeyError, IndexError, msgspec.MsgspecError) as error:
        raise ProviderError(f"the archive that was made has no image in it: {error}") from error


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
