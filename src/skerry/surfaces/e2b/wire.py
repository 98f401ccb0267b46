"""Bodies of E2B's control plane, as its SDKs send and read them. Fields that we do not know are newer than us, and are
passed over; those that would weaken what a client asked for are refused where they are used."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import msgspec

from skerry.surfaces.e2b.box import E2bSandbox
from skerry.surfaces.e2b.kept import Network

ENVD_VERSION = "0.6.13"
"""The version of E2B's agent whose wire ours speaks: SDKs do by it what a server can."""
Timeout = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_MIB = 1 << 20
_MEMORY_MB = 512
_DISK_MB = 1024


class AutoResume(msgspec.Struct, frozen=True):
    enabled: bool = False


class VolumeMount(msgspec.Struct, frozen=True):
    name: str
    path: str


class NewSandbox(msgspec.Struct, frozen=True, rename="camel"):
    template_id: str = msgspec.field(name="templateID")
    timeout: Timeout = 15
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    volume_mounts: tuple[VolumeMount, ...] | None = None
    iam: dict[str, Any] | None = None


class Connect(msgspec.Struct, frozen=True):
    timeout: Timeout | None = None


class SetTimeout(msgspec.Struct, frozen=True):
    timeout: Timeout


class Pause(msgspec.Struct, frozen=True):
    memory: bool | None = None


class Fork(msgspec.Struct, frozen=True):
    timeout: Timeout = 15
    count: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


class NewSnapshot(msgspec.Struct, frozen=True):
    name: str | None = None
    memory: bool | None = None


def instant(seconds: float) -> str:
    """A time as RFC 3339 has it."""
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def created(box: E2bSandbox, domain: str | None) -> dict[str, Any]:
    """A sandbox, to whoever made it or connects to it."""
    body = {
        "templateID": box.kept.template,
        "sandboxID": box.name,
        "clientID": "skerry",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": box.access_token,
        "trafficAccessToken": box.traffic_token,
        "alias": box.kept.alias,
        "domain": domain,
    }
    return {name: value for name, value in body.items() if value}


def listed(box: E2bSandbox) -> dict[str, Any]:
    """A sandbox in a list."""
    spec, kept = box.record.spec, box.kept
    body = {
        "templateID": kept.template,
        "sandboxID": box.name,
        "clientID": "skerry",
        "startedAt": instant(kept.started_at),
        "endAt": instant(kept.ends_at),
        "cpuCount": max(1, round(spec.cpus or 1)),
        "memoryMB": spec.memory // _MIB if spec.memory else _MEMORY_MB,
        "diskSizeMB": spec.disk // _MIB if spec.disk else _DISK_MB,
        "state": "paused" if box.is_paused else "running",
        "envdVersion": ENVD_VERSION,
        "metadata": kept.metadata,
    }
    return {**body, "alias": kept.alias} if kept.alias else body


def detailed(box: E2bSandbox, domain: str | None) -> dict[str, Any]:
    """All that is told of a sandbox."""
    kept = box.kept
    return {
        **listed(box),
        **({"envdAccessToken": box.access_token} if box.access_token else {}),
        **({"domain": domain} if domain else {}),
        **({} if kept.internet is None else {"allowInternetAccess": kept.internet}),
        "network": told_network(kept.network),
        "lifecycle": {"autoResume": kept.auto_resume, "onTimeout": "pause" if kept.auto_pause else "kill"},
    }


def told_network(network: Network) -> dict[str, Any]:
    body: dict[str, Any] = {"allowPublicTraffic": network.allow_public_traffic}
    for name, value in (("allowOut", network.allow_out), ("denyOut", network.deny_out)):
        if value:
            body[name] = list(value)
    if network.mask_request_host:
        body["maskRequestHost"] = network.mask_request_host
    return body
