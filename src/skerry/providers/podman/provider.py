"""Podman as an engine: it speaks Docker's API where its service runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from skerry.providers.engine import EngineConfig, EngineProvider, Habits

_NPROC = 32768
"""Of all boxes of a uid together, so it is no limit of ours; as much as Podman's own service allows itself at least."""


class PodmanConfig(EngineConfig, frozen=True):
    from_environment: ClassVar[Mapping[str, str]] = {"host": "CONTAINER_HOST"}

    host: str = ""
    """Empty: /run/podman/podman.sock for root, else the one of your own session."""


class Podman(EngineProvider):
    name = "podman"
    Config = PodmanConfig
    fix = "install Podman (apt-get install podman) and start its service (systemctl [--user] start podman.socket)"
    habits = Habits(
        reads_seccomp_from_file=True,
        tmpfs_has_owner=False,
        log_driver="k8s-file",
        chooses_runtime=False,
        parts_bridge=False,
        scratch=("/run", "/var/tmp"),
        ulimits={"nproc": _NPROC},
    )

    def __init__(self, config: PodmanConfig | None = None) -> None:
        super().__init__(config or PodmanConfig())

    def default_host(self) -> str:
        folder = "/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"
        return f"unix://{folder}/podman/podman.sock"
