"""What Incus is told of a box: the whole boundary in one place."""

from __future__ import annotations

from typing import Any

import msgspec

from skerry import caches
from skerry.providers import layout
from skerry.providers.incus import seccomp
from skerry.providers.incus.image_config import ImageConfig
from skerry.providers.incus.instances import as_config
from skerry.providers.incus.networks import Card
from skerry.providers.limits import ULIMITS, Limits
from skerry.providers.mounts import check_source
from skerry.providers.volume_plan import Wanted
from skerry.spec import SandboxId, Spec

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INIT = f"{layout.AGENT}/init.py"
_KEPT = """
audit_write chown dac_override fowner fsetid kill net_admin net_bind_service setfcap setgid setuid
"""
"""What PID 1 needs before it becomes the box's user; a box whose user is root keeps them, in its own namespaces."""
_CAPABILITIES = """
audit_control audit_read audit_write block_suspend bpf checkpoint_restore chown dac_override dac_read_search fowner
fsetid ipc_lock ipc_owner kill lease linux_immutable mac_admin mac_override mknod net_admin net_bind_service
net_broadcast net_raw perfmon setfcap setgid setpcap setuid sys_admin sys_boot sys_chroot sys_module sys_nice sys_pacct
sys_ptrace sys_rawio sys_resource sys_time sys_tty_config syslog wake_alarm
"""
RESERVE = "/.skerry-reserve"
"""Room on a box's disk that Incus needs to stop and to start it, however full the box has made it."""
_RESERVE_BYTES = 1 << 20
_PERIOD_MS = 100
_SOCKET_ROOM = "64k"
_MASK = "ro,nosuid,nodev,noexec,optional,"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What besides the spec decides how a box is made."""

    image: ImageConfig
    limits: Limits
    argv: list[str]
    """The interpreter, up to the script."""
    pool: str
    has_quotas: bool
    runtime: dict[str, dict[str, str]]
    """The devices with the agent and its interpreter."""
    volumes: list[Wanted]
    volume_devices: dict[str, dict[str, str]]
    labels: dict[str, str]
    card: Card | None


def instance(id: SandboxId, spec: Spec, frame: Frame) -> dict[str, Any]:
    """The body of the request that makes and starts it."""
    return {
        "name": layout.container_name(id),
        "type": "container",
        "source": {"type": "image", "fingerprint": frame.image.id},
        # No profile: what an administrator puts there for others would widen the boundary.
        "profiles": [],
        "config": {**_security(), **_limits(frame), **as_config(frame.labels), "raw.lxc": _lxc(id, spec, frame)},
        "devices": _devices(spec, frame),
        "start": True,
    }


def _security() -> dict[str, str]:
    return {
        "security.privileged": "false",
        "security.nesting": "false",
        "security.idmap.isolated": "true",
        "security.guestapi": "false",
        "security.syscalls.deny": seccomp.deny_list(),
        "security.syscalls.deny_compat": "true",
        "boot.autostart": "false",
    }


def _limits(frame: Frame) -> dict[str, str]:
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


def _lxc(id: SandboxId, spec: Spec, frame: Frame) -> str:
    limits = frame.limits
    init = [*frame.argv, _INIT, id, msgspec.json.encode(agent_config(spec, frame)).hex()]
    dropped = [name for name in _CAPABILITIES.split() if name not in _KEPT.split()]
    return "\n".join(
        [
            f"lxc.init.cmd = {' '.join(init)}",
            "lxc.no_new_privs = 1",
            f"lxc.cap.drop = {' '.join(dropped)}",
            # Only its own files are for a box to change, and no setting of the kernel.
            "lxc.mount.auto = proc:mixed sys:ro cgroup:ro:force",
            *(f"lxc.mount.entry = /dev/null {path.lstrip('/')} none {_MASK}bind 0 0" for path in layout.MASKED_FILES),
            *(f"lxc.mount.entry = tmpfs {path.lstrip('/')} tmpfs {_MASK}size=0 0 0" for path in layout.MASKED_FOLDERS),
            _tmpfs(layout.RUN, _SOCKET_ROOM, "noexec,"),
            _tmpfs("/tmp", str(limits.tmp)),
            _tmpfs("/dev/shm", str(limits.shm)),
            *(frame.card.lxc if frame.card else ()),
        ]
    )


def _tmpfs(path: str, size: str, more: str = "") -> str:
    options = f"rw,nosuid,nodev,{more}size={size},mode=1777,create=dir"
    return f"lxc.mount.entry = tmpfs {path.lstrip('/')} tmpfs {options} 0 0"


def agent_config(spec: Spec, frame: Frame) -> dict[str, Any]:
    """In argv, where everybody can read it: so the values of the spec's environment are told to the agent later."""
    return {
        "listen": {"unix": layout.SOCKET},
        "home": layout.HOME,
        "cwd": spec.cwd or frame.image.folder or layout.HOME,
        "env": _environment(spec, frame.image),
        "lifetime_s": spec.lifetime_s or None,
        "idle_s": spec.idle_s or None,
        "init": {
            "user": spec.user or frame.image.user or str(layout.DEFAULT_UID),
            "cwd": frame.image.folder or layout.HOME,
            "folders": [(layout.HOME, 0o755), *((each.target, each.mode) for each in frame.volumes)],
            "files": [("/etc/resolv.conf", f"nameserver {frame.card.resolver}\n")] if frame.card else [],
            "reserve": (RESERVE, _RESERVE_BYTES) if frame.has_quotas else None,
        },
    }


def agent_config_of(config: dict[str, str]) -> dict[str, Any]:
    """The configuration that a box's agent was started with."""
    command = config.get("raw.lxc", "").partition("\n")[0]
    return msgspec.json.decode(bytes.fromhex(command.rpartition(" ")[2]), type=dict[str, Any])


def _environment(spec: Spec, image: ImageConfig) -> dict[str, str]:
    """The image's own, and what programs look for. Our uid is in no list of users, so its name is told here."""
    name = {"USER": "user", "LOGNAME": "user"} if not (spec.user or image.user) else {}
    defaults = {"PATH": _PATH, "LANG": "C.UTF-8", **name}
    return {**defaults, **image.env, "HOME": layout.HOME, **caches.environment(spec)}


def _devices(spec: Spec, frame: Frame) -> dict[str, dict[str, str]]:
    root = {"type": "disk", "path": "/", "pool": frame.pool}
    if frame.has_quotas:  # which count the image too
        image_size = frame.image.size if spec.disk is not None else 0
        root["size"] = str(frame.limits.disk + image_size + _RESERVE_BYTES)
    devices = {"root": root, **frame.runtime, **frame.volume_devices}
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
