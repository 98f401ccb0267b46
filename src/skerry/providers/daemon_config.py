"""The settings that every provider has whose boxes a daemon makes."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.errors import ConfigError, InvalidSpec
from skerry.providers.base import ProviderConfig
from skerry.providers.limits import Limits
from skerry.units import parse_size


class DaemonConfig(ProviderConfig, frozen=True):
    cache_dir: str = ""
    """What boxes share; empty: /var/cache/skerry for root, else ~/.cache/skerry."""
    memory: int | str = "1G"
    pids: int = 256
    cpus: float | None = None
    disk: int | str = "512M"
    tmp: int | str = "256M"
    shm: int | str = "64M"
    start_timeout_s: float = 60.0
    timeout_s: float = 30.0
    """How long the daemon may take to answer."""

    def limits(self, provider: str) -> Limits:
        """What a box gets where its spec does not say."""
        try:
            sizes = {field: parse_size(getattr(self, field), field) for field in ("memory", "disk", "tmp", "shm")}
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None
        return Limits(**sizes, pids=self.pids, cpus=self.cpus)

    def cache(self) -> Path:
        folder = self.cache_dir or ("/var/cache/skerry" if os.geteuid() == 0 else "~/.cache/skerry")
        return Path(folder).expanduser().absolute()
