"""Plan of a box as a machine: its settings, its sizes, what its guest is told, and how each limit is held."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from skerry.errors import ConfigError, InvalidSpec, Unsupported
from skerry.host import scope
from skerry.model.spec import IMAGE_COMMAND, Network, SandboxId, Spec
from skerry.providers.base import CID_LABEL, Enforcement, ProviderConfig
from skerry.providers.machine.boxes import MachineMeta
from skerry.providers.machine.images import Source
from skerry.providers.shared import layout, loopback
from skerry.providers.shared.limits import CONTROLLERS, ULIMITS, BoxLimits
from skerry.units import format_size, parse_size
from skerry.vm import launch
from skerry.vm.base import EMULATED, FIRST_CID, LEAST_MEMORY_MIB, Capabilities, MachineLimits
from skerry.vm.folder import Vm
from skerry.vm.guest import Preparation

_MIB = 1 << 20
_HEADROOM_MIB = 64
"""Memory of a guest's kernel and first process, beside what its processes may have."""
_STEP_MIB = 64
"""Machines come in few sizes, so that few templates serve many boxes."""
_OVERHEAD_MIB = {"kvm": 128, "hvf": 128, "tcg": 512}
"""Memory of a hypervisor beside that of its machine; one that translates code keeps the translations."""
_CIDS = range(FIRST_CID, 2**32 - 1)
_DEFAULT_VCPUS = {"tcg": 1}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NETWORKS: Mapping[str, Literal["none", "user"]] = {
    Network.NONE: "none",
    Network.BRIDGE: "user",
    Network.RULES: "none",
}
USER_NETWORK = {"address": "10.0.2.15/24", "gateway": "10.0.2.2", "nameserver": launch.NAMESERVER}
"""Numbers of every user-mode network."""
_PREPARED: Mapping[str, Mapping[str, str]] = {
    Network.BRIDGE: USER_NETWORK,
    Network.RULES: {"nameserver": loopback.RESOLVER},
}
_NETWORKS: Mapping[str, str] = {
    Network.NONE: "a machine without a network card",
    Network.BRIDGE: "a network of the machine's own, which leads out but not to the host",
    Network.RULES: loopback.BY_RULES,
}


class MachineConfig(ProviderConfig, frozen=True):
    """Settings that every provider of virtual machines has."""

    state_dir: str = ""
    """One folder for each box, and the snapshots and volumes; empty: below /var/lib/skerry for root, else
    ~/.local/state/skerry."""
    cache_dir: str = ""
    """Kernels, images and templates, which boxes share; empty: /var/cache/skerry for root, else ~/.cache/skerry."""
    kernel: str = ""
    """Path of a kernel that machines boot, with its modules in `lib/modules` beside it or on this host, or without any;
    empty: the newest of the cache."""
    memory: int | str = "192M"
    """What the processes of a box have together; its machine has some more, for its kernel."""
    pids: int = 256
    cpus: float | None = None
    disk: int | str = "512M"
    """Box's own disk, which takes the room of what is written to it."""
    data_size: int | str = "8G"
    """Limit of what a data volume can hold; it takes the room of what was written to it."""
    tmp: int | str = "256M"
    shm: int | str = "64M"
    start_timeout_s: float = 60.0
    template: bool = True
    """Boot a machine of each kind once, keep it with its memory, and make boxes as clones of that."""

    def limits(self, provider: str) -> BoxLimits:
        """BoxLimits of a box where its spec does not say. Raises ConfigError."""
        sizes = {field: self.size(provider, field) for field in ("memory", "disk", "tmp", "shm")}
        return BoxLimits(**sizes, pids=self.pids, cpus=self.cpus)

    def size(self, provider: str, field: str) -> int:
        try:
            return parse_size(getattr(self, field), field)
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None

    def state(self, provider: str) -> Path:
        return _folder(self.state_dir, f"/var/lib/skerry/{provider}", f"~/.local/state/skerry/{provider}")

    def kernel_file(self) -> Path | None:
        return Path(self.kernel).expanduser().absolute() if self.kernel else None

    def cache(self) -> Path:
        return _folder(self.cache_dir, "/var/cache/skerry", "~/.cache/skerry")


def _folder(setting: str, for_root: str, for_user: str) -> Path:
    return Path(setting or (for_root if os.geteuid() == 0 else for_user)).expanduser().absolute()


def refuse_unsupported(provider: str, spec: Spec) -> None:
    """Raise Unsupported for what no machine of any hypervisor has."""
    if spec.mounts:
        reason = "a machine sees no folder of the host; have it copied: a workspace with copy, or `skerry cp`"
        raise Unsupported("mounts", provider, reason)
    if spec.network not in NETWORKS:
        raise Unsupported("network", provider, f"it has no {spec.network} network; there are none, rules and bridge")


def memory_mib(limits: BoxLimits) -> int:
    """Memory of the machine whose processes may have that much."""
    needed = math.ceil(limits.memory / _MIB) + _HEADROOM_MIB
    return max(LEAST_MEMORY_MIB, math.ceil(needed / _STEP_MIB) * _STEP_MIB)


def tmp(limits: BoxLimits) -> int:
    """Size of /tmp, which is memory of the box; some is left, as its agent is killed when that is full."""
    return min(limits.tmp, limits.memory // 2)


def vcpus(limits: BoxLimits, can: Capabilities) -> int:
    return _DEFAULT_VCPUS.get(can.accelerator, 2) if limits.cpus is None else math.ceil(limits.cpus)


def host_limits(limits: BoxLimits, can: Capabilities) -> MachineLimits:
    """BoxLimits of the whole machine on the host. Parts of a processor are held by the guest's own kernel."""
    memory = memory_mib(limits) + _OVERHEAD_MIB.get(can.accelerator, 128)
    return MachineLimits(memory=memory * _MIB, cpus=float(vcpus(limits, can)))


def most_memory(limits: BoxLimits) -> int:
    """Bytes of the host's memory that a machine may have, whatever accelerates it."""
    return (memory_mib(limits) + max(_OVERHEAD_MIB.values())) * _MIB


def hostname(id: SandboxId) -> str:
    return f"sandbox-{id[:8]}"


def machine_id(id: SandboxId) -> str:
    return id.replace("-", "")


def cid(meta: MachineMeta) -> int | None:
    """CID that the registry has given the box; None for one without a registry, which gets any that is free."""
    number = meta.labels.get(CID_LABEL, "")
    return int(number) if number.isascii() and number.isdecimal() and int(number) in _CIDS else None


def preparation(spec: Spec, limits: BoxLimits, source: Source, meta: MachineMeta) -> Preparation:
    """Preparation of the guest; values of the spec's environment go to its agent later."""
    image = source.image
    return Preparation(
        user=spec.user or image.user or None,
        home=layout.HOME,
        cwd=spec.cwd or (image.cwd if image.cwd not in ("", "/") else layout.HOME),
        env={"PATH": _PATH, "LANG": "C.UTF-8", **image.env, "HOME": layout.HOME},
        image_command=image.command if spec.command == IMAGE_COMMAND else None,
        mount_data=meta.volume is not None,
        writable_root=meta.writable_root,
        admin=spec.admin,
        lifetime_s=spec.lifetime_s or None,
        idle_s=spec.idle_s or None,
        memory=limits.memory,
        pids=limits.pids,
        cpus=limits.cpus,
        tmp=tmp(limits),
        shm=min(limits.shm, limits.memory // 8),
        rlimits=ULIMITS,
        network=_PREPARED.get(spec.network),
    )


def enforcement(spec: Spec, limits: BoxLimits, can: Capabilities, *, has_own_uid: bool) -> dict[str, Enforcement]:
    cpus, memory = vcpus(limits, can), memory_mib(limits)
    return {
        "isolation": isolation(can),
        "memory": Enforcement(by=f"a cgroup of the guest's kernel, in a machine of {memory}M"),
        "cpus": Enforcement(by=f"a cgroup of the guest's kernel, in a machine with {cpus} virtual CPUs"),
        "pids": Enforcement(by="a cgroup of the guest's kernel"),
        "disk": Enforcement(by=f"a disk of {format_size(limits.disk)}"),
        "tmp": Enforcement(by=f"a tmpfs of {format_size(tmp(limits))}"),
        "network": Enforcement(by=_NETWORKS[spec.network]),
        **({"admin": Enforcement(by="root of a kernel of its own")} if spec.admin else {}),
        "lifetime_s": Enforcement(by="the agent in the box"),
        "idle_s": Enforcement(by="the agent in the box"),
        "uid": Enforcement(by="a host uid of its own for each machine")
        if has_own_uid
        else Enforcement(why_not="only root can give each machine a host uid of its own: they share yours"),
    }


def read_back(said: Mapping[str, Enforcement], vm: Vm | None) -> dict[str, Enforcement]:
    """BoxLimits that the host's kernel holds beside the guest's: `launch` has seen the machine in those groups."""
    if vm is None or not vm.groups:
        return {}
    return {
        field: Enforcement(by=f"{said[field].by}; the whole machine by {how}")
        for field, name in CONTROLLERS.items()
        if (how := scope.holder().how(name))
    }


def isolation(can: Capabilities) -> Enforcement:
    if not can.is_boundary:
        return Enforcement(why_not=f"a kernel of its own, but {EMULATED}")
    return Enforcement(by=f"a kernel of its own, under {can.accelerator.upper()}")
