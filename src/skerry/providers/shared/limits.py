"""Limits of a box, and the settings of providers whose boxes a daemon makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from skerry.errors import ConfigError, InvalidSpec
from skerry.host import cgroup
from skerry.model.spec import Spec
from skerry.providers.base import Enforcement, ProviderConfig
from skerry.providers.shared.layout import SCRATCH
from skerry.units import parse_size

ULIMITS = {"core": 0, "nofile": 1024, "memlock": 64 * 1024, "msgqueue": 0, "rtprio": 0, "nice": 0, "sigpending": 1024}
"""Limits of each process of a box. Signals that wait are counted for its uid, which others may share."""

CONTROLLERS = {"memory": "memory", "cpus": "cpu", "pids": "pids"}
"""Fields of a spec, and who holds them in the kernel."""
NO_LIMIT = Enforcement(by="nothing: there is no limit, as none was asked for")
_UNSEEN = "as the engine says"


class BoxLimits(msgspec.Struct, frozen=True, kw_only=True):
    memory: int
    pids: int
    cpus: float | None
    disk: int
    tmp: int
    shm: int

    @property
    def written(self) -> int:
        """Bytes that a box can write to folders of its own, each scratch folder as large as /tmp."""
        return self.disk + (1 + len(SCRATCH)) * self.tmp + self.shm

    def of(self, spec: Spec) -> BoxLimits:
        """These, but what the spec asks for."""
        asked = {field: getattr(spec, field) for field in ("memory", "pids", "cpus", "disk")}
        return msgspec.structs.replace(self, **{field: value for field, value in asked.items() if value is not None})

    def read_back(self, pid: int | None, said: Mapping[str, Enforcement], tasks: int = 0) -> dict[str, Enforcement]:
        """Tell how limits are held, by the groups of process `pid`; None: it is on another machine, and what the engine
        said counts. `tasks` is `pids` on the host, if that differs. Raises ProviderError where no group holds one."""
        wanted = cgroup.GroupLimits(memory=self.memory, pids=tasks or self.pids, cpus=self.cpus)
        asked = {field: name for field, name in CONTROLLERS.items() if name in wanted.controllers() and said[field].by}
        seen = {} if pid is None else cgroup.seen(pid, wanted, asked.values())
        held = {
            field: Enforcement(by=f"{said[field].by}, " + (f"seen in {seen[name]}" if name in seen else _UNSEEN))
            for field, name in asked.items()
        }
        return held if self.cpus is not None else {"cpus": NO_LIMIT, **held}


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

    def limits(self, provider: str) -> BoxLimits:
        """Limits of a box whose spec does not say. Raises ConfigError."""
        try:
            sizes = {field: parse_size(getattr(self, field), field) for field in ("memory", "disk", "tmp", "shm")}
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None
        return BoxLimits(**sizes, pids=self.pids, cpus=self.cpus)

    def cache(self) -> Path:
        folder = self.cache_dir or ("/var/cache/skerry" if os.geteuid() == 0 else "~/.cache/skerry")
        return Path(folder).expanduser().absolute()
