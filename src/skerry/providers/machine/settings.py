"""The settings that every provider of virtual machines has."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.errors import ConfigError, InvalidSpec
from skerry.providers.base import ProviderConfig
from skerry.providers.limits import Limits
from skerry.units import parse_size


class MachineConfig(ProviderConfig, frozen=True):
    state_dir: str = ""
    """One folder for each box, and the snapshots and volumes; empty: below /var/lib/skerry for root, else
    ~/.local/state/skerry."""
    cache_dir: str = ""
    """Kernels, images and templates, which boxes share; empty: /var/cache/skerry for root, else ~/.cache/skerry."""
    memory: int | str = "192M"
    """What the processes of a box have together; its machine has some more, for its kernel."""
    pids: int = 256
    cpus: float | None = None
    disk: int | str = "512M"
    """The box's own disk, which takes the room of what is written to it."""
    data_size: int | str = "8G"
    """The most that a data volume can hold; it takes the room of what was written to it."""
    tmp: int | str = "256M"
    shm: int | str = "64M"
    start_timeout_s: float = 60.0
    template: bool = True
    """Boot a machine of each kind once, keep it with its memory, and make boxes as clones of that."""

    def limits(self, provider: str) -> Limits:
        """What a box gets where its spec does not say."""
        sizes = {field: self._size(provider, field) for field in ("memory", "disk", "tmp", "shm")}
        return Limits(**sizes, pids=self.pids, cpus=self.cpus)

    def size_of_data(self, provider: str) -> int:
        return self._size(provider, "data_size")

    def _size(self, provider: str, field: str) -> int:
        try:
            return parse_size(getattr(self, field), field)
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None

    def state(self, provider: str) -> Path:
        return _folder(self.state_dir, f"/var/lib/skerry/{provider}", f"~/.local/state/skerry/{provider}")

    def cache(self) -> Path:
        return _folder(self.cache_dir, "/var/cache/skerry", "~/.cache/skerry")


def _folder(setting: str, for_root: str, for_user: str) -> Path:
    return Path(setting or (for_root if os.geteuid() == 0 else for_user)).expanduser().absolute()
