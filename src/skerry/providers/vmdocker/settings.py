"""The settings of machines that have Docker in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from skerry.errors import ConfigError, InvalidSpec
from skerry.providers.daemon_config import DaemonConfig
from skerry.units import parse_size


class VmDockerConfig(DaemonConfig, frozen=True):
    hypervisor: Literal["", "qemu", "firecracker"] = ""
    """Empty: Firecracker where it runs, else QEMU."""
    state_dir: str = ""
    """A folder for each project; empty: /var/lib/skerry/vmdocker for root, else ~/.local/state/skerry/vmdocker."""
    vm_memory: int | str = "1G"
    """Of a project's machine: what all its boxes have together, and Docker some 200M of it."""
    vm_cpus: int | None = None
    """Virtual processors of a machine; none: two, or one where they are emulated."""
    vm_disk: int | str = "8G"
    """The most that the images, volumes and snapshots of a project can hold; it takes the room of what is written."""
    idle_s: float = 1800.0
    """How long a machine waits for somebody to come before it powers itself off."""
    ready_timeout_s: float = 60.0
    """How long a machine may take from its start until Docker answers in it; four times as long where it is
    emulated."""
    template: bool = True
    """Boot a machine with Docker once, keep it with its memory, and begin those of new projects as clones of it."""
    memory: int | str = "256M"
    disk: int | str = "128M"
    """The work folder, which is in the memory of the box."""
    tmp: int | str = "64M"

    def size(self, field: Literal["vm_memory", "vm_disk"]) -> int:
        try:
            return parse_size(getattr(self, field), field)
        except InvalidSpec as error:
            raise ConfigError(f"providers.vmdocker.{error}") from None

    def state(self) -> Path:
        default = "/var/lib/skerry/vmdocker" if os.geteuid() == 0 else "~/.local/state/skerry/vmdocker"
        return Path(self.state_dir or default).expanduser().absolute()
