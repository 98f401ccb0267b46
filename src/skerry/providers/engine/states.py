"""Containers as the engine lists them, and what each state means for a box."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from skerry.errors import Conflict, InvalidSpec, NotFound
from skerry.providers import layout
from skerry.providers.base import BoxState, BoxStatus
from skerry.providers.engine.api import Engine
from skerry.spec import SandboxId, parse_id

_KILLED = 137
_ENDED_BY_ITSELF = 0
"""The agent's own exit code when its time was over or somebody told it to end."""


class Inspected(msgspec.Struct, rename="pascal"):
    class State(msgspec.Struct, rename="pascal"):
        status: str = ""
        running: bool = False
        paused: bool = False
        pid: int = 0
        exit_code: int = 0
        oom_killed: bool = msgspec.field(name="OOMKilled", default=False)
        error: str = ""

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
    state: str
    names: list[str]
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


async def all_boxes(engine: Engine) -> dict[SandboxId, BoxStatus]:
    """Every container of ours, also one that was only just made."""
    query = {"all": True, "filters": {"label": [f"skerry={engine.provider}"]}}
    listed = await engine.get("/containers/json", list[Listed], query=query)
    current = await _current_images(engine, {(each.labels or {}).get("skerry.image", "") for each in listed})
    found = {}
    for each in listed:
        id = _id_of(each) or await _name_again(engine, each)
        status = await _status(engine, id, each) if id is not None else None
        if id is not None and status is not None:
            asked = status.labels.get("skerry.image", "")
            is_outdated = current.get(asked, status.image) != status.image
            found[id] = msgspec.structs.replace(status, outdated=is_outdated)
    return found


def _id_of(listed: Listed) -> SandboxId | None:
    """Labels are inherited from images; a name is not."""
    for name in listed.names:
        with suppress(InvalidSpec):
            return parse_id(name.removeprefix("/").removeprefix(layout.PREFIX))
    return None


async def _name_again(engine: Engine, listed: Listed) -> SandboxId | None:
    """A box that somebody renamed gets its name back, since all is addressed by it. What was made from a box's image
    inherits the labels, but not the mounts."""
    if all(mount.get("Destination") != layout.RUNTIME for mount in listed.mounts or []):
        return None
    with suppress(InvalidSpec, NotFound, Conflict):
        id = parse_id((listed.labels or {}).get("skerry.sandbox", ""))
        await engine.post(f"/containers/{listed.id}/rename", query={"name": layout.container_name(id)})
        return id
    return None


async def status_of(engine: Engine, id: SandboxId) -> BoxStatus | None:
    """One box, or None if it is gone."""
    try:
        seen = await inspect(engine, id)
    except NotFound:
        return None
    return BoxStatus(
        state=_state(seen), labels=seen.config.labels or {}, out_of_memory=_ran_out(seen), image=seen.image
    )


async def _status(engine: Engine, id: SandboxId, listed: Listed) -> BoxStatus | None:
    common: dict[str, Any] = {
        "created_at": listed.created,
        "labels": listed.labels or {},
        "image": _full(listed.image_id),
    }
    quick = {"running": BoxState.RUNNING, "paused": BoxState.PAUSED, "created": BoxState.DEAD}.get(listed.state)
    if quick is not None:
        return BoxStatus(state=quick, **common)
    try:
        seen = await inspect(engine, id)
    except NotFound:
        return None  # it went while we looked
    return BoxStatus(state=_state(seen), out_of_memory=_ran_out(seen), **common)


def _state(seen: Inspected) -> BoxState:
    state = seen.state
    if state.paused:
        return BoxState.PAUSED
    if state.running:
        return BoxState.RUNNING
    if state.status not in ("exited", "stopped"):
        return BoxState.DEAD
    return BoxState.DEAD if state.exit_code == _ENDED_BY_ITSELF or _ran_out(seen) else BoxState.STOPPED


def _ran_out(seen: Inspected) -> bool:
    state = seen.state
    return not state.running and state.oom_killed and state.exit_code == _KILLED


async def _current_images(engine: Engine, names: set[str]) -> dict[str, str]:
    """What the names mean now; one that means nothing any more does not make a box outdated."""
    if not names - {""}:
        return {}
    images = await engine.get("/images/json", list[dict[str, Any]])
    known: dict[str, str] = {}
    for image in images:
        for tag in image.get("RepoTags") or []:
            known[tag] = _full(image["Id"])
    return {name: known[whole] for name in names if (whole := _whole(name, known)) is not None}


def _whole(name: str, known: dict[str, str]) -> str | None:
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    places = ("", "localhost/", "docker.io/", "docker.io/library/")
    return next((place + tagged for place in places if place + tagged in known), None)


def _full(image: str) -> str:
    return image if not image or image.startswith("sha256:") else f"sha256:{image}"
