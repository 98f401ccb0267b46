"""Names of images, and what each asks for: environment, user, folders. A policy decides what of it is granted."""

from __future__ import annotations

import hashlib
import re
import tarfile
from io import BytesIO
from urllib.parse import quote

import msgspec

from skerry.errors import ImageNotFound, InvalidSpec, NotFound, ProviderError, UserNotFound
from skerry.host import uids
from skerry.model.spec import Spec
from skerry.providers.dockerapi.api import Engine
from skerry.providers.dockerapi.containers import NEVER, full_id
from skerry.providers.shared.layout import PROJECT_UIDS

_MAX_UID = 2**31 - 1
_NAME = re.compile(
    r"(?:[a-z0-9][a-z0-9.\-]*(?::\d+)?/)?"  # a registry
    r"[a-z0-9]+(?:[._\-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._\-]+[a-z0-9]+)*)*"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{12,64}")


class _Config(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    volumes: dict[str, object] | None = None
    on_build: list[str] | None = None


class FoundImage(msgspec.Struct, rename="pascal"):
    """An image as an engine tells of it; a list leaves its configuration out."""

    id: str
    repo_tags: list[str] | None = None
    repo_digests: list[str] | None = None
    labels: dict[str, str] | None = None
    size: int = 0
    created: int | str | None = None
    config: _Config | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    id: str
    env: dict[str, str]
    user: str
    folder: str
    volumes: tuple[str, ...]
    """Folders that the image wants to have outside of its own layers."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Command of the image; empty if it names none."""
        return [] if self.entrypoint == NEVER else [*self.entrypoint, *self.cmd]


class BoxUser(msgspec.Struct, frozen=True):
    """User of a box: as the engine is told, and as numbers."""

    name: str
    uid: int
    gid: int


async def resolve(engine: Engine, name: str) -> ImageConfig:
    try:
        found = await engine.get(f"/images/{in_path(name)}/json", FoundImage)
    except NotFound as error:
        raise ImageNotFound(missing(engine.provider, name)) from error
    config = found.config or _Config()
    return ImageConfig(
        id=full_id(found.id),
        env=dict(each.partition("=")[::2] for each in config.env or []),
        user=config.user or "",
        folder=config.working_dir or "",
        volumes=tuple(config.volumes or ()),
        entrypoint=tuple(config.entrypoint or ()),
        cmd=tuple(config.cmd or ()),
    )


def full_name(name: str, *, digest: bool = True) -> str:
    """A name as engines take it, with its tag. Raises InvalidSpec for what is none."""
    match = _NAME.fullmatch(name)
    if match is None or len(name) > 400 or (match["digest"] and not digest):
        raise InvalidSpec(f"{name[:100]!r} is not a name for an image; write e.g. debian:12", field="image")
    return name if match["tag"] or match["digest"] else f"{name}:latest"


def in_path(name: str) -> str:
    """A name or an id that names nothing but an image, since it becomes part of a path."""
    return quote(name if is_id(name) else full_name(name), safe="/:@")


def is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def missing(provider: str, name: str) -> str:
    return (
        f"{provider} has no image {name!r}. Get it with `skerry image pull --provider {provider} {name}`, or make it "
        "with `skerry image build` or `skerry image import`"
    )


def own_uid(spec: Spec) -> int:
    """The uid of the spec's project."""
    key = f"{spec.labels.get('skerry.instance', '')}\0{spec.project}"
    return PROJECT_UIDS[int.from_bytes(hashlib.sha256(key.encode()).digest()[:3], "big")]


def known_user(asked: str | None, image: ImageConfig, default_uid: int) -> BoxUser | None:
    """The user of a box; None for a name, whose number only the image knows. Raises InvalidSpec."""
    text = asked or image.user
    if asked is None and text.partition(":")[0] in ("", "0", "root"):
        return BoxUser(f"{default_uid}:{default_uid}", default_uid, default_uid)
    uid, _, gid = text.partition(":")
    if uid == "root":
        uid, gid = "0", gid or "0"
    if not uid.isdigit() or (gid and not gid.isdigit()):
        return None
    if max(int(uid), int(gid or uid)) > _MAX_UID:
        raise InvalidSpec(f"user: {text!r} is out of range; the highest is {_MAX_UID}", field="user")
    return BoxUser(f"{uid}:{gid or uid}", int(uid), int(gid or uid))


async def find_user(engine: Engine, container: str, text: str) -> BoxUser:
    """Find a user and a group by name in the box's or the image's own lists. Raises UserNotFound."""
    name, _, group = text.partition(":")
    if name.isdecimal():
        found: tuple[int, int] | None = int(name), int(name)
    else:
        found = uids.numbers(await _read_file(engine, container, "/etc/passwd"), name)
    if found is None:
        raise UserNotFound(f"user: no user is called {name!r} in the box; give a UID or UID:GID")
    uid, gid = found
    if group:
        gid = int(group) if group.isdecimal() else _gid(await _read_file(engine, container, "/etc/group"), group)
    return BoxUser(text, uid, gid)


def _gid(groups: str, name: str) -> int:
    for line in groups.splitlines():
        entry = line.split(":")
        if len(entry) > 2 and entry[0] == name and entry[2].isdigit():
            return int(entry[2])
    raise UserNotFound(f"user: no group is called {name!r} in the box; give a UID or UID:GID")


async def _read_file(engine: Engine, container: str, path: str) -> str:
    query = {"path": path}
    try:
        async with engine.stream("GET", f"/containers/{container}/archive", query=query, whole_s=30.0) as answer:
            content = await answer.whole()
    except NotFound:
        return ""
    try:
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            file = archive.extractfile(archive.next() or "")
            return file.read().decode(errors="replace") if file else ""
    except (tarfile.TarError, KeyError) as error:
        raise ProviderError(f"{path} of the image cannot be read: {error}") from error
