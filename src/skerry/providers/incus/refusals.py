"""What Incus says when it refuses, as errors that say what to do: most have one status, so the text has to tell."""

from __future__ import annotations

import msgspec

from skerry.errors import Conflict, LimitReached, NotFound, ProviderError, ProviderUnavailable, SkerryError

_MAX_MESSAGE = 2000

_NO_ROOM: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("no space left on device", "not enough free space", "insufficient free space"),
        "its storage is full: free some room in the pool, or choose another one",
    ),
    (
        ("disk quota exceeded",),
        "the disk of the box is full: remove files there, or make one with a larger disk=",
    ),
    (
        ("cannot allocate memory", "out of memory"),
        "the host is out of memory: end something, or choose another host",
    ),
    (
        ("no available ip", "no free ip", "no available address", "no addresses left", "no more addresses"),
        "the network has no address left: end something, or widen its subnet",
    ),
    (
        ("reached maximum number", "reached maximum aggregate"),
        "the project's limits are reached: end something, or raise them with `incus project set`",
    ),
    (
        ("not enough uid/gid available",),
        "the host has no user ids left for another box: widen the range of root in /etc/subuid and /etc/subgid",
    ),
    (("too many open files", "no buffer space"), "the host is out of descriptors or buffers"),
)
"""What has run out, by how Incus and the kernel say so, and what to do."""
_AS_IT_WAS = ("already stopped", "is not running", "already running", "already frozen", "not frozen", "invalid pid")
_TAKEN = (
    "unique constraint failed",
    "already exists",
    "already in use",
    "is currently in use",
    "still in use",
)
_AWAY = (
    "missing event connection",
    "server isn't ready yet",
    "no route to host",
    "connection refused",
    "connection reset",
    "i/o timeout",
    "context deadline exceeded",
    "cluster member is offline",
    "peer node",
    "unexpected eof",
)
"""How a member of a cluster says of another that it does not answer."""
_LOW_LEVEL = ("low-level", "raw.lxc", "restricted.containers.lowlevel")


class Busy(ProviderError):
    """Somebody else is at it: to be tried again in a moment."""


class AsItWas(ProviderError):
    """It is in the state that was asked for."""


class AddressTaken(ProviderError):
    """Another container has the address, such as one of a project whose leases are not told to us."""


class Frozen(ProviderError):
    """It is paused, and nothing can be begun in it."""


class StillRunning(ProviderError):
    """It has to be stopped first."""


def of_answer(status: int, body: bytes) -> SkerryError:
    try:
        data = msgspec.json.decode(body)
        text = data.get("error") if isinstance(data, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = None
    return refusal(status, str(text or body.decode(errors="replace")))


def refusal(status: int, text: str) -> SkerryError:
    text = text.strip()[:_MAX_MESSAGE] or f"status {status}, without a reason"
    low = text.lower()
    if status == 404:
        return NotFound(f"incus: {text}")
    for signs, advice in _NO_ROOM:
        if any(sign in low for sign in signs):
            return LimitReached(f"incus: {advice} ({text})")
    if any(sign in low for sign in _AWAY):
        fix = "see `incus cluster list`; what is there is found again once its member is back"
        return ProviderUnavailable("incus", f"the member that was meant does not answer ({text})", fix=fix)
    if "busy running" in low or "database is locked" in low:
        return Busy(f"incus: {text}")
    if any(sign in low for sign in _AS_IT_WAS):
        return AsItWas(f"incus: {text}")
    if low == "instance is frozen":
        return Frozen(f"incus: {text}")
    if low == "instance is running":
        return StillRunning(f"incus: {text}")
    if "already defined on another nic" in low:
        return AddressTaken(f"incus: {text}")
    if status == 409 or any(sign in low for sign in _TAKEN):
        return Conflict(f"incus: {text}")
    if any(sign in low for sign in _LOW_LEVEL):
        return ProviderError(
            f"incus: the project does not let us say what a box starts with: "
            f"`incus project set NAME restricted.containers.lowlevel=allow` ({text})"
        )
    return ProviderError(f"incus refused (status {status}): {text}")
