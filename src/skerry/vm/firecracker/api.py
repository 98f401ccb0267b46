"""A thin client of Firecracker's API: one method for each request, refusals as errors with Firecracker's own words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from skerry.errors import LimitReached, ProviderError
from skerry.http import Answer, HttpClient, HttpError, NoAnswer
from skerry.vm.firecracker import model
from skerry.vm.firecracker.model import Body

T = TypeVar("T")

_MAX_CONNECTIONS = 9
"""Firecracker refuses the eleventh, and one is left for whoever looks at a machine by hand."""
_TIMEOUT_S = 10.0
_MEMORY_TIMEOUT_S = 300.0
"""For what writes or reads the whole memory of a machine."""
_TOO_MANY = 503


class Refused(ProviderError):
    """Firecracker lives and said no; `reason` is what it said."""

    def __init__(self, request: str, status: int, reason: str) -> None:
        super().__init__(f"Firecracker refused {request} with {status}: {reason}")
        self.request = request
        self.status = status
        self.reason = reason


class Gone(ProviderError):
    """Firecracker does not answer any more; whether it did what it was asked for is unknown."""


class Api:
    """One Firecracker process, by its socket."""

    def __init__(self, socket: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._http = HttpClient(f"unix://{socket.absolute()}", timeout_s=timeout_s, follow=False)
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def instance(self) -> model.InstanceInfo:
        return await self._get("/", model.InstanceInfo)

    async def version(self) -> str:
        return (await self._get("/version", model.Version)).firecracker_version

    async def machine_config(self) -> model.MachineConfigReply:
        return await self._get("/machine-config", model.MachineConfigReply)

    async def set_machine_config(self, body: model.MachineConfig) -> None:
        await self._send("PUT", "/machine-config", body)

    async def set_boot_source(self, body: model.BootSource) -> None:
        await self._send("PUT", "/boot-source", body)

    async def set_drive(self, body: model.Drive) -> None:
        await self._send("PUT", f"/drives/{body.drive_id}", body)

    async def update_drive(self, body: model.DriveUpdate) -> None:
        """Of a running machine: its backing file is opened anew, and the guest is told its size."""
        await self._send("PATCH", f"/drives/{body.drive_id}", body)

    async def set_network_interface(self, body: model.NetworkInterface) -> None:
        await self._send("PUT", f"/network-interfaces/{body.iface_id}", body)

    async def update_network_interface(self, body: model.NetworkInterfaceUpdate) -> None:
        await self._send("PATCH", f"/network-interfaces/{body.iface_id}", body)

    async def set_vsock(self, body: model.Vsock) -> None:
        await self._send("PUT", "/vsock", body)

    async def set_entropy(self, body: model.Entropy) -> None:
        await self._send("PUT", "/entropy", body)

    async def balloon(self) -> model.BalloonReply:
        return await self._get("/balloon", model.BalloonReply)

    async def set_balloon(self, body: model.Balloon) -> None:
        await self._send("PUT", "/balloon", body)

    async def update_balloon(self, body: model.BalloonUpdate) -> None:
        await self._send("PATCH", "/balloon", body)

    async def balloon_statistics(self) -> model.BalloonStats:
        return await self._get("/balloon/statistics", model.BalloonStats)

    async def update_balloon_statistics(self, body: model.BalloonStatsUpdate) -> None:
        await self._send("PATCH", "/balloon/statistics", body)

    async def set_metrics(self, body: model.Metrics) -> None:
        await self._send("PUT", "/metrics", body)

    async def set_logger(self, body: model.Logger) -> None:
        await self._send("PUT", "/logger", body)

    async def set_serial(self, body: model.Serial) -> None:
        await self._send("PUT", "/serial", body)

    async def act(self, action: Literal["FlushMetrics", "InstanceStart", "SendCtrlAltDel"]) -> None:
        await self._send("PUT", "/actions", model.Action(action_type=action), timeout_s=_MEMORY_TIMEOUT_S)

    async def set_state(self, state: Literal["Paused", "Resumed"]) -> None:
        await self._send("PATCH", "/vm", model.VmState(state=state))

    async def create_snapshot(self, body: model.SnapshotCreate) -> None:
        await self._send("PUT", "/snapshot/create", body, timeout_s=_MEMORY_TIMEOUT_S)

    async def load_snapshot(self, body: model.SnapshotLoad) -> None:
        await self._send("PUT", "/snapshot/load", body, timeout_s=_MEMORY_TIMEOUT_S)

    async def _get(self, path: str, type: type[T]) -> T:
        answer = await self._ask("GET", path, None, None)
        try:
            return answer.json(type)
        except HttpError as error:
            raise ProviderError(f"Firecracker's answer to GET {path} cannot be used: {error}") from error

    async def _send(self, method: str, path: str, body: Body, *, timeout_s: float | None = None) -> None:
        await self._ask(method, path, _checked(body), timeout_s)

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
            raise Refused(request, answer.status, _reason(answer.body))
        return answer


def _checked(body: Body) -> Body:
    """Firecracker does not check all that it should: nothing leaves that our model of its API does not allow."""
    try:
        return msgspec.convert(msgspec.to_builtins(body), type(body))
    except msgspec.ValidationError as error:
        raise ProviderError(f"a {type(body).__name__} that Firecracker cannot take: {error}") from None


def _reason(body: bytes) -> str:
    """From `fault_message`, or from the `error` of its HTTP server, which has line ends where JSON allows none."""
    try:
        told = json.loads(body, strict=False)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        return body[:500].decode(errors="replace")
    return str(told.get("fault_message") or told.get("error") or told).replace("\n", " ")
