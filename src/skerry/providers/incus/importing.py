"""Upload of an image to Incus: a root and its metadata in one tar, or an image of Incus's own as it is."""

from __future__ import annotations

import copy
import hashlib
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from skerry.errors import Conflict
from skerry.oci import archives, packing, roots, stores, upload
from skerry.oci.roots import Entry
from skerry.oci.stores import FolderStore, TarStore
from skerry.oci.upload import Upload
from skerry.providers.base import OnProgress, Progress
from skerry.providers.incus.api import IncusApi
from skerry.providers.incus.images import CONFIG, IncusImageConfig

_SEND_TIMEOUT_S = 3600.0
_METADATA = "metadata.yaml"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FOLDERS = ("dev", "proc", "sys", "tmp")
"""Mount points of a container, which images of single programs often lack."""
_BLOCK = 4096


async def send(api: IncusApi, source: Path, on_progress: OnProgress) -> str:
    """Send an image; return its fingerprint, the hash of the upload. One that is there already is as good."""
    on_progress(Progress(f"looking at {source.name}"))
    headers = {"Content-Type": "application/octet-stream", "X-Incus-filename": "image.tar"}
    fingerprint = hashlib.sha256()

    async def hashed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            fingerprint.update(piece)
            yield piece

    async with (
        upload.prepared(lambda stop: _held(source, stop)) as prepared,
        upload.sending(prepared, source, on_progress) as body,
    ):
        with suppress(Conflict):
            await api.do("POST", "/1.0/images", body=hashed(body), headers=headers, timeout_s=_SEND_TIMEOUT_S)
    return fingerprint.hexdigest()


@contextmanager
def _held(source: Path, stop: Event) -> Iterator[Upload]:
    left_out: list[str] = []
    with stores.reading(source), stores.opened(source, stop) as store:
        if store.size(_METADATA) >= 0:
            yield _as_it_is(source, store, left_out)
        elif store.size(archives.MANIFEST) >= 0 or store.size(archives.INDEX) >= 0:
            architecture = _ARCHITECTURES.get(os.uname().machine, os.uname().machine)
            is_archive = store.size(archives.MANIFEST) >= 0
            parts = archives.in_archive(store) if is_archive else archives.in_layout(store, architecture)
            found = archives.read_settings(stores.text(store, parts.config.name))
            asked = IncusImageConfig(env=found.env, user=found.user, folder=found.folder, command=found.command)
            with roots.in_layers(store, parts, stop, left_out.append) as entries:
                yield _upload(source, entries, asked, left_out)
        else:
            yield _upload(source, roots.root_of(source, store, left_out), IncusImageConfig(), left_out)


def _as_it_is(source: Path, store: FolderStore | TarStore, left_out: list[str]) -> Upload:
    """An image of Incus's own, packed or not."""
    if isinstance(store, TarStore):
        return Upload(upload.readable(source, _bytes(source)), source.stat().st_size, [])
    entries = roots.root_of(source, store, left_out)
    return Upload(upload.readable(source, roots.tar(entries)), roots.check_size(source, entries), left_out)


def _bytes(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def _upload(source: Path, entries: Sequence[Entry], asked: IncusImageConfig, left_out: list[str]) -> Upload:
    total = roots.check_size(source, entries)
    return Upload(upload.readable(source, _unified(entries, asked)), total, left_out)


def _unified(entries: Sequence[Entry], asked: IncusImageConfig) -> Iterator[bytes]:
    # The size on a disk: whole blocks, and room for the name and owner of each.
    blocks = sum(-(-entry.info.size // _BLOCK) for entry in entries)
    asked = msgspec.structs.replace(asked, size=_BLOCK * blocks + _BLOCK // 2 * len(entries))
    about: dict[str, Any] = {
        "architecture": os.uname().machine,
        "creation_date": int(time.time()),
        "properties": {CONFIG: msgspec.json.encode(asked).decode()},
    }
    yield from packing.text_entry(_METADATA, msgspec.json.encode(about))  # which is YAML as well
    there = {entry.info.name.partition("/")[0] for entry in entries}
    for name in _FOLDERS:
        if name not in there:
            folder = tarfile.TarInfo(f"rootfs/{name}")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            yield from packing.entry(folder)
    yield from roots.tar([_below(entry) for entry in entries if entry.info.name != "."])


def _below(entry: Entry) -> Entry:
    info = copy.copy(entry.info)
    info.name = f"rootfs/{info.name}"
    if info.islnk():
        info.linkname = f"rootfs/{info.linkname}"
    return Entry(info, entry.open)
