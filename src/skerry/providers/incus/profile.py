"""Profile of an instance, as Incus is told it: the whole boundary of a box in one place."""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec

from skerry.agent.guest.users import FIRST_TO_DIE
from skerry.model.spec import IMAGE_COMMAND, Network, SandboxId, Spec
from skerry.providers.incus.images import IncusImageConfig
from skerry.providers.incus.info import IncusInfo
from skerry.providers.incus.instances import as_config
from skerry.providers.shared import layout, loopback, seccomp
from skerry.providers.shared.limits import ULIMITS, BoxLimits
from skerry.providers.shared.volume_plan import Wanted, check_source

_DROPPED_CAPABILITIES = """
audit_control audit_read block_suspend bpf checkpoint_restore dac_read_search ipc_lock ipc_owner lease
linux_immutable mac_admin mac_override mknod net_broadcast net_raw perfmon setpcap sys_admin sys_boot sys_chroot
sys_module sys_nice sys_pacct sys_ptrace sys_rawio sys_resource sys_time sys_tty_config syslog wake_alarm
"""
"""All but those of PID 1 before it becomes the box's user; a box whose user is root keeps them, in its own namespaces:
audit_write chown dac_override fowner fsetid kill net_admin net_bind_service setfcap setgid setuid."""
RESERVE = "/.skerry-reserve"
"""Room on a box's disk that Incus needs to stop and to start it, however full the box has made it."""
_RESERVE_BYTES = 1 << 20
_PERIOD_MS = 100
_MASK = "ro,nosuid,nodev,noexec,optional,"


class Card(msgspec.Struct, frozen=True):
    """Network card of a box on a bridge."""

    address: str
    device: dict[str, str]
    lxc: tuple[str, ...]
    """PID 1 of a box asks nobody for an address: the container is made with it."""
    resolver: str


class InstanceFrame(msgspec.Struct, frozen=True, kw_only=True):
    """All besides the spec that decides how a box is made."""

    image: IncusImageConfig
    limits: BoxLimits
    argv: list[str]
    """The interpreter, up to the script."""
    info: IncusInfo
    agent: dict[str, dict[str, str]]
    """The devices with the agent and its interpreter."""
    volumes: list[Wanted]
    labels: dict[str, str]
    card: Card | None


def instance(id: SandboxId, spec: Spec, frame: InstanceFrame) -> dict[str, Any]:
    """Body of the request that makes and starts an instance."""
    return {
        "name": layout.container_name(id),
        "type": "container",
        # For people: its name is its id, by which it is found.
        "description": spec.name or "",
        "source": {"type": "image", "fingerprint": frame.image.id},
        # No profile: what an administrator puts there for others would widen the boundary.
        "profiles": [],
        "config": {
            "security.privileged": "false",
            "security.nesting": "false",
            "security.idmap.isolated": "true",
            "security.guestapi": "false",
            "boot.autostart": "false",
            **({f"linux.sysctl.{loopback.LOW_PORTS}": "0"} if spec.network is Network.RULES else {}),
            **_limits(frame),
            **as_config(frame.labels),
            "raw.seccomp": seccomp.lxc_policy(),
            "raw.lxc": _lxc(id, spec, frame),
        },
        "devices": _devices(spec, frame),
        "start": True,
    }


def _limits(frame: InstanceFrame) -> dict[str, str]:
    limits = frame.limits
    config = {
        "limits.memory": str(limits.memory),
        "limits.memory.swap": "false",
        "limits.processes": str(limits.pids),
        **{f"limits.kernel.{name}": str(value) for name, value in ULIMITS.items()},
    }
    if limits.cpus is not None:
        # Hundredths of a processor: Incus takes whole milliseconds.
        config["limits.cpu.allowance"] = f"{max(1, round(limits.cpus * _PERIOD_MS))}ms/{_PERIOD_MS}ms"
    return config


def _lxc(id: SandboxId, spec: Spec, frame: InstanceFrame) -> str:
    limits = frame.limits
    init = [*frame.argv, f"{layout.AGENT}/init.py", id, msgspec.json.encode(agent_config(spec, frame)).hex()]
    return "\n".join(
        [
            f"lxc.init.cmd = {' '.join(init)}",
            f"lxc.proc.oom_score_adj = {FIRST_TO_DIE}",
            # What root installs may be for others to become root by, within the box.
            f"lxc.no_new_privs = {0 if spec.admin else 1}",
            f"lxc.cap.drop = {' '.join(_DROPPED_CAPABILITIES.split())}",
            # Only its own files are for a box to change, and no setting of the kernel.
            "lxc.mount.auto = proc:mixed sys:ro cgroup:ro:force",
            *(f"lxc.mount.entry = /dev/null {path.lstrip('/')} none {_MASK}bind 0 0" for path in layout.MASKED_FILES),
            *(f"lxc.mount.entry = tmpfs {path.lstrip('/')} tmpfs {_MASK}size=0 0 0" for path in layout.MASKED_FOLDERS),
            _tmpfs(layout.RUN, "64k", "noexec,"),
            _tmpfs("/tmp", str(limits.tmp)),
            *(_tmpfs(path, str(limits.tmp)) for path in _scratch(spec, frame)),
            _tmpfs("/dev/shm", str(limits.shm)),
            *(frame.card.lxc if frame.card else ()),
        ]
    )


def _scratch(spec: Spec, frame: InstanceFrame) -> list[str]:
    """Scratch folders that nothing else is mounted at: the root is the box's own, and root's."""
    mounted = {*(each.target for each in frame.volumes), *(posixpath.normpath(each.target) for each in spec.mounts)}
    return [path for path in layout.SCRATCH if path not in mounted]


def _tmpfs(path: str, size: str, more: str = "") -> str:
    options = f"rw,nosuid,nodev,{more}size={size},mode=1777,create=dir"
    return f"lxc.mount.entry = tmpfs {path.lstrip('/')} tmpfs {options} 0 0"


def agent_config(spec: Spec, frame: InstanceFrame) -> dict[str, Any]:
    asked = spec.user or frame.image.user
    resolver = frame.card.resolver if frame.card else loopback.RESOLVER if spec.network is Network.RULES else None
    return {
        **layout.agent_config(spec, frame.image.env, is_ours=not asked),
        "cwd": spec.cwd or frame.image.folder or layout.HOME,
        "image_command": frame.image.command if spec.command == IMAGE_COMMAND else None,
        "init": {
            "user": asked or str(layout.DEFAULT_UID),
            "cwd": frame.image.folder or layout.HOME,
            "folders": [(layout.HOME, 0o755), *((each.target, each.mode) for each in frame.volumes)],
            "files": [(loopback.RESOLV_CONF, f"nameserver {resolver}\n")] if resolver else [],
            "reserve": (RESERVE, _RESERVE_BYTES) if frame.info.has_quotas else None,
        },
    }


def agent_config_of(config: dict[str, str]) -> dict[str, Any]:
    """The configuration that a box's agent was started with."""
    command = config.get("raw.lxc", "").partition("\n")[0]
    return msgspec.json.decode(bytes.fromhex(command.rpartition(" ")[2]), type=dict[str, Any])


def _devices(spec: Spec, frame: InstanceFrame) -> dict[str, dict[str, str]]:
    root = {"type": "disk", "path": "/", "pool": frame.info.pool}
    if frame.info.has_quotas:  # which count the image too
        image_size = frame.image.size if spec.disk is not None else 0
        root["size"] = str(frame.limits.disk + image_size + _RESERVE_BYTES)
    devices = {"root": root, **frame.agent}
    for number, volume in enumerate(frame.volumes):
        only_read = {"readonly": "true"} if volume.read_only else {}
        common = {"type": "disk", "pool": frame.info.pool, "source": volume.name, "path": volume.target}
        devices[f"volume{number}"] = {**common, **only_read}
    if frame.card is not None:
        devices["eth0"] = frame.card.device
    for number, mount in enumerate(spec.mounts):
        check_source(mount)
        devices[f"mount{number}"] = {
            "type": "disk",
            "source": mount.source,
            "path": mount.target,
            "readonly": "true" if mount.read_only else "false",
            "raw.mount.options": "nosuid,nodev",
            # Owners are the host's: what a user of the host may read, the same uid of the box may.
            "shift": "true",
        }
    return devices
