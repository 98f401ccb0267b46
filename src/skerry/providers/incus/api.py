"""API of Incus, as far as we need it, and the settings that say where it is.

Every wait has a deadline, operations are awaited, and refusals become errors of ours.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from skerry.errors import (
    BoxFull,
    ConfigError,
    Conflict,
    LimitReached,
    NotFound,
    ProviderError,
    ProviderUnavailable,
    SkerryError,
)
from skerry.net import websocket
from skerry.net.http import Content, HttpClient, HttpError, NoAnswer, UpgradeRefused
from skerry.net.websocket import WebSocket
from skerry.providers.shared.limits import DaemonConfig

T = TypeVar("T")

PROVIDER = "incus"
FIX = (
    "install Incus (apt-get install incus) and set it up (incus admin init --minimal); be root or in the group "
    "incus-admin, or set providers.incus.host"
)
_FIX_SILENCE = (
    "look at its log; in a cluster at `incus cluster list`: a member that went away is waited for until that is noticed"
)
_SLACK_S = 5.0
"""Time that the daemon may take to answer beyond the wait that it was told."""
_SUCCESS = 200
_RUNNING = (103, 105)
_MAX_MESSAGE = 2000
_BOX_FULL = "disk quota exceeded"
_NO_ROOM = {
    "no space left on device|not enough free space|insufficient free space": (
        "its storage is full: free some room in the pool, or choose another one"
    ),
    _BOX_FULL: "the disk of the box is full: remove files there, or make one with a larger disk=",
    "cannot allocate memory|out of memory": "the host is out of memory: end something, or choose another host",
    "no available ip|no free ip|no available address|no addresses left|no more addresses": (
        "the network has no address left: end something, or widen its subnet"
    ),
    "reached maximum number|reached maximum aggregate": (
        "the project's limits are reached: end something, or raise them with `incus project set`"
    ),
    "not enough uid/gid available": (
        "the host has no user ids left for another box: widen the range of root in /etc/subuid and /etc/subgid"
    ),
    "too many open files|no buffer space": "the host is out of descriptors or buffers",
}
"""Advice by the words of Incus and the kernel for something that has run out."""
_AWAY = (
    "missing event connection|server isn't ready yet|no route to host|connection refused|connection reset|i/o timeout|"
    "context deadline exceeded|cluster member is offline|peer node|unexpected eof"
)
"""Words of a member of a cluster for another that does not answer."""
_LOW_LEVEL = r"low-level|raw\.lxc|restricted\.containers\.lowlevel"


class IncusConfig(DaemonConfig, frozen=True):
    host: str = "unix:///var/lib/incus/unix.socket"
    """The daemon: unix:///path or https://host:port."""
    certificate: str = ""
    """For https: the file with our own certificate, which the daemon has to trust."""
    key: str = ""
    """For https: the file with its key."""
    server_certificate: str = ""
    """For https: the file with the daemon's own certificate, which is the only one that is then believed."""
    project: str = "default"
    """The Incus project that boxes, volumes and images are in."""
    pool: str = ""
    """Where boxes and volumes lie; empty: the pool of the project's default profile."""
    network: str = ""
    """The managed bridge of boxes that ask for one; empty: the only one there is."""
    disk: int | str = "10G"
    """The whole root, its image included, where the pool holds limits."""

    def tls(self) -> ssl.SSLContext | None:
        """The context by which both sides prove who they are; None for a socket of this machine. Raises ConfigError."""
        parts = urlsplit(self.host)
        if parts.scheme == "unix" and parts.path:
            return None
        try:
            port = parts.port
        except ValueError:  # out of range
            port = None
        if parts.scheme != "https" or not parts.hostname or not port:
            raise ConfigError(f"providers.incus.host: {self.host!r} is neither unix:///path nor https://host:port")
        if not self.certificate or not self.key:
            raise ConfigError(
                "providers.incus: https needs certificate and key, a pair of files that the daemon trusts: "
                "`incus config trust add-certificate FILE` there"
            )
        try:
            context = ssl.create_default_context(cafile=self.server_certificate or None)
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"providers.incus: a certificate or key cannot be read: {error}") from error
        # A daemon's own certificate names no host by which it is reached; it alone is believed, which is more.
        context.check_hostname = not self.server_certificate
        return context


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


_KINDS: Mapping[type[SkerryError], str] = {
    Busy: "busy running|database is locked|matching non-reusable operation",
    AsItWas: "already stopped|is not running|already running|already frozen|not frozen|invalid pid",
    Frozen: r"\Ainstance is frozen\Z",
    StillRunning: r"\Ainstance is running\Z",
    AddressTaken: "already defined on another nic",
    Conflict: "unique constraint failed|already exists|already in use|is currently in use|still in use",
}
"""Errors by the words of Incus for them, the first that fits."""


class Operation(msgspec.Struct):
    """Operation that the daemon does in its own time."""

    id: str = ""
    status_code: int = 0
    err: str = ""
    metadata: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    type: str = ""
    metadata: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class IncusApi:
    """One daemon, or a cluster through one of its members. It holds no connection and no state."""

    def __init__(self, config: IncusConfig) -> None:
        self._http = HttpClient(config.host, tls=config.tls(), timeout_s=config.timeout_s)
        self.address = self._http.address
        self.project = config.project

    async def get(self, path: str, type: type[T], *, query: Mapping[str, Any] | None = None) -> T:
        return self._decoded((await self._ask("GET", path, query=query)).metadata, type)

    async def do(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> Operation:
        """Ask for a change, and wait until it is made."""
        timeout_s = self._http.timeout_s if timeout_s is None else timeout_s
        answer = await self._ask(method, path, timeout_s=timeout_s + _SLACK_S, **content)
        if answer.type != "async":
            return Operation(status_code=_SUCCESS)
        return await self._wait(self._decoded(answer.metadata, Operation).id, timeout_s)

    async def begin(self, method: str, path: str, *, json: Any) -> Operation:
        """Begin an operation that goes on while somebody talks to it."""
        return self._decoded((await self._ask(method, path, json=json)).metadata, Operation)

    async def _wait(self, id: str, timeout_s: float) -> Operation:
        # By its id: in a cluster the address that is answered has more in it than a path.
        path, query = f"/1.0/operations/{id}/wait", {"timeout": str(int(timeout_s) or 1)}
        answer = await self._ask("GET", path, query=query, timeout_s=timeout_s + _SLACK_S)
        ended = self._decoded(answer.metadata, Operation)
        if ended.status_code in _RUNNING:
            reason = f"what it was asked for was not done within {timeout_s:g} s; it may still be"
            raise ProviderUnavailable(PROVIDER, reason, fix="look at `incus operation list`, and at the daemon's log")
        if ended.status_code != _SUCCESS:
            raise api_error(ended.status_code, ended.err)
        return ended

    async def raw(self, path: str, *, query: Mapping[str, Any] | None = None) -> bytes:
        """Get a file."""
        with self._translating_errors():
            answer = await self._http.request("GET", path, query=self._in_project(query))
        if answer.status >= 400:
            raise _api_error_of(answer.status, answer.body)
        return answer.body

    async def websocket(self, path: str, *, query: Mapping[str, Any]) -> WebSocket:
        with self._translating_errors():
            try:
                return await websocket.connect(self._http, path, self._in_project(query))
            except UpgradeRefused as error:
                raise _api_error_of(error.answer.status, error.answer.body) from None

    async def _ask(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> _Answer:
        content["query"] = self._in_project(content.get("query"))
        with self._translating_errors():
            answer = await self._http.request(method, path, timeout_s=timeout_s, **content)
            if answer.status >= 400:
                raise _api_error_of(answer.status, answer.body)
            told = answer.json(_Answer)
        if told.type == "error":  # with a status that says otherwise
            raise api_error(answer.status, told.error)
        return told

    def _decoded(self, metadata: msgspec.Raw, type: type[T]) -> T:
        try:
            return msgspec.json.decode(metadata, type=type, strict=False)
        except msgspec.DecodeError as error:
            raise ProviderError(f"{PROVIDER}: an answer is not what was expected: {error}") from error

    def _in_project(self, query: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"project": self.project, **(query or {})}

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except NoAnswer as error:
            fix = FIX if isinstance(error.__cause__, OSError) else _FIX_SILENCE
            raise ProviderUnavailable(PROVIDER, f"its daemon does not answer: {error}", fix=fix) from error
        except TimeoutError:
            reason = "its daemon began an answer and did not end it"
            raise ProviderUnavailable(PROVIDER, reason, fix=_FIX_SILENCE) from None
        except UpgradeRefused:
            raise
        except HttpError as error:
            raise ProviderError(f"{PROVIDER}: {error}") from error


def _api_error_of(status: int, body: bytes) -> SkerryError:
    try:
        data = msgspec.json.decode(body)
        text = data.get("error") if isinstance(data, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = None
    return api_error(status, str(text or body.decode(errors="replace")))


def api_error(status: int, text: str) -> SkerryError:
    """An error that says what to do. Most refusals have one status, so the text has to tell them apart."""
    text = text.strip()[:_MAX_MESSAGE] or f"status {status}, without a reason"
    low = text.lower()
    if status == 404:
        return NotFound(f"incus: {text}")
    for signs, advice in _NO_ROOM.items():
        if re.search(signs, low):
            no_room = BoxFull if signs == _BOX_FULL else LimitReached
            return no_room(f"incus: {advice} ({text})")
    if re.search(_AWAY, low):
        fix = "see `incus cluster list`; what is there is found again once its member is back"
        return ProviderUnavailable(PROVIDER, f"the member that was meant does not answer ({text})", fix=fix)
    for kind, signs in _KINDS.items():
        if re.search(signs, low):
            return kind(f"incus: {text}")
    if status == 409:
        return Conflict(f"incus: {text}")
    if re.search(_LOW_LEVEL, low):
        return ProviderError(
            f"incus: the project does not let us say what a box starts with: "
            f"`incus project set NAME restricted.containers.lowlevel=allow` ({text})"
        )
    return ProviderError(f"incus refused (status {status}): {text}")
