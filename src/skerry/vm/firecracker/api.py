"""Client of Firecracker's API: a method and a body for each request that is made, refusals in Firecracker's words.

A field that is None is left out: Firecracker refuses what its version does not know.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from skerry.errors import LimitReached, ProviderError, printable
from skerry.net.http import Answer, HttpClient, HttpError, NoAnswer

_MAX_CONNECTIONS = 9
"""Firecracker refuses the eleventh, and one is left for whoever looks at a machine by hand."""
_TIMEOUT_S = 10.0
_MEMORY_TIMEOUT_S = 300.0
"""For requests that write or read the whole memory of a machine."""
_TOO_MANY = 503
_REASON = 500
"""A process that was taken over may answer anything."""

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_]{1,64}$")]
"""Id of a drive, which is also a part of a path."""
File = Annotated[str, Meta(min_length=1)]


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a request, and where it is sent to."""

    method: ClassVar[str] = "PUT"
    path: ClassVar[str]
    """With fields of the body in it."""
    timeout_s: ClassVar[float | None] = None


class MachineConfigBody(Body, frozen=True):
    path = "/machine-config"
    vcpu_count: Annotated[int, Meta(ge=1, le=32)]
    mem_size_mib: Annotated[int, Meta(ge=1)]


class BootSource(Body, frozen=True):
    path = "/boot-source"
    kernel_image_path: File
    boot_args: str | None = None
    """Without any, Firecracker has its own, and with them the guest loads no module."""
    initrd_path: File | None = None


class DriveBody(Body, frozen=True):
    path = "/drives/{drive_id}"
    drive_id: Name
    is_root_device: bool
    path_on_host: File
    is_read_only: bool
    cache_type: Literal["Unsafe", "Writeback"] | None = None
    """Unsafe is Firecracker's default: then a guest's flush is not the host's."""


class DriveUpdate(Body, frozen=True):
    """Has a running machine open the drive's file anew; the guest is told its size."""

    method = "PATCH"
    path = "/drives/{drive_id}"
    drive_id: Name
    path_on_host: File | None = None


class Vsock(Body, frozen=True):
    path = "/vsock"
    guest_cid: Annotated[int, Meta(ge=3, le=2**32 - 1)]
    """Firecracker takes 0 and 2 as well, with which no guest can be reached."""
    uds_path: File


class InstanceAction(Body, frozen=True):
    path = "/actions"
    timeout_s = _MEMORY_TIMEOUT_S
    action_type: Literal["InstanceStart"]


class VmState(Body, frozen=True):
    method = "PATCH"
    path = "/vm"
    state: Literal["Paused", "Resumed"]


class SnapshotCreate(Body, frozen=True):
    path = "/snapshot/create"
    timeout_s = _MEMORY_TIMEOUT_S
    snapshot_path: File
    mem_file_path: File
    snapshot_type: Literal["Full", "Diff"] | None = None


class MemoryBackend(msgspec.Struct, frozen=True, kw_only=True):
    backend_type: Literal["File", "Uffd"]
    backend_path: File


class SnapshotLoad(Body, frozen=True):
    path = "/snapshot/load"
    timeout_s = _MEMORY_TIMEOUT_S
    snapshot_path: File
    mem_backend: MemoryBackend
    """A file is mapped privately: clones share it, so it must never change while one of them lives."""
    resume_vm: bool | None = None


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer; versions add fields to it, which are passed over."""

    state: Literal["Not started", "Running", "Paused"]
    vmm_version: str


class ApiRefused(ProviderError):
    """Refusal of a Firecracker that lives, with the reason in its own words."""

    def __init__(self, request: str, status: int, reason: str) -> None:
        super().__init__(f"Firecracker refused {request} with {status}: {reason}")
        self.status = status


class Gone(ProviderError):
    """No Firecracker answers; whether it did what it was asked for is unknown."""


class Api:
    """One Firecracker process, by its socket. Calls raise ApiRefused, Gone, LimitReached and ProviderError."""

    def __init__(self, socket: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._http = HttpClient(f"unix://{socket.absolute()}", timeout_s=timeout_s, follow=False)
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def instance(self) -> InstanceInfo:
        answer = await self._ask("GET", "/", None, None)
        try:
            return answer.json(InstanceInfo)
        except HttpError as error:
            raise ProviderError(f"Firecracker's answer to GET / cannot be used: {error}") from error

    async def send(self, body: Body) -> None:
        """Firecracker does not check all that it should: nothing is sent that our model of its API does not allow."""
        fields = msgspec.to_builtins(body)
        try:
            checked = msgspec.convert(fields, type(body))
        except msgspec.ValidationError as error:
            raise ProviderError(f"a {type(body).__name__} that Firecracker cannot take: {error}") from None
        await self._ask(body.method, body.path.format(**fields), checked, body.timeout_s)

    async def _ask(self, method: str, path: str, body: Body | None, timeout_s: float | None) -> Answer:
        request = f"{method} {path}"
        try:
            async with self._slots:
                answer = await self._http.request(method, path, json=body, timeout_s=timeout_s)
        except NoAnswer as error:
            raise Gone(f"Firecracker does not answer {request}: {error}; its console log says why") from error
        except HttpError as error:
            raise Gone(f"Firecracker ended while it answered {request}: {error}; its console log says why") from error
        if answer.status == _TOO_MANY:
            raise LimitReached(f"Firecracker has too many open connections for {request}; try again")
        if answer.status >= 300:
            raise ApiRefused(request, answer.status, _reason(answer.body))
        return answer


def _reason(body: bytes) -> str:
    """Text of `fault_message`, or of the `error` of its HTTP server, which has line ends where JSON allows none."""
    try:
        told = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        said = str(told.get("fault_message") or told.get("error") or told).replace("\n", " ")
    else:
        said = body[:_REASON].decode(errors="replace")
    return printable(said[:_REASON])
