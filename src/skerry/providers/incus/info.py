"""Info of a daemon: where it runs, the pool of its boxes, and the limits that it holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from skerry.errors import NotFound, ProviderUnavailable, Unsupported
from skerry.model.spec import Network, Spec
from skerry.providers.base import Enforcement
from skerry.providers.incus.api import FIX, PROVIDER, IncusApi
from skerry.providers.shared import loopback
from skerry.providers.shared.limits import BoxLimits
from skerry.providers.shared.volume_plan import has_data
from skerry.units import format_size

_QUOTAS = ("btrfs", "ceph", "cephfs", "lvm", "lvmcluster", "zfs")
"""Drivers of pools that hold a limit. `dir` takes one as well, and on most hosts nothing comes of it."""
_NETWORKS: dict[str, str] = {
    Network.NONE: "a network namespace of its own, with loopback only",
    Network.BRIDGE: "a bridge; the host and all it reaches can be reached; boxes on it do not see each other",
    Network.RULES: loopback.BY_RULES,
}
_NAMED = "an address that it cannot change, on a bridge by its name; all others there and all it reaches can be reached"
ADMIN = Enforcement(by="root of a user namespace of its own, which is nobody on the host")
_CGROUP = "Incus's cgroup"
_HOST_FOLDERS = "restricted.devices.disk"


class _Environment(msgspec.Struct):
    server_name: str = ""
    server_version: str = ""
    server_clustered: bool = False
    server_pid: int = 0
    kernel_version: str = ""
    kernel_architecture: str = ""


class _Server(msgspec.Struct):
    environment: _Environment
    auth: str = ""


class IncusInfo(msgspec.Struct, frozen=True):
    """The daemon's own account, and the pool that is used."""

    server: _Environment
    address: str
    pool: str
    driver: str
    is_confined: bool = False
    """Whether its project lets no container have folders of the host."""

    @property
    def is_local(self) -> bool:
        """Whether it runs on this very machine, and so sees our files and processes. A socket may lead elsewhere."""
        if not self.address.startswith("unix:") or self.server.server_clustered:
            return False
        try:
            program = Path(f"/proc/{self.server.server_pid}/comm").read_text().strip()
        except OSError:
            return False
        return program == "incusd" and self.server.kernel_version == os.uname().release

    @property
    def has_quotas(self) -> bool:
        return self.driver in _QUOTAS

    def place(self) -> str:
        """Its place, for people."""
        where = "this machine" if self.is_local else self.server.server_name or "another machine"
        cluster = ", a cluster" if self.server.server_clustered else ""
        return f"{self.address}, on {where}{cluster}, Incus {self.server.server_version}"

    def enforcement(self, spec: Spec, limits: BoxLimits) -> dict[str, Enforcement]:
        """Tell how this daemon holds each limit for this spec. Raises Unsupported."""
        if spec.network is Network.HOST:
            raise Unsupported("network", PROVIDER, "its boxes never share the host's network; choose another")
        for field in ("target", "group"):
            if getattr(spec, field) is not None and not self.server.server_clustered:
                raise Unsupported(field, PROVIDER, "this Incus is no cluster; leave it out")
        return {
            "memory": Enforcement(by=f"{_CGROUP}, without swap"),
            "cpus": Enforcement(by=_CGROUP),
            "pids": Enforcement(by=_CGROUP),
            "disk": self._disk(spec, limits.disk),
            "tmp": Enforcement(by=f"a tmpfs of {format_size(limits.tmp)}"),
            "data": self._data(spec),
            "root": Enforcement(by="a copy of its image that is its own"),
            "uid": Enforcement(by="a range of host uids of its own, in a user namespace"),
            **({"admin": ADMIN} if spec.admin else {}),
            "network": Enforcement(by=_NETWORKS.get(spec.network, _NAMED)),
            "seccomp": Enforcement(by="a filter of our own"),
            "lifetime_s": Enforcement(by="the agent in the box"),
            "idle_s": Enforcement(by="the agent in the box"),
        }

    def _disk(self, spec: Spec, size: int) -> Enforcement:
        if self.has_quotas:
            image = "beside its image" if spec.disk is not None else "its image included"
            return Enforcement(by=f"a quota of {format_size(size)}, {image}, of pool {self.pool} ({self.driver})")
        return Enforcement(
            why_not=f"pool {self.pool!r} is of the kind {self.driver!r}, which holds none; use one of zfs, btrfs or lvm"
        )

    def _data(self, spec: Spec) -> Enforcement:
        if not has_data(spec):
            return Enforcement(by="there is no data volume")
        return Enforcement(by="a volume with the quota of disk" if spec.disk is not None else "a volume of the pool's")


async def look(api: IncusApi, pool: str) -> IncusInfo:
    server = await api.get("/1.0", _Server)
    if server.auth != "trusted":
        fix = "`incus config trust add-certificate FILE` on the daemon's side, with our certificate"
        raise ProviderUnavailable(PROVIDER, f"the daemon at {api.address} does not trust us", fix=fix)
    is_confined = await _is_confined(api)
    machine = os.uname().machine
    if server.environment.kernel_architecture != machine:
        reason = f"its daemon runs on {server.environment.kernel_architecture}, and the agent here is for {machine}"
        raise ProviderUnavailable(PROVIDER, reason, fix="use a daemon on the same kind of machine")
    name = pool or await _default_pool(api)
    try:
        found = await api.get(f"/1.0/storage-pools/{name}", dict[str, Any])
    except NotFound:
        fix = "make it with `incus storage create`, or set providers.incus.pool"
        raise ProviderUnavailable(PROVIDER, f"it has no storage pool {name!r}", fix=fix) from None
    return IncusInfo(server.environment, api.address, name, str(found.get("driver")), is_confined)


async def _is_confined(api: IncusApi) -> bool:
    try:
        config = (await api.get(f"/1.0/projects/{quote(api.project, safe='')}", dict[str, Any])).get("config") or {}
    except NotFound:
        fix = f"make it with `incus project create {api.project}`, or set providers.incus.project"
        raise ProviderUnavailable(PROVIDER, f"it has no project {api.project!r}", fix=fix) from None
    has_folders = config.get(_HOST_FOLDERS) == "allow" and not config.get(f"{_HOST_FOLDERS}.paths")
    return config.get("restricted") == "true" and not has_folders


async def _default_pool(api: IncusApi) -> str:
    profile = await api.get("/1.0/profiles/default", dict[str, Any])
    for device in (profile.get("devices") or {}).values():
        if device.get("type") == "disk" and device.get("path") == "/":
            return str(device["pool"])
    raise ProviderUnavailable(
        PROVIDER, "its default profile names no pool for a root", fix=f"set providers.incus.pool; or {FIX}"
    )
