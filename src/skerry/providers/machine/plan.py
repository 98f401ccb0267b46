"""What a box becomes as a machine: sizes, what its guest is told, and how each limit is held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from skerry.errors import Unsupported
from skerry.providers import layout
from skerry.providers.base import Enforcement
from skerry.providers.limits import ULIMITS, Limits
from skerry.providers.machine.boxes import Meta
from skerry.providers.machine.guest import Preparation
from skerry.providers.machine.sources import Source
from skerry.spec import Network, SandboxId, Spec
from skerry.units import format_size
from skerry.vm import base
from skerry.vm.base import EMULATED, LEAST_MEMORY_MIB, Capabilities
from skerry.vm.network import NAMESERVER

_MIB = 1 << 20
_HEADROOM_MIB = 64
"""What a guest's kernel and first process need beside what its processes may have."""
_STEP_MIB = 64
"""Machines come in few sizes, so that few templates serve many boxes."""
_OVERHEAD_MIB = {"kvm": 128, "hvf": 128, "tcg": 512}
"""What a hypervisor needs beside the memory of its machine; one that translates code keeps the translations."""
_DEFAULT_VCPUS = {"tcg": 1}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NETWORKS: Mapping[Network, Literal["none", "user"]] = {Network.NONE: "none", Network.BRIDGE: "user"}
USER_NETWORK = {"address": "10.0.2.15/24", "gateway": "10.0.2.2", "nameserver": NAMESERVER}
"""How every user-mode network is numbered."""


def refuse_what_is_never_honoured(provider: str, spec: Spec) -> None:
    if spec.mounts:
        reason = "a machine sees no folder of the host; have it copied: a workspace with copy, or `skerry cp`"
        raise Unsupported("mounts", provider, reason)
    if spec.network not in NETWORKS:
        raise Unsupported("network", provider, f"it has no {spec.network} network; there are none and bridge")


def memory_mib(limits: Limits) -> int:
    """The memory of the machine whose processes may have that much."""
    needed = math.ceil(limits.memory / _MIB) + _HEADROOM_MIB
    return max(LEAST_MEMORY_MIB, math.ceil(needed / _STEP_MIB) * _STEP_MIB)


def vcpus(limits: Limits, can: Capabilities) -> int:
    return _DEFAULT_VCPUS.get(can.accelerator, 2) if limits.cpus is None else math.ceil(limits.cpus)


def host_limits(limits: Limits, can: Capabilities) -> base.Limits:
    """What the whole of it may take of the host. The guest's own kernel holds parts of a processor."""
    memory = memory_mib(limits) + _OVERHEAD_MIB.get(can.accelerator, 128)
    return base.Limits(memory=memory * _MIB, cpus=float(vcpus(limits, can)))


def hostname(id: SandboxId) -> str:
    return f"sandbox-{id[:8]}"


def machine_id(id: SandboxId) -> str:
    return id.replace("-", "")


def preparation(spec: Spec, limits: Limits, source: Source, meta: Meta) -> Preparation:
    """What the guest is told of the box; the values of the spec's environment its agent is told later."""
    image = source.image
    return Preparation(
        user=spec.user or image.user or None,
        home=layout.HOME,
        cwd=spec.cwd or (image.cwd if image.cwd not in ("", "/") else layout.HOME),
        env={"PATH": _PATH, "LANG": "C.UTF-8", **image.env, "HOME": layout.HOME},
        mount_data=meta.volume is not None,
        writable_root=meta.writable_root,
        lifetime_s=spec.lifetime_s or None,
        idle_s=spec.idle_s or None,
        memory=limits.memory,
        pids=limits.pids,
        cpus=limits.cpus,
        tmp=limits.tmp,
        shm=limits.shm,
        rlimits=ULIMITS,
        network=USER_NETWORK if spec.network == Network.BRIDGE else None,
    )


def enforcement(spec: Spec, limits: Limits, can: Capabilities, *, has_own_uid: bool) -> dict[str, Enforcement]:
    cpus, memory = vcpus(limits, can), memory_mib(limits)
    return {
        "isolation": isolation(can),
        "memory": Enforcement(by=f"a cgroup of the guest's kernel, in a machine of {memory}M"),
        "cpus": Enforcement(by=f"a cgroup of the guest's kernel, in a machine with {cpus} virtual CPUs"),
        "pids": Enforcement(by="a cgroup of the guest's kernel"),
        "disk": Enforcement(by=f"a disk of {format_size(limits.disk)}"),
        "tmp": Enforcement(by=f"a tmpfs of {format_size(limits.tmp)}"),
        "network": Enforcement(by=_NETWORKS[spec.network]),
        "lifetime_s": Enforcement(by="the agent in the box"),
        "idle_s": Enforcement(by="the agent in the box"),
        "uid": Enforcement(by="a host uid of its own for each machine")
        if has_own_uid
        else Enforcement(why_not="only root can give each machine a host uid of its own: they share yours"),
    }


def isolation(can: Capabilities) -> Enforcement:
    if not can.is_boundary:
        return Enforcement(why_not=f"a kernel of its own, but {EMULATED}")
    return Enforcement(by=f"a kernel of its own, under {can.accelerator.upper()}")


_NETWORKS = {
    Network.NONE: "a machine without a network card",
    Network.BRIDGE: "a network of the machine's own, which leads out but not to the host",
}
