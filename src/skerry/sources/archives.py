"""Image archives and OCI layouts, as the one archive that every engine loads, with one image of one name in it."""

from __future__ import annotations

import hashlib
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, TypeVar, cast

import msgspec

from skerry.errors import InvalidSpec
from skerry.sources import packing, stores
from skerry.sources.stores import Store

T = TypeVar("T")

MANIFEST = "manifest.json"
INDEX = "index.json"
_DIGEST = re.compile(r"(sha256):([0-9a-f]{64})|(sha512):([0-9a-f]{128})")
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MAX_DEPTH = 3
_MAX_LAYERS = 1000


class Part(msgspec.Struct, frozen=True):
    """A file of an image: where it lies, and what it has to be."""

    name: str
    digest: str = ""
    inflate: bool = False


class Parts(msgspec.Struct, frozen=True):
    """The files of one image; layers from the lowest."""

    config: Part
    layers: tuple[Part, ...]


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _OciManifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _SavedImage(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


def in_archive(store: Store) -> Parts:
    """The image of an archive as `docker save` writes it."""
    saved = _decoded(stores.text(store, MANIFEST), list[_SavedImage], MANIFEST)
    if len(saved) != 1:
        names = ", ".join(tag for image in saved for tag in image.repo_tags or ()) or "none with a name"
        raise InvalidSpec(f"the archive has {len(saved)} images ({names}), and one is imported: save that one alone")
    parts = Parts(Part(_inside(saved[0].config)), tuple(Part(_inside(layer)) for layer in saved[0].layers))
    return _checked(store, parts)


def in_layout(store: Store, architecture: str) -> Parts:
    """The image of an OCI layout, for that architecture if there are several."""
    index = _decoded(stores.text(store, INDEX), _Index, INDEX)
    chosen = _chosen(store, index, architecture, _MAX_DEPTH)
    image = _decoded(_blob(store, chosen), _OciManifest, "the image's manifest")
    parts = Parts(_part(store, image.config), tuple(_part(store, layer) for layer in image.layers))
    return _checked(store, parts)


def _chosen(store: Store, index: _Index, architecture: str, depth: int) -> _Descriptor:
    # Builders put statements about an image beside it; those are no images.
    images = [each for each in index.manifests if "vnd.docker.reference.type" not in (each.annotations or {})]
    fitting = [
        each
        for each in images
        if each.platform is None or (each.platform.os, each.platform.architecture) == ("linux", architecture)
    ]
    if len(fitting) != 1:
        found = ", ".join(_spoken(each) for each in images) or "none"
        raise InvalidSpec(
            f"the layout has {len(fitting)} images for linux/{architecture} and needs one: it has {found}"
        )
    chosen = fitting[0]
    if chosen.media_type not in _INDEX_TYPES:
        return chosen
    if not depth:
        raise InvalidSpec("the layout has indexes in indexes without end")
    return _chosen(store, _decoded(_blob(store, chosen), _Index, "an index of it"), architecture, depth - 1)


def _spoken(each: _Descriptor) -> str:
    named = (each.annotations or {}).get("org.opencontainers.image.ref.name", each.digest[:19])
    return f"{named} ({each.platform.os}/{each.platform.architecture})" if each.platform else named


def _part(store: Store, blob: _Descriptor) -> Part:
    name = _place(blob.digest)
    size = store.size(name)
    if size < 0:
        raise InvalidSpec(f"the layout lacks the blob {blob.digest}: copy it whole")
    if size != blob.size:
        raise InvalidSpec(f"the blob {blob.digest} has {size} bytes where {blob.size} are promised: copy it again")
    return Part(name, blob.digest, blob.media_type.endswith("zstd"))


def _place(digest: str) -> str:
    """Where a blob lies. A digest is a number and no path, whatever a layout says."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidSpec(f"the layout names a blob {digest[:100]!r}, which is not a digest")
    return f"blobs/{match[1] or match[3]}/{match[2] or match[4]}"


def _blob(store: Store, blob: _Descriptor) -> bytes:
    part = _part(store, blob)
    content = stores.text(store, part.name)
    if not _is(part.digest, hashlib.new(part.digest.partition(":")[0], content).hexdigest()):
        raise _changed(part)
    return content


def _inside(name: str) -> str:
    clean = posixpath.normpath(name)
    if not name or clean.startswith(("/", "../")) or clean in (".", ".."):
        raise InvalidSpec(f"the archive names a file {name[:100]!r}, which is not in it")
    return clean


def _checked(store: Store, parts: Parts) -> Parts:
    if len(parts.layers) > _MAX_LAYERS:
        raise InvalidSpec(f"the image has {len(parts.layers)} layers, more than any engine takes")
    for part in (parts.config, *parts.layers):
        if store.size(part.name) < 0:
            raise InvalidSpec(f"the archive lacks {part.name}, which its manifest names: copy it whole")
    if total(store, parts) > stores.MAX_BYTES:
        raise InvalidSpec("the image claims to be larger than any image is; it was not imported")
    if store.size(parts.config.name) > stores.MAX_TEXT:
        raise InvalidSpec("the image's configuration is too large")
    return parts


def total(store: Store, parts: Parts) -> int:
    """How many bytes there are to read."""
    return sum(store.size(part.name) for part in {parts.config, *parts.layers})


def pack(store: Store, parts: Parts, name: str) -> Iterator[bytes]:
    """The archive, piece by piece. What makes an image of it comes last, after all else was found to be right."""
    files = sorted({parts.config, *parts.layers}, key=lambda part: (store.place(part.name), part.name))
    names = {part: f"{number:04}.tar" for number, part in enumerate(files)} | {parts.config: "config.json"}
    for part in files:
        yield from _entry(store, part, names[part])
    yield from manifest(names[parts.config], [names[part] for part in parts.layers], name)


def manifest(config: str, layers: Sequence[str], name: str) -> Iterator[bytes]:
    """What makes an image of the entries before it, and the end of the archive."""
    content = [{"Config": config, "RepoTags": [name], "Layers": layers}]
    yield from packing.text_entry(MANIFEST, msgspec.json.encode(content))
    yield packing.END


def _entry(store: Store, part: Part, name: str) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    with store.open(part.name) as file:
        checked = _Checked(file, part)
        if not part.inflate:
            info.size = store.size(part.name)
            yield from packing.entry(info, cast("BinaryIO", checked))
            checked.judge()
            return
        # Not every engine reads zstd, and how long the layer is then has to be known first.
        info.size = _length(stores.inflated(cast("BinaryIO", checked)))
        checked.judge()
    with store.open(part.name) as file:
        yield from packing.entry(info, stores.inflated(file))


def _length(file: BinaryIO) -> int:
    size = 0
    while piece := file.read(packing.PIECE):
        size += len(piece)
        if size > stores.MAX_BYTES:
            raise InvalidSpec("a layer inflates to more than any image has; it was not imported")
    return size


def verify(store: Store, part: Part) -> None:
    """Read it once, and hold it against its digest."""
    if part.digest:
        with store.open(part.name) as file:
            checked = _Checked(file, part)
            while checked.read(packing.PIECE):
                pass
            checked.judge()


class _Checked:
    """A file that is held against its digest while it is read."""

    def __init__(self, file: BinaryIO, part: Part) -> None:
        self._file = file
        self._part = part
        self._hash = hashlib.new(part.digest.partition(":")[0]) if part.digest else None
        self.readable = self.seekable = lambda: True

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        if self._hash is not None:
            self._hash.update(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the beginning, as one does who looked at the first bytes."""
        if self._hash is not None:
            self._hash = hashlib.new(self._part.digest.partition(":")[0])
        return self._file.seek(offset, whence)

    def judge(self) -> None:
        if self._hash is not None and not _is(self._part.digest, self._hash.hexdigest()):
            raise _changed(self._part)


def _is(digest: str, found: str) -> bool:
    return digest.partition(":")[2] == found


def _changed(part: Part) -> InvalidSpec:
    return InvalidSpec(f"the blob {part.digest} is not what its digest says: it was damaged or forged; copy it again")


def _decoded(text: bytes, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSpec(f"{what} is not what an image has: {error}") from None
