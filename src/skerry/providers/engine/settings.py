"""The settings that every engine has."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.providers.daemon_config import DaemonConfig


class EngineConfig(DaemonConfig, frozen=True):
    host: str = ""
    """The daemon: unix:///path or tcp://host:port."""
    runtime: str = ""
    """The OCI runtime of boxes that name none, such as runsc; empty: the daemon's own default."""
    state_dir: str = ""
    """A folder for each box that has a disk; empty: /var/lib/skerry/NAME for root, else ~/.local/state/skerry/NAME."""
    disk: int | str = "512M"
    """The work folder."""

    def state(self, provider: str) -> Path:
        default = f"/var/lib/skerry/{provider}" if os.geteuid() == 0 else f"~/.local/state/skerry/{provider}"
        return Path(self.state_dir or default).expanduser().absolute()
