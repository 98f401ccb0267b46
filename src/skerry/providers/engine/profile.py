"""What the engine is told of a box: the whole boundary in one place."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from skerry import caches
from skerry.providers import layout
from skerry.providers.engine.image_config import ImageConfig, User
from skerry.providers.limits import Limits
from skerry.providers.mounts import check_source
from skerry.spec import Mount, SandboxId, Spec

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FOR_THE_AGENT = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH")
_SOCKET_ROOM = "size=64k"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What besides the spec decides how a box is made."""

    image: ImageConfig
    user: User
    limits: Limits
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
    log_driver: str
    ulimits: dict[str, int]
    scratch: tuple[str, ...]
    """Folders that the engine itself would make writable, and without a limit."""
    tmpfs_has_owner: bool
    """Not every engine can give a tmpfs to a user."""


def container(id: SandboxId, spec: Spec, frame: Frame) -> dict[str, Any]:
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


def agent_config(spec: Spec, frame: Frame) -> str:
    """In argv, where everybody can read it: so the values of the spec's environment are told to the agent later."""
    config = {
        "listen": {"unix": layout.SOCKET},
        "home": layout.HOME,
        "cwd": spec.cwd,
        "image_cwd": frame.image.folder,
        "env": environment(spec, frame),
        "lifetime_s": spec.lifetime_s or None,
        "idle_s": spec.idle_s or None,
    }
    return msgspec.json.encode(config).decode()


def environment(spec: Spec, frame: Frame) -> dict[str, str]:
    """The image's own, and what programs look for. A uid of ours is in no list of users, so its name is told here."""
    is_ours = frame.user.uid in layout.PROJECT_UIDS or frame.user.uid == layout.DEFAULT_UID
    name = {"USER": "user", "LOGNAME": "user"} if is_ours else {}
    defaults = {"PATH": _PATH, "LANG": "C.UTF-8", **name}
    return {**defaults, **_env_of(frame.image), "HOME": layout.HOME, **caches.environment(spec)}


def _env_of(image: ImageConfig) -> dict[str, str]:
    """A snapshot's image remembers what we set for the agent alone."""
    return {name: value for name, value in image.env.items() if value or name not in _FOR_THE_AGENT}


def _host_config(spec: Spec, frame: Frame) -> dict[str, Any]:
    limits = frame.limits
    return {
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "NanoCpus": 0 if limits.cpus is None else int(limits.cpus * 1e9),
        "PidsLimit": _host_tasks(limits.pids) if frame.has_own_kernel else limits.pids,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ulimits(frame).items()],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={frame.seccomp}"],
        "MaskedPaths": [*layout.MASKED_FILES, *layout.MASKED_FOLDERS],
        "ReadonlyRootfs": not spec.writable_root,
        "NetworkMode": frame.network,
        "IpcMode": "private",
        "ShmSize": limits.shm,
        "Tmpfs": _tmpfs(spec, frame),
        "Mounts": list(_mounts(spec, frame)),
        "LogConfig": {"Type": frame.log_driver, "Config": {"max-size": "1m"}},
        "RestartPolicy": {"Name": "no"},
        **({"Runtime": frame.runtime} if frame.runtime else {}),
    }


def _ulimits(frame: Frame) -> dict[str, int]:
    """A kernel of the box's own counts its processes; on the host's, the count would be that of all boxes of a uid."""
    return {**frame.ulimits, "nproc": frame.limits.pids} if frame.has_own_kernel else frame.ulimits


def _host_tasks(pids: int) -> int:
    """What a kernel of the box's own needs of the host's for so many processes: reaching that would end the box."""
    return 4 * pids + 128


def _tmpfs(spec: Spec, frame: Frame) -> dict[str, str]:
    limits = frame.limits
    # The owner too: where the image has the folder, its mode is taken over, and that may be closed to others.
    owner = f",uid={frame.user.uid},gid={frame.user.gid}" if frame.tmpfs_has_owner else ""
    common = f"rw,exec,nosuid,nodev,mode=1777{owner}"
    tmpfs = {"/tmp": f"{common},size={limits.tmp}", layout.RUN: f"{common},{_SOCKET_ROOM}"}
    tmpfs |= dict.fromkeys(frame.scratch, f"{common},{_SOCKET_ROOM}")
    if frame.home is None:
        tmpfs[layout.HOME] = f"{common},size={limits.disk}"
    taken = {*tmpfs, layout.HOME, *(mount["Target"] for mount in _mounts(spec, frame))}
    # Else the engine would give the box a volume of its own for each, without any limit.
    wanted = {posixpath.normpath(path) for path in frame.image.volumes} - {posixpath.normpath(path) for path in taken}
    return {**tmpfs, **dict.fromkeys(wanted, f"{common},size={limits.tmp}")}


def _mounts(spec: Spec, frame: Frame) -> Iterable[dict[str, Any]]:
    nothing: Mapping[str, Any] = {"NoCopy": True}
    yield {
        "Type": "volume",
        "Source": frame.runtime_volume,
        "Target": layout.RUNTIME,
        "ReadOnly": True,
        "VolumeOptions": nothing,
    }
    if frame.home is not None:
        yield _bind(Mount(source=frame.home, target=layout.HOME))
    yield from frame.volumes
    for mount in spec.mounts:
        check_source(mount)
        yield _bind(mount)


def _bind(mount: Mount) -> dict[str, Any]:
    options = {"Propagation": "rprivate"}
    return {
        "Type": "bind",
        "Source": mount.source,
        "Target": mount.target,
        "ReadOnly": mount.read_only,
        "BindOptions": options,
    }
