"""Info of an engine's daemon: where it runs, its runtimes, and the limits that it holds."""

from __future__ import annotations

import os

import msgspec

from skerry.errors import ProviderUnavailable, Unsupported
from skerry.host import disks
from skerry.model.spec import Network, Spec
from skerry.providers.base import Enforcement
from skerry.providers.dockerapi.api import Quirks
from skerry.providers.shared import layout, loopback
from skerry.providers.shared.limits import BoxLimits
from skerry.providers.shared.volume_plan import has_data
from skerry.units import format_size

_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_GVISOR = ("runsc", "gvisor")
_OWN_KERNEL = (*_GVISOR, "kata")
"""Runtimes, by the beginning of their names, that do not run a box on the host's kernel."""
_NETWORKS: dict[str, str] = {
    Network.NONE: "a network namespace of its own, with loopback only",
    Network.BRIDGE: "a bridge; the host and all it reaches can be reached; boxes {among}",
    Network.HOST: "nothing: it shares the host's network, as was asked",
    Network.RULES: loopback.BY_RULES,
}
_NAMED = "nothing of ours: a network of the engine's own, with all others there"


class EngineInfo(msgspec.Struct, rename="pascal"):
    """The daemon's own account; engines differ in what they tell."""

    name: str = ""
    o_s_type: str = msgspec.field(name="OSType", default="linux")
    architecture: str = ""
    kernel_version: str = ""
    mem_total: int = 0
    runtimes: dict[str, object] | None = None
    default_runtime: str = ""
    memory_limit: bool = True
    swap_limit: bool = True
    pids_limit: bool = True
    cpu_cfs_quota: bool = True
    security_options: list[str] | None = None
    elsewhere: bool = False
    """Found out by us: it does not see our files, whatever else it has in common with this machine."""

    @property
    def is_local(self) -> bool:
        """Whether it runs on this very machine, and so sees our files and processes."""
        if self.elsewhere:
            return False
        host, memory = os.uname(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (self.name, self.kernel_version, self.mem_total) == (host.nodename, host.release, memory)

    @property
    def has_all_uids(self) -> bool:
        """Whether a uid in a box is the host's, and any may be had."""
        return not any("rootless" in option or "userns" in option for option in self.security_options or ())

    def check(self, provider: str) -> None:
        machine = os.uname().machine
        if self.o_s_type != "linux" or _MACHINES.get(self.architecture, self.architecture) != machine:
            raise ProviderUnavailable(
                provider,
                f"its daemon runs on {self.o_s_type}/{self.architecture}, and the agent here is for linux/{machine}",
                fix="use a daemon on the same kind of machine",
            )

    def check_runtime(self, provider: str, runtime: str | None, *, may_choose: bool = True) -> None:
        if runtime is not None and not may_choose:
            raise Unsupported("runtime", provider, "its API runs all boxes with the service's own; set it there")
        known = sorted(self.runtimes or {})
        if runtime is not None and known and runtime not in known:
            reason = f"the daemon has no runtime {runtime!r}; it has {', '.join(known)}. Add it to its settings"
            raise Unsupported("runtime", provider, reason)

    def place(self, address: str) -> str:
        """Its place, for people."""
        return f"{address}, on this machine" if self.is_local else f"{address}, on {self.name or 'another machine'}"

    def runtimes_there(self) -> dict[str, Enforcement]:
        """Runtimes that a box may ask for, and whether gVisor is one of them."""
        known = sorted(self.runtimes or {})
        gvisor = next((name for name in known if name.startswith(_GVISOR)), None)
        missing = "no such runtime: install runsc, run `runsc install -- --platform=systrap` and restart the daemon"
        return {
            "runtimes": Enforcement(by=", ".join(known) or "not told"),
            "gvisor": Enforcement(by=f"runtime {gvisor}") if gvisor else Enforcement(why_not=missing),
        }

    def has_own_kernel(self, runtime: str | None) -> bool:
        return (runtime or self.default_runtime).startswith(_OWN_KERNEL)

    def enforcement(self, spec: Spec, runtime: str | None, limits: BoxLimits, quirks: Quirks) -> dict[str, Enforcement]:
        """Tell how this daemon holds each limit for this spec."""
        has_own_kernel = self.has_own_kernel(runtime)
        size = format_size(limits.disk)
        in_memory = f"a tmpfs of {size}, in memory: a stop empties it"
        disk = f"an ext4 image of {size} on a loop device" if self.has_disks else in_memory
        swap = ", without swap" if self.swap_limit else "; its kernel allows swap"
        among = "do not see each other" if quirks.parts_bridge else "on it see each other"
        runtime = runtime or self.default_runtime
        return {
            "memory": _held(self.memory_limit, f"the engine's cgroup{swap}"),
            "cpus": _held(self.cpu_cfs_quota, "the engine's cgroup"),
            "pids": _held(self.pids_limit, f"{runtime}'s own kernel" if has_own_kernel else "the engine's cgroup"),
            "disk": Enforcement(by=disk),
            "tmp": Enforcement(by=f"a tmpfs of {format_size(limits.tmp)}"),
            "data": _data(spec),
            "root": Enforcement(why_not="nothing bounds what is written to a writable root")
            if spec.writable_root
            else Enforcement(by="read-only"),
            "uid": self.user(spec.user),
            **({"admin": self.admin(has_own_kernel)} if spec.admin else {}),
            "network": Enforcement(by=_NETWORKS.get(spec.network, _NAMED).format(among=among)),
            "seccomp": Enforcement(by=f"{runtime}, a kernel of its own" if has_own_kernel else "a filter of our own"),
            "runtime": Enforcement(by=runtime or "the engine's default"),
            "lifetime_s": Enforcement(by="the agent in the box"),
            "idle_s": Enforcement(by="the agent in the box"),
        }

    def admin(self, has_own_kernel: bool) -> Enforcement:
        """Tell what stands between a root that can install packages and the host's."""
        if has_own_kernel:
            return Enforcement(by="root of a kernel of its own")
        if not self.has_all_uids:
            return Enforcement(by="root of the engine's user namespace, which is nobody on the host")
        few = ", ".join(layout.ADMIN_CAPABILITIES)
        return Enforcement(by=f"the host's root, with no capability but {few}; a user namespace or a kernel is safer")

    def user(self, asked: str | None) -> Enforcement:
        if not self.has_all_uids:
            return Enforcement(by="a user namespace of the engine's")
        return Enforcement(by="a host uid of its own for each project" if asked is None else f"{asked}, as was asked")

    @property
    def has_disks(self) -> bool:
        return self.is_local and self.has_all_uids and disks.why_none() is None


def _held(is_held: bool, by: str) -> Enforcement:
    return Enforcement(by=by) if is_held else Enforcement(why_not="the engine's host has no such cgroup for it")


def _data(spec: Spec) -> Enforcement:
    if not has_data(spec):
        return Enforcement(by="there is no data volume")
    if spec.disk is not None:
        return Enforcement(why_not="a volume has no quota, so it cannot be had together with disk")
    return Enforcement(by="a volume, which nothing bounds but the host's disk")
