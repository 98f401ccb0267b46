"""Containers as Incus lists them, and what each state means for a box."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, NotFound, ProviderError
from skerry.providers import layout
from skerry.providers.base import BoxState, BoxStatus
from skerry.providers.incus.api import PROVIDER, Api
from skerry.spec import SandboxId, parse_id

LAST_WORD = b"skerry: this box has ended by itself"
"""What PID 1 of a box says before it ends without having been told to stop."""
IMAGE = "skerry.image"
_USER = "user."
_BASE_IMAGE = "volatile.base_image"
_LAST_POWER = "volatile.last_state.power"
_STATES = {"running": BoxState.RUNNING, "frozen": BoxState.PAUSED}
_ENDING_S = 3.0
"""How long Incus may need after the end of a container until it tells what that said."""
_LOOK_S = 0.02


class Instance(msgspec.Struct):
    name: str
    status: str = ""
    config: dict[str, str] = {}
    devices: dict[str, dict[str, str]] = {}
    created_at: str = ""
    location: str = ""

    @property
    def is_running(self) -> bool:
        return self.status.lower() == "running"

    @property
    def was_stopped(self) -> bool:
        """And not only just made."""
        return self.status.lower() == "stopped" and _LAST_POWER in self.config

    @property
    def labels(self) -> dict[str, str]:
        return labels(self.config)

    @property
    def image(self) -> str:
        """The fingerprint of the image that it was made from."""
        return self.config.get(_BASE_IMAGE, "")


class State(msgspec.Struct):
    status: str = ""
    pid: int = 0


def path(id: SandboxId) -> str:
    return f"/1.0/instances/{layout.container_name(id)}"


def as_config(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as Incus keeps them: keys that are the user's own."""
    return {f"{_USER}{key}": value for key, value in labels.items()}


def labels(config: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(_USER): value for key, value in config.items() if key.startswith(_USER)}


async def inspect(api: Api, id: SandboxId) -> Instance:
    """Raises NotFound."""
    try:
        return await api.get(path(id), Instance)
    except NotFound:
        raise NotFound(f"there is no box {id}") from None


async def state_of(api: Api, id: SandboxId) -> State:
    try:
        return await api.get(f"{path(id)}/state", State)
    except NotFound:
        raise NotFound(f"there is no box {id}") from None


async def listed(api: Api) -> list[Instance]:
    """Of a container whose member is away, or that Incus has lost hold of, no more is known than that it was there. It
    is left out: that makes a box lost until it is seen again, and never ends one."""
    found = await api.get("/1.0/instances", list[dict[str, Any]], query={"recursion": "1"})
    known = [each for each in found if each.get("config") is not None and each.get("status") != "Error"]
    return msgspec.convert(known, list[Instance])


async def of_boxes(api: Api) -> dict[SandboxId, Instance]:
    """Every container of ours, also one that was only just made."""
    found = {}
    for each in await listed(api):
        id = id_of(each.name)
        if id is not None and each.labels.get("skerry") == PROVIDER:
            found[id] = each
    return found


def id_of(name: str) -> SandboxId | None:
    """A copy of a box has its labels, but not its name."""
    with suppress(InvalidSpec):
        return parse_id(name.removeprefix(layout.PREFIX)) if name.startswith(layout.PREFIX) else None
    return None


async def all_boxes(api: Api) -> dict[SandboxId, BoxStatus]:
    boxes = await of_boxes(api)
    current = await _current_images(api, (box.labels.get(IMAGE, "") for box in boxes.values()))
    statuses = await asyncio.gather(*(_status(api, id, box) for id, box in boxes.items()))
    found = {}
    for id, status in zip(boxes, statuses, strict=True):
        if status is not None:
            is_outdated = current.get(status.labels.get(IMAGE, ""), status.image) != status.image
            found[id] = msgspec.structs.replace(status, outdated=is_outdated)
    return found


async def status_of(api: Api, id: SandboxId) -> BoxStatus | None:
    """One box, or None if it is gone."""
    try:
        return await _status(api, id, await inspect(api, id))
    except NotFound:
        return None


async def _status(api: Api, id: SandboxId, box: Instance) -> BoxStatus | None:
    state = _STATES.get(box.status.lower())
    if state is None:
        try:
            state = await _ended(api, id, box)
        except NotFound:
            return None  # it went while we looked
    created_at = datetime.fromisoformat(box.created_at).timestamp() if box.created_at else None
    return BoxStatus(state=state, created_at=created_at, labels=box.labels, image=box.image)


async def _ended(api: Api, id: SandboxId, box: Instance) -> BoxState:
    if not box.was_stopped:
        return BoxState.DEAD  # it was never started, or is neither here nor there
    return BoxState.DEAD if LAST_WORD in await said(api, id) else BoxState.STOPPED


async def said(api: Api, id: SandboxId) -> bytes:
    """What PID 1 of a box has said since its start. While a container ends, nobody tells."""
    end = time.monotonic() + _ENDING_S
    while True:
        try:
            return await api.raw(f"{path(id)}/console")
        except NotFound:
            raise
        except ProviderError:
            if time.monotonic() > end:
                return b""
        await asyncio.sleep(_LOOK_S)


async def _current_images(api: Api, names: Iterable[str]) -> dict[str, str]:
    """What the names mean now; one that means nothing any more does not make a box outdated."""
    if not set(names) - {""}:
        return {}
    aliases = await api.get("/1.0/images/aliases", list[dict[str, Any]], query={"recursion": "1"})
    return {str(each["name"]): str(each["target"]) for each in aliases}
