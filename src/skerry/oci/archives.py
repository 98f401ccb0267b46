"""Image archives and OCI layouts: read, checked, and packed as the one archive that every engine loads."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, TypeVar, cast

import msgspec

from skerry.errors import InvalidSpec
from skerry.oci import packing, stores
from skerry.oci.stores import ImageFiles

T = TypeVar("T")

MANIFEST = "manifest.json"
INDEX = "index.json"
_DIGEST = re.compile(r"(sha256):([0-9a-f]{64})|(sha512):([0-9a-f]{128})")
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of machines in the words of images."""
_MAX_DEPTH = 3
_MAX_LAYERS = 1000


class Part(msgspec.Struct, frozen=True):
    """A file of an image and its digest."""

    name: str
    digest: str = ""
    inflate: bool = False


class Parts(msgspec.Struct, frozen=True):
    """Files of one image; layers from the lowest."""

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

    def __str__(self) -> str:
        named = (self.annotations or {}).get("org.opencontainers.image.ref.name", self.digest[:19])
        return f"{named} ({self.platform.os}/{self.platform.architecture})" if self.platform else named


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _OciManifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _SavedImage(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


def find(store: ImageFiles, architecture: str) -> Parts | None:
    """The image of an archive or of an OCI layout; None where the store holds neither. Raises InvalidSpec."""
    if store.size(MANIFEST) >= 0:
        return in_archive(store)
    return in_layout(store, architecture) if store.size(INDEX) >= 0 else None


def in_archive(store: ImageFiles) -> Parts:
    """The image of an archive as `docker save` writes it. Raises InvalidSpec."""
    saved = _decoded(stores.text(store, MANIFEST), list[_SavedImage], MANIFEST)
    if len(saved) != 1:
        names = ", ".join(tag for image in saved for tag in image.repo_tags or ()) or "none with a name"
        raise InvalidSpec(f"the archive has {len(saved)} images ({names}), and one is imported: save that one alone")
    parts = Parts(Part(_inside(saved[0].config)), tuple(Part(_inside(layer)) for layer in saved[0].layers))
    return _checked(store, parts)


def in_layout(store: ImageFiles, architecture: str) -> Parts:
    """The image of an OCI layout, for that architecture if there are several. Raises InvalidSpec."""
    index = _decoded(stores.text(store, INDEX), _Index, INDEX)
    chosen = _chosen(store, index, architecture, _MAX_DEPTH)
    image = _decoded(_blob(store, chosen), _OciManifest, "the image's manifest")
    parts = Parts(_part(store, image.config), tuple(_part(store, layer) for layer in image.layers))
    return _checked(store, parts)


def _chosen(store: ImageFiles, index: _Index, architecture: str, depth: int) -> _Descriptor:
    # Builders put statements about an image beside it; those are no images.
    images = [each for each in index.manifests if "vnd.docker.reference.type" not in (each.annotations or {})]
    fitting = [
        each
        for each in images
        if each.platform is None or (each.platform.os, each.platform.architecture) == ("linux", architecture)
    ]
    if len(fitting) != 1:
        found = ", ".join(map(str, images)) or "none"
        raise InvalidSpec(
            f"the layout has {len(fitting)} images for linux/{architecture} and needs one: it has {found}"
        )
    chosen = fitting[0]
    if chosen.media_type not in _INDEX_TYPES:
        return chosen
    if not depth:
        raise InvalidSpec("the layout has indexes in indexes without end")
    return _chosen(store, _decoded(_blob(store, chosen), _Index, "an index of it"), architecture, depth - 1)


def _part(store: ImageFiles, blob: _Descriptor) -> Part:
    match = _DIGEST.fullmatch(blob.digest)
    if match is None:  # a digest is a number and no path, whatever a layout says
        raise InvalidSpec(f"the layout names a blob {blob.digest[:100]!r}, which is not a digest")
    name = f"blobs/{match[1] or match[3]}/{match[2] or match[4]}"
    size = store.size(name)
    if size < 0:
        raise InvalidSpec(f"the layout lacks the blob {blob.digest}: copy it whole")
    if size != blob.size:
        raise InvalidSpec(f"the blob {blob.digest} has {size} bytes where {blob.size} are promised: copy it again")
    return Part(name, blob.digest, blob.media_type.endswith("zstd"))


def _blob(store: ImageFiles, blob: _Descriptor) -> bytes:
    part = _part(store, blob)
    checked = _Checked(io.BytesIO(stores.text(store, part.name)), part)
    content = checked.read(stores.MAX_TEXT)
    checked.judge()
    return content


def _inside(name: str) -> str:
    clean = posixpath.normpath(name)
    if not name or clean.startswith(("/", "../")) or clean in (".", ".."):
        raise InvalidSpec(f"the archive names a file {name[:100]!r}, which is not in it")
    return clean


def _checked(store: ImageFiles, parts: Parts) -> Parts:
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


def total(store: ImageFiles, parts: Parts) -> int:
    """Count the bytes to read."""
    return sum(store.size(part.name) for part in {parts.config, *parts.layers})


def pack(store: ImageFiles, parts: Parts, name: str) -> Iterator[bytes]:
    """Pack the archive, piece by piece. The manifest comes last, after all else was found to be right."""
    files = sorted({parts.config, *parts.layers}, key=lambda part: (store.place(part.name), part.name))
    names = {part: f"{number:04}.tar" for number, part in enumerate(files)} | {parts.config: "config.json"}
    for part in files:
        yield from _entry(store, part, names[part])
    yield from manifest(names[parts.config], [names[part] for part in parts.layers], name)


def manifest(config: str, layers: Sequence[str], name: str) -> Iterator[bytes]:
    """Pack the manifest, which makes an image of the entries before it, and the end of the archive."""
    content = [{"Config": config, "RepoTags": [name], "Layers": layers}]
    yield from packing.text_entry(MANIFEST, msgspec.json.encode(content))
    yield packing.END


def _entry(store: ImageFiles, part: Part, name: str) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    with store.open(part.name) as file:
        checked = _Checked(file, part)
        if not part.inflate:
            info.size = store.size(part.name)
            yield from packing.entry(info, cast("BinaryIO", checked))
            checked.judge()
            return
        # Not every engine reads zstd, and how long the layer is then has to be known first.
        inflated = stores.inflated(cast("BinaryIO", checked))
        while piece := inflated.read(packing.PIECE):
            info.size += len(piece)
            if info.size > stores.MAX_BYTES:
                raise InvalidSpec("a layer inflates to more than any image has; it was not imported")
        checked.judge()
    with store.open(part.name) as file:
        yield from packing.entry(info, stores.inflated(file))


def verify(store: ImageFiles, part: Part) -> None:
    """Read a file once and compare it with its digest. Raises InvalidSpec."""
    if part.digest:
        with store.open(part.name) as file:
            checked = _Checked(file, part)
            while checked.read(packing.PIECE):
                pass
            checked.judge()


class _Checked:
    """A file that is compared with its digest while it is read."""

    def __init__(self, file: BinaryIO, part: Part) -> None:
        self._file = file
        self._digest = part.digest
        self._algorithm, _, self._promised = part.digest.partition(":")
        self._hash = hashlib.new(self._algorithm or "sha256")
        self.readable = self.seekable = lambda: True

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        if self._promised:
            self._hash.update(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the beginning, as one does who looked at the first bytes."""
        self._hash = hashlib.new(self._algorithm or "sha256")
        return self._file.seek(offset, whence)

    def judge(self) -> None:
        """Raise InvalidSpec unless it was what its digest says; an archive as `docker save` writes it says none."""
        if self._promised and self._promised != self._hash.hexdigest():
            why = f"the blob {self._digest} is not what its digest says: it was damaged or forged; copy it again"
            raise InvalidSpec(why)


def _decoded(text: bytes, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSpec(f"{what} is not what an image has: {error}") from None


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image beside its files. An empty user is root, and an empty folder is the root."""

    env: dict[str, str] = {}
    user: str = ""
    folder: str = ""
    command: tuple[str, ...] = ()
    """Its ENTRYPOINT, and its CMD behind that."""


class _Config(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _ConfigFile(msgspec.Struct):
    config: _Config | None = None


def read_settings(text: bytes) -> ImageSettings:
    """Read the configuration of an image archive or an OCI layout. Raises InvalidSpec."""
    try:
        config = msgspec.json.decode(text, type=_ConfigFile).config or _Config()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"the image's configuration is not one: {error}") from None
    user = config.user or ""
    return ImageSettings(
        env=dict(each.partition("=")[::2] for each in config.env or []),
        user="" if user.partition(":")[0] in ("", "0", "root") else user,
        folder="" if config.working_dir in (None, "/") else str(config.working_dir),
        command=(*(config.entrypoint or ()), *(config.cmd or ())),
    )
