"""Instances of Incus: as it lists them, as states of boxes, their consoles, and the events that tell of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from skerry.aio import backoff
from skerry.errors import InvalidSpec, NotFound, ProviderError, ProviderUnavailable, SkerryError
from skerry.model.spec import SandboxId, parse_id
from skerry.providers.base import BoxChange, BoxState, BoxStatus, log
from skerry.providers.incus.api import FIX, PROVIDER, IncusApi
from skerry.providers.shared import layout

LAST_WORD = b"skerry: this box has ended by itself"
"""Last line of PID 1 of a box that ends without having been told to stop."""
IMAGE = "skerry.image"
_USER = "user."
_PAUSED = frozenset({"frozen", "freezing"})
_OUT_OF_SIGHT = "Error"
"""Status of an instance that Incus has lost hold of."""
_ENDING_S = 3.0
"""Time that Incus may need after the end of a container until it shows its console."""
_LOOK_S = 0.02
_FOLLOW_S = 0.25
_MAX_EVENT = 1 << 20
_ACTIONS = ("created", "deleted", "paused", "renamed", "restarted", "resumed", "shutdown", "started", "stopped")
"""Events after which a box may be in another state."""


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
        """Whether it has run before, and is not only just made."""
        return self.status.lower() == "stopped" and "volatile.last_state.power" in self.config

    @property
    def labels(self) -> dict[str, str]:
        return labels(self.config)

    @property
    def image(self) -> str:
        """The fingerprint of the image that it was made from."""
        return self.config.get("volatile.base_image", "")


def path(id: SandboxId) -> str:
    return f"/1.0/instances/{layout.container_name(id)}"


def as_config(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as Incus keeps them: keys that are the user's own."""
    return {f"{_USER}{key}": value for key, value in labels.items()}


def labels(config: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(_USER): value for key, value in config.items() if key.startswith(_USER)}


async def inspect(api: IncusApi, id: SandboxId) -> Instance:
    """Raises NotFound."""
    try:
        return await api.get(path(id), Instance)
    except NotFound:
        raise NotFound(f"there is no box {id}") from None


async def listed(api: IncusApi) -> list[Instance]:
    """List all but those whose member is away, or that Incus has lost hold of: such boxes are lost until seen again."""
    found = await api.get("/1.0/instances", list[dict[str, Any]], query={"recursion": "1"})
    known = [each for each in found if each.get("config") is not None and each.get("status") != _OUT_OF_SIGHT]
    return msgspec.convert(known, list[Instance])


async def of_boxes(api: IncusApi) -> dict[SandboxId, Instance]:
    """Every container of ours, also one that was only just made."""
    ours = [each for each in await listed(api) if each.labels.get("skerry") == PROVIDER]
    return {id: each for each in ours if (id := id_of(each.name)) is not None}


def id_of(name: str) -> SandboxId | None:
    """The id in a name: a copy of a box has its labels, but not its name."""
    with suppress(InvalidSpec):
        return parse_id(name.removeprefix(layout.PREFIX)) if name.startswith(layout.PREFIX) else None
    return None


async def all_boxes(api: IncusApi) -> dict[SandboxId, BoxStatus]:
    boxes = await of_boxes(api)
    current = await _current_images(api, (box.labels.get(IMAGE, "") for box in boxes.values()))
    statuses = await asyncio.gather(*(_status(api, id, box) for id, box in boxes.items()))
    found = {}
    for id, status in zip(boxes, statuses, strict=True):
        if status is not None:
            is_outdated = current.get(status.labels.get(IMAGE, ""), status.image) != status.image
            found[id] = msgspec.structs.replace(status, outdated=is_outdated)
    return found


async def status_of(api: IncusApi, id: SandboxId) -> BoxStatus | None:
    """The status of one box, or None if it is gone."""
    try:
        box = await inspect(api, id)
        return None if box.status == _OUT_OF_SIGHT else await _status(api, id, box)
    except NotFound:
        return None


async def _status(api: IncusApi, id: SandboxId, box: Instance) -> BoxStatus | None:
    is_off = box.status.lower() == "stopped"
    state = BoxState.PAUSED if box.status.lower() in _PAUSED else BoxState.RUNNING  # or on its way from or to that
    if is_off and not box.was_stopped:  # nor was it ever started
        state = BoxState.DEAD
    elif is_off:
        try:
            state = BoxState.DEAD if LAST_WORD in await said(api, id) else BoxState.STOPPED
        except NotFound:
            return None  # it went while we looked
    created_at = datetime.fromisoformat(box.created_at).timestamp() if box.created_at else None
    return BoxStatus(state=state, created_at=created_at, labels=box.labels, image=box.image)


async def said(api: IncusApi, id: SandboxId) -> bytes:
    """Read what PID 1 of a box has said since its start; nothing while Incus does not tell. Raises NotFound."""
    for delay_s in backoff(_LOOK_S, _LOOK_S, _ENDING_S):
        try:
            return (await api.raw(f"{path(id)}/console")).replace(b"\r\n", b"\n")
        except NotFound:
            raise
        except ProviderError as error:
            log.debug("incus: the console of sandbox %s is not told yet: %s", id, error)
        await asyncio.sleep(delay_s)
    return b""


async def _current_images(api: IncusApi, names: Iterable[str]) -> dict[str, str]:
    """Image ids by the names that have a meaning now: a name without one makes no box outdated."""
    if not set(names) - {""}:
        return {}
    aliases = await api.get("/1.0/images/aliases", list[dict[str, Any]], query={"recursion": "1"})
    return {str(each["name"]): str(each["target"]) for each in aliases}


async def read_console(api: IncusApi, id: SandboxId, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
    """Yield all of it, or its last lines; followed, until the box ends. Incus tells it whole only, so it is polled."""
    known = b""
    try:
        while True:
            is_over = not follow or not (await inspect(api, id)).is_running
            whole = await said(api, id)
            fresh = whole[len(known) :] if whole.startswith(known) else whole  # the oldest is forgotten some time
            known, tail, fresh = whole, None, fresh if tail is None else _last_lines(fresh, tail)
            if fresh:
                yield fresh
            if is_over:
                return
            await asyncio.sleep(_FOLLOW_S)
    except NotFound:
        if not follow:
            raise


async def last_words(api: IncusApi, id: SandboxId) -> str:
    """The end of a box's console, or of Incus's own log of it, for an error."""
    words = b""
    for read in (partial(said, api, id), partial(api.raw, f"{path(id)}/logs/lxc.log")):
        try:
            words = words or _last_lines(await read(), 50)
        except SkerryError as error:
            log.debug("incus: a log of sandbox %s cannot be read: %s", id, error)
    return words.decode(errors="replace")[-4096:]


def _last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else b""


class _Event(msgspec.Struct):
    metadata: dict[str, Any] = {}


async def watch(api: IncusApi) -> AsyncIterator[BoxChange]:
    """Yield all boxes, then those that change. Events are listened to from before, so that none is missed."""
    events = _Events()
    socket = await api.websocket("/1.0/events", query={"type": "lifecycle"})
    try:
        socket.on_message_end = events.message_ended
        socket.start(events)
        for id, status in (await all_boxes(api)).items():
            yield BoxChange(id=id, status=status)
        while (changed := await events.changed.get()) is not None:
            yield BoxChange(id=changed, status=await status_of(api, changed))
    finally:
        socket.close()
    raise ProviderUnavailable(PROVIDER, "its daemon ended the stream of events", fix=FIX)


class _Events:
    """Takes messages apart for the boxes that they speak of."""

    def __init__(self) -> None:
        self._text = bytearray()
        self.changed: asyncio.Queue[SandboxId | None] = asyncio.Queue()
        """Boxes that something happened to, and None at the end."""

    def received(self, data: memoryview) -> None:
        if len(self._text) + data.nbytes <= _MAX_EVENT:
            self._text += data

    def message_ended(self) -> None:
        text, self._text = bytes(self._text), bytearray()
        try:
            event = msgspec.json.decode(text, type=_Event)
        except msgspec.DecodeError:
            return  # cut short, as too long to be one of ours
        if str(event.metadata.get("action", "")).removeprefix("instance-") in _ACTIONS:
            parts = str(event.metadata.get("source", "")).partition("?")[0].split("/")
            if len(parts) > 3 and (id := id_of(parts[3])) is not None:
                self.changed.put_nowait(id)

    def closed(self, error: Exception | None) -> None:
        self.changed.put_nowait(None)
