"""Layout of a container: its names, its paths, and the folders with the agent that it is given."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.agent import bundle
from skerry.errors import InvalidSpec
from skerry.model import caches
from skerry.model.spec import IMAGE_COMMAND, Network, SandboxId, Spec

if TYPE_CHECKING:
    import tarfile

HOME = "/home/user"
DATA = "/.data"
RUNTIME = "/.skerry"
"""A read-only volume with the agent and its interpreter."""
AGENT = f"{RUNTIME}/agent"
PYTHON = f"{RUNTIME}/python"
RUN = f"{RUNTIME}/run"
"""A small tmpfs for the agent's socket."""
SOCKET = f"{RUN}/agent"

START = f"{AGENT}/start.py"
RELAY = f"{AGENT}/relay.py"

DEFAULT_UID = 65532
"""User of boxes where neither spec nor image names another than root, and the engine has few uids."""
PROJECT_UIDS = range(0x60000000, 0x61000000)
"""Uids of projects, one each, where the engine has all of the host's: the kernel counts much by uid, and what one
project uses up is not missing in another."""

_MASKED_PROC = """
cmdline interrupts kcore keys key-users kpagecgroup kpagecount kpageflags latency_stats pagetypeinfo sched_debug
slabinfo timer_list timer_stats vmallocinfo
"""
MASKED_FILES = tuple(f"/proc/{name}" for name in _MASKED_PROC.split())
MASKED_FOLDERS = ("/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/devices/virtual/powercap", "/sys/firmware")
"""Paths that tell of the host. They take the place of an engine's own list, which is shorter."""

ADMIN_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETFCAP", "SETGID", "SETUID")
"""Capabilities that installing packages takes, adding and becoming users, and changing owners."""
SCRATCH = ("/run", "/var/tmp")
"""Folders beside /tmp that programs expect to be able to write to."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PREFIX = "skerry-"
DISK_LABEL = "skerry.disk"
"""Label with the bytes that a box's work folder holds."""


def container_name(id: SandboxId) -> str:
    return f"{PREFIX}{id}"


def image_name(spec: Spec) -> str:
    if spec.image is None:
        raise InvalidSpec("image: a container needs one; give image= or --image", field="image")
    return spec.image


def check_command(spec: Spec, command: Sequence[str]) -> None:
    """Raise InvalidSpec if the image's own command is asked for, and it has none."""
    if spec.command == IMAGE_COMMAND and not command:
        reason = "the image names no command: give one of your own, or import the image again from its archive"
        raise InvalidSpec(f"command: {reason}", field="command")


def labels(provider: str, id: SandboxId, spec: Spec, image: str) -> dict[str, str]:
    """Labels of a box, by which it is found again."""
    ours = {"skerry": provider, "skerry.sandbox": id, "skerry.project": spec.project, "skerry.image": image}
    return {**spec.labels, **ours}


def agent_config(spec: Spec, image_env: Mapping[str, str], *, is_ours: bool) -> dict[str, Any]:
    """Configuration of an agent; `is_ours`: its user is in no list of users. It stands in argv, where all can read it,
    so that the values of the spec's environment are told to the agent later."""
    name = {"USER": "user", "LOGNAME": "user"} if is_ours else {}
    env = {"PATH": _PATH, "LANG": "C.UTF-8", **name, **image_env, "HOME": HOME, **caches.environment(spec)}
    return {
        "listen": {"unix": SOCKET, "outside": True},
        "home": HOME,
        "env": env,
        "lifetime_s": spec.lifetime_s or None,
        "idle_s": spec.idle_s or None,
        "rules": spec.network is Network.RULES,
    }


class AgentFolders:
    """Folders of this host with the agent and its interpreter, by their names below RUNTIME."""

    def __init__(self, cache: Path, version: str) -> None:
        """`version` is another when a volume that is made of them has to be another."""
        self._cache = cache
        self._version = version
        self.folders: dict[str, Path] = {}
        self.argv: list[str] = []
        """The command that runs a script of the agent, up to the script."""
        self.volume = ""
        """The name of a volume that has them, the same for the same content."""

    async def find(self) -> None:
        """Have them; made once, in a thread."""
        if not self.folders:
            await asyncio.to_thread(self._find)

    def _find(self) -> None:
        portable = bundle.portable(self._cache)
        agent = bundle.agent_folder(self._cache, portable.python)
        key = "\0".join((self._version, agent.name, portable.folder.name))
        self.argv = portable.argv(PYTHON)
        self.volume = f"skerry-runtime-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self.folders = {"agent": agent, "python": portable.folder}

    def pack(self, archive: tarfile.TarFile, at: str = "") -> None:
        """Add them to an archive, as root's."""

        def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            return entry

        for name, folder in self.folders.items():
            archive.add(folder, f"{at}{name}", filter=of_root)
