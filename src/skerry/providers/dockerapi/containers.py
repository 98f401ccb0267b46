"""Containers of an engine: boxes, as it lists them and tells of their changes, and scratch ones, which never run."""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry import clock
from skerry.clock import Moment
from skerry.errors import Conflict, InvalidSpec, NotFound, ProviderUnavailable, SkerryError
from skerry.model.spec import SandboxId, parse_id
from skerry.net.http import Body
from skerry.providers.base import BoxChange, BoxState, BoxStatus, log
from skerry.providers.dockerapi.api import Engine
from skerry.providers.shared import layout

_KILLED = 137
_ENDED_BY_ITSELF = 0
"""The agent's own exit code when its time was over or somebody told it to end."""
_REMOVED = frozenset({"removing", "dead"})
"""States of a container that somebody removes, or could not remove to the end."""
_ACTIONS = ("start", "die", "oom", "pause", "unpause", "destroy", "remove", "rename")
"""Events after which a box may be in another state."""
ABANDONED_S = 3600.0
"""Longer than anybody needs one: what is older was left by a program that died."""
SINCE_LABEL = "skerry.since"
_SCRATCH_LABEL = "skerry.scratch"
_SCRATCH_PREFIX = "skerry-scratch-"
NEVER = ("/never",)
"""Command of containers that are never started, and of images that were made of them."""


class Inspected(msgspec.Struct, rename="pascal"):
    class State(msgspec.Struct, rename="pascal"):
        status: str = ""
        running: bool = False
        paused: bool = False
        pid: int = 0
        exit_code: int = 0
        oom_killed: bool = msgspec.field(name="OOMKilled", default=False)

    class Config(msgspec.Struct, rename="pascal"):
        labels: dict[str, str] | None = None
        entrypoint: list[str] | None = None

    id: str
    state: State
    config: Config
    image: str = ""
    mounts: list[dict[str, Any]] | None = None


class Listed(msgspec.Struct, rename="pascal"):
    id: str
    state: str = ""
    names: list[str] | None = None
    labels: dict[str, str] | None = None
    created: float | None = None
    image_id: str = msgspec.field(name="ImageID", default="")
    mounts: list[dict[str, Any]] | None = None


async def inspect(engine: Engine, id: SandboxId) -> Inspected:
    """Raises NotFound."""
    try:
        return await engine.get(f"/containers/{layout.container_name(id)}/json", Inspected)
    except NotFound:
        raise NotFound(f"there is no box {id}") from None


async def list_all(engine: Engine, *labels: str) -> list[Listed]:
    """List the containers that have these labels, running or not."""
    query = {"all": True, "filters": {"label": [*labels]} if labels else {}}
    return await engine.get("/containers/json", list[Listed], query=query)


async def all_boxes(engine: Engine) -> dict[SandboxId, BoxStatus]:
    """Every container of ours, also one that was only just made."""
    listed = await list_all(engine, f"skerry={engine.provider}")
    current = await _current_images(engine, {(each.labels or {}).get("skerry.image", "") for each in listed})
    found = {}
    for each in listed:
        id = _id_of(*each.names or ()) or await _name_again(engine, each)
        status = await _status(engine, id, each) if id is not None else None
        if id is not None and status is not None:
            asked = status.labels.get("skerry.image", "")
            is_outdated = current.get(asked, status.image) != status.image
            found[id] = msgspec.structs.replace(status, outdated=is_outdated)
    return found


def _id_of(*names: str) -> SandboxId | None:
    """The id in the first name that has one. Labels are inherited from images; a name is not."""
    for name in names:
        with suppress(InvalidSpec):
            return parse_id(name.removeprefix("/").removeprefix(layout.PREFIX))
    return None


async def _name_again(engine: Engine, listed: Listed) -> SandboxId | None:
    """Give a box that somebody renamed its name back, since all is addressed by it."""
    # What was made from a box's image inherits the labels, but not the mounts.
    if all(mount.get("Destination") != layout.RUNTIME for mount in listed.mounts or []):
        return None
    try:
        id = parse_id((listed.labels or {}).get("skerry.sandbox", ""))
        await engine.post(f"/containers/{listed.id}/rename", query={"name": layout.container_name(id)})
    except (InvalidSpec, NotFound, Conflict) as error:
        log.debug("%s: container %s does not get its name back: %s", engine.provider, listed.id[:12], error)
        return None
    log.info("%s: gave the container of sandbox %s its name back", engine.provider, id)
    return id


async def status_of(engine: Engine, id: SandboxId) -> BoxStatus | None:
    """The status of one box, or None if it is gone."""
    try:
        seen = await inspect(engine, id)
    except NotFound:
        return None
    return BoxStatus(
        state=_state(seen), labels=seen.config.labels or {}, out_of_memory=_ran_out(seen), image=seen.image
    )


async def _status(engine: Engine, id: SandboxId, listed: Listed) -> BoxStatus | None:
    labels, image = listed.labels or {}, full_id(listed.image_id)
    common: dict[str, Any] = {"created_at": listed.created, "labels": labels, "image": image}
    quick = {"running": BoxState.RUNNING, "paused": BoxState.PAUSED, "created": BoxState.DEAD}.get(listed.state)
    if quick is not None:
        return BoxStatus(state=quick, **common)
    seen = await status_of(engine, id)  # it may have gone while we looked
    return None if seen is None else msgspec.structs.replace(seen, **common)


def _state(seen: Inspected) -> BoxState:
    state = seen.state
    if state.paused:
        return BoxState.PAUSED
    if state.running:
        return BoxState.RUNNING
    if state.status in _REMOVED:
        return BoxState.REMAINS
    if state.status == "created":  # and never started
        return BoxState.DEAD
    if state.status not in ("exited", "stopped"):  # on its way: Podman's are `stopping` and `initialized` for a while
        return BoxState.RUNNING
    return BoxState.DEAD if state.exit_code == _ENDED_BY_ITSELF or _ran_out(seen) else BoxState.STOPPED


def _ran_out(seen: Inspected) -> bool:
    state = seen.state
    return not state.running and state.oom_killed and state.exit_code == _KILLED


async def _current_images(engine: Engine, names: set[str]) -> dict[str, str]:
    """Image ids by the names that have a meaning now: a name without one makes no box outdated."""
    if not names - {""}:
        return {}
    images = await engine.get("/images/json", list[dict[str, Any]])
    known = {tag: full_id(image["Id"]) for image in images for tag in image.get("RepoTags") or []}
    return {name: known[whole] for name in names if (whole := _whole(name, known)) is not None}


def _whole(name: str, known: dict[str, str]) -> str | None:
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    places = ("", "localhost/", "docker.io/", "docker.io/library/")
    return next((place + tagged for place in places if place + tagged in known), None)


def full_id(image: str) -> str:
    """The id of an image as Docker writes it; Podman leaves the kind of digest out."""
    return image if not image or image.startswith("sha256:") else f"sha256:{image}"


async def watch(engine: Engine) -> AsyncIterator[BoxChange]:
    """Yield all boxes, then those that change. Events are asked for from a moment before, so that none is missed."""
    since = int(time.time()) - 1
    for each, status in (await all_boxes(engine)).items():
        yield BoxChange(id=each, status=status)
    filters = {"type": ["container"], "label": [f"skerry={engine.provider}"]}
    async with engine.stream("GET", "/events", query={"since": str(since), "filters": filters}) as answer:
        async for line in answer.lines():
            event = msgspec.json.decode(line, type=dict[str, Any])
            name = str((event.get("Actor") or {}).get("Attributes", {}).get("name", ""))
            if (event.get("Action") or event.get("status")) in _ACTIONS and (id := _id_of(name)) is not None:
                yield BoxChange(id=id, status=await status_of(engine, id))
    raise ProviderUnavailable(engine.provider, "its daemon ended the stream of events", fix="start the daemon again")


# Scratch containers never run: they are a way to read and write the files of an image or a volume, as small tars.


@asynccontextmanager
async def scratch(
    engine: Engine,
    image: str,
    *,
    mounts: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AsyncIterator[str]:
    """Make one, yield its name, and remove it after."""
    name = f"{_SCRATCH_PREFIX}{secrets.token_hex(8)}"
    body = {
        "Image": image,
        "Entrypoint": NEVER,
        # An image made from a box would hand down the labels by which boxes are found.
        "Labels": {
            "skerry": "",
            "skerry.sandbox": "",
            _SCRATCH_LABEL: engine.provider,
            SINCE_LABEL: str(clock.now()),
            **(labels or {}),
        },
        "HostConfig": {"NetworkMode": "none", "Mounts": list(mounts)},
        **(config or {}),
    }
    await engine.post("/containers/create", query={"name": name}, json=body)
    try:
        yield name
    finally:
        with suppress(NotFound):
            await _remove(engine, name)


def is_abandoned(labels: Mapping[str, str] | None) -> bool:
    """Whether its maker is dead, by its age. What another machine made is left to that: wall clocks may jump."""
    since = Moment.parse((labels or {}).get(SINCE_LABEL, ""))
    age_s = None if since is None else since.age_s(clock.now())
    return age_s is not None and age_s > ABANDONED_S


async def sweep_scratch(engine: Engine) -> None:
    """Remove those whose makers did not live to do so. A box made from a snapshot inherits the label, not the name."""
    for each in await list_all(engine, f"{_SCRATCH_LABEL}={engine.provider}"):
        is_one = any(name.removeprefix("/").startswith(_SCRATCH_PREFIX) for name in each.names or ())
        if is_one and is_abandoned(each.labels):
            try:
                await _remove(engine, each.id)
                log.info("%s: removed the abandoned scratch container %s", engine.provider, each.id[:12])
            except SkerryError as error:  # the next one tries again
                log.debug("%s: the scratch container %s is not removed: %s", engine.provider, each.id[:12], error)


async def _remove(engine: Engine, container: str) -> None:
    await engine.delete(f"/containers/{container}", query={"force": True, "v": True})


def tar(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    """Fill a tar, and cut it at the mark of its end: Podman fails if it has not read all padding in time."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        fill(archive)
        end = content.tell() + 2 * tarfile.BLOCKSIZE
    return content.getvalue()[:end]


def folder_tar(name: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> bytes:
    """A tar of one empty folder; unpacked over one that exists, it changes its owner and mode."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, uid, gid
    return tar(lambda archive: archive.addfile(entry))


def file_tar(name: str, text: str) -> bytes:
    """A tar of one file that everybody can read."""
    entry, content = tarfile.TarInfo(name), text.encode()
    entry.size = len(content)
    return tar(lambda archive: archive.addfile(entry, io.BytesIO(content)))


async def unpack(engine: Engine, container: str, path: str, body: Body, timeout_s: float | None = None) -> None:
    """Unpack a tar in a folder of a container."""
    target = f"/containers/{container}/archive"
    await engine.ask("PUT", target, None, query={"path": path}, body=body, timeout_s=timeout_s)


async def pieces_of(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece
