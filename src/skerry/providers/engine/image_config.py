"""What an image asks for: environment, user, folders. The policy of boxes decides what of it is granted."""

from __future__ import annotations

import hashlib
import tarfile
from io import BytesIO
from urllib.parse import quote

import msgspec

from skerry.errors import ImageNotFound, NotFound, ProviderError
from skerry.providers import users
from skerry.providers.engine.api import Engine
from skerry.providers.layout import PROJECT_UIDS
from skerry.spec import Spec

_READ_S = 30.0


class _Config(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    volumes: dict[str, object] | None = None
    labels: dict[str, str] | None = None


class _Inspected(msgspec.Struct, rename="pascal"):
    id: str
    architecture: str = ""
    config: _Config | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    id: str
    env: dict[str, str]
    user: str
    folder: str
    volumes: tuple[str, ...]
    """Folders that the image wants to have outside of its own layers."""
    labels: dict[str, str]


class User(msgspec.Struct, frozen=True):
    """Who runs in a box: as the engine is told, and as numbers."""

    name: str
    uid: int
    gid: int


async def resolve(engine: Engine, name: str) -> ImageConfig:
    try:
        found = await engine.get(f"/images/{quote(name, safe='/:@')}/json", _Inspected)
    except NotFound as error:
        raise ImageNotFound(missing(engine.provider, name)) from error
    config = found.config or _Config()
    return ImageConfig(
        id=found.id if found.id.startswith("sha256:") else f"sha256:{found.id}",
        env=dict(each.partition("=")[::2] for each in config.env or []),
        user=config.user or "",
        folder=config.working_dir or "",
        volumes=tuple(config.volumes or ()),
        labels=config.labels or {},
    )


def missing(provider: str, name: str) -> str:
    return (
        f"{provider} has no image {name!r}. Get it with `skerry image pull {name}`, or make it with "
        f"`skerry image build -t {name}` or `skerry image import`"
    )


def own_uid(spec: Spec) -> int:
    """The uid of the spec's project."""
    key = f"{spec.labels.get('skerry.instance', '')}\0{spec.project}"
    return PROJECT_UIDS[int.from_bytes(hashlib.sha256(key.encode()).digest()[:3], "big")]


def known_user(asked: str | None, image: ImageConfig, default_uid: int) -> User | None:
    """Who runs in the box; None if that is a name, which only the image can tell the number of."""
    text = asked or image.user
    if asked is None and text.partition(":")[0] in ("", "0", "root"):
        return User(f"{default_uid}:{default_uid}", default_uid, default_uid)
    uid, _, gid = text.partition(":")
    if uid == "root":
        uid, gid = "0", gid or "0"
    if uid.isdigit() and (gid.isdigit() or not gid):
        return User(f"{uid}:{gid or uid}", int(uid), int(gid or uid))
    return None


async def find_user(engine: Engine, container: str, text: str) -> User:
    """A user by a name that the image's own list of users has."""
    name = text.partition(":")[0]
    found = users.numbers(await _read_file(engine, container, "/etc/passwd"), name)
    if found is None:
        raise NotFound(f"no user is called {name!r} in the image; give a UID or UID:GID")
    return User(text, *found)


async def _read_file(engine: Engine, container: str, path: str) -> str:
    query = {"path": path}
    async with engine.stream("GET", f"/containers/{container}/archive", query=query, whole_s=_READ_S) as answer:
        content = await answer.whole()
    try:
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            file = archive.extractfile(archive.next() or "")
            return file.read().decode(errors="replace") if file else ""
    except (tarfile.TarError, KeyError) as error:
        raise ProviderError(f"{path} of the image cannot be read: {error}") from error
