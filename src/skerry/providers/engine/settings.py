"""The settings that every engine has, and what a box gets where its spec does not say."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.errors import ConfigError, InvalidSpec
from skerry.providers.base import ProviderConfig
from skerry.providers.limits import Limits
from skerry.units import parse_size


class EngineConfig(ProviderConfig, frozen=True):
    host: str = ""
    """The daemon: unix:///path or tcp://host:port."""
    runtime: str = ""
    """The OCI runtime of boxes that name none, such as runsc; empty: the daemon's own default."""
    state_dir: str = ""
    """A folder for each box that has a disk; empty: /var/lib/skerry/NAME for root, else ~/.local/state/skerry/NAME."""
    cache_dir: str = ""
    """What boxes share; empty: /var/cache/skerry for root, else ~/.cache/skerry."""
    memory: int | str = "1G"
    pids: int = 256
    cpus: float | None = None
    disk: int | str = "512M"
    """The work folder."""
    tmp: int | str = "256M"
    shm: int | str = "64M"
    start_timeout_s: float = 60.0
    timeout_s: float = 30.0
    """How long the daemon may take to answer."""

    def limits(self, provider: str) -> Limits:
        try:
            sizes = {field: parse_size(getattr(self, field), field) for field in ("memory", "disk", "tmp", "shm")}
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None
        return Limits(**sizes, pids=self.pids, cpus=self.cpus)

    def folders(self, provider: str) -> tuple[Path, Path]:
        """Cache and state."""
        is_root = os.geteuid() == 0
        cache = self.cache_dir or ("/var/cache/skerry" if is_root else "~/.cache/skerry")
        state = self.state_dir or (f"/var/lib/skerry/{provider}" if is_root else f"~/.local/state/skerry/{provider}")
        return Path(cache).expanduser().absolute(), Path(state).expanduser().absolute()
