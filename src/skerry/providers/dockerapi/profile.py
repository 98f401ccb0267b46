"""Profile of a container, as the engine is told it: the whole boundary of a box in one place."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import Any

import msgspec

from skerry.agent.guest.users import FIRST_TO_DIE
from skerry.model.spec import IMAGE_COMMAND, Mount, Network, SandboxId, Spec
from skerry.providers.dockerapi.api import Quirks
from skerry.providers.dockerapi.image_config import BoxUser, ImageConfig
from skerry.providers.dockerapi.volumes import as_mount
from skerry.providers.shared import layout, loopback
from skerry.providers.shared.limits import ULIMITS, BoxLimits
from skerry.providers.shared.volume_plan import check_source

_FOR_THE_AGENT = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH")
_SOCKET_ROOM = "size=64k"


class ContainerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """All besides the spec that decides how a box is made."""

    image: ImageConfig
    user: BoxUser
    limits: BoxLimits
    runtime: str | None
    has_own_kernel: bool
    argv: list[str]
    """The interpreter, up to the script."""
    runtime_volume: str
    home: str | None
    """A folder of the host for the work folder; None: a tmpfs."""
    volumes: list[dict[str, Any]]
    seccomp: str
    labels: dict[str, str]
    network: str
    quirks: Quirks


def container(id: SandboxId, spec: Spec, frame: ContainerFrame) -> dict[str, Any]:
    """The body of the request that makes it."""
    return {
        "Image": frame.image.id,
        "Hostname": "sandbox",
        "Entrypoint": [*frame.argv, layout.START, id, agent_config(spec, frame)],
        "Cmd": [],
        # What an image sets here would change the agent's own loader.
        "Env": [f"{name}=" for name in _FOR_THE_AGENT],
        "User": frame.user.name,
        "WorkingDir": "/",
        "Labels": frame.labels,
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(spec, frame),
    }


def agent_config(spec: Spec, frame: ContainerFrame) -> str:
    is_ours = frame.user.uid in layout.PROJECT_UIDS or frame.user.uid == layout.DEFAULT_UID
    # The image of a snapshot remembers what we set for the agent alone.
    env = {name: value for name, value in frame.image.env.items() if value or name not in _FOR_THE_AGENT}
    config = layout.agent_config(spec, env, is_ours=is_ours)
    command = frame.image.command if spec.command == IMAGE_COMMAND else None
    of_image = {"image_cwd": frame.image.folder, "image_command": command}
    return msgspec.json.encode({**config, "cwd": spec.cwd, **of_image}).decode()


def _host_config(spec: Spec, frame: ContainerFrame) -> dict[str, Any]:
    limits = frame.limits
    # A kernel of the box's own counts its processes; on the host's, the count would be that of all boxes of a uid.
    own = {"nproc": limits.pids} if frame.has_own_kernel else {}
    ulimits = {**ULIMITS, **frame.quirks.ulimits, **own}
    masked = [*layout.MASKED_FILES, *layout.MASKED_FOLDERS]
    return {
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "OomScoreAdj": FIRST_TO_DIE,
        "NanoCpus": 0 if limits.cpus is None else int(limits.cpus * 1e9),
        "PidsLimit": host_tasks(limits.pids) if frame.has_own_kernel else limits.pids,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
        "CapDrop": ["ALL"],
        "CapAdd": [*layout.ADMIN_CAPABILITIES] if spec.admin else [],
        "SecurityOpt": [
            # What root installs may be for others to become root by, within the box.
            *([] if spec.admin else ["no-new-privileges"]),
            f"seccomp={frame.seccomp}",
            *([f"mask={':'.join(masked)}"] if frame.quirks.masks_by_option else []),
        ],
        "MaskedPaths": masked,
        "ReadonlyRootfs": not spec.writable_root,
        "NetworkMode": frame.network,
        **(_loopback(frame.quirks) if spec.network is Network.RULES else {}),
        "IpcMode": "private",
        "ShmSize": limits.shm,
        "Tmpfs": _tmpfs(spec, frame),
        "Mounts": list(_mounts(spec, frame)),
        "LogConfig": {"Type": frame.quirks.log_driver, "Config": {"max-size": "1m"}},
        "RestartPolicy": {"Name": "no"},
        **({"Runtime": frame.runtime} if frame.runtime else {}),
    }


def _loopback(quirks: Quirks) -> dict[str, Any]:
    # A search domain of the host's own would be asked for too: "." is none.
    resolver = {"Dns": [loopback.RESOLVER], "DnsSearch": ["."]} if quirks.sets_resolver else {}
    return {"Sysctls": {loopback.LOW_PORTS: "0"}, **resolver}


def host_tasks(pids: int) -> int:
    """Tasks of the host that a kernel of the box's own needs for so many processes: reaching that would end the box."""
    return 4 * pids + 128


def _tmpfs(spec: Spec, frame: ContainerFrame) -> dict[str, str]:
    limits = frame.limits
    # The owner too: where the image has the folder, its mode is taken over, and that may be closed to others.
    owner = frame.quirks.tmpfs_owner.format(uid=frame.user.uid, gid=frame.user.gid)
    common = f"rw,exec,nosuid,nodev,mode=1777,{owner}"
    tmpfs = {"/tmp": f"{common},size={limits.tmp}", layout.RUN: f"{common},{_SOCKET_ROOM}"}
    mounted = {posixpath.normpath(mount["Target"]) for mount in _mounts(spec, frame)}
    if not spec.writable_root:
        tmpfs |= {path: f"{common},size={limits.tmp}" for path in layout.SCRATCH if path not in mounted}
    if frame.home is None:
        tmpfs[layout.HOME] = f"{common},size={limits.disk}"
    taken = {*tmpfs, layout.HOME, *mounted}
    # Else the engine would give the box a volume of its own for each, without any limit.
    wanted = {posixpath.normpath(path) for path in frame.image.volumes} - {posixpath.normpath(path) for path in taken}
    return {**tmpfs, **dict.fromkeys(wanted, f"{common},size={limits.tmp}")}


def _mounts(spec: Spec, frame: ContainerFrame) -> Iterable[dict[str, Any]]:
    yield as_mount(frame.runtime_volume, layout.RUNTIME, read_only=True)
    if frame.home is not None:
        yield _bind(Mount(source=frame.home, target=layout.HOME))
    yield from frame.volumes
    for mount in spec.mounts:
        check_source(mount)
        yield _bind(mount)


def _bind(mount: Mount) -> dict[str, Any]:
    bind = {"Type": "bind", "Source": mount.source, "Target": mount.target, "ReadOnly": mount.read_only}
    return {**bind, "BindOptions": {"Propagation": "rprivate"}}
