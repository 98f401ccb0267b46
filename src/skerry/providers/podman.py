"""Podman as an engine: it speaks Docker's API where its service runs, and builds without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from skerry.errors import ProviderUnavailable
from skerry.providers.base import ImageBuild, OnProgress
from skerry.providers.dockerapi import EngineConfig, EngineProvider, Quirks

_NPROC = 32768
"""Of all boxes of a uid together, so it is no limit of ours; as much as Podman's own service allows itself at least."""
_BUILDERS = ("podman", "buildah")
"""Programs that build without a service, by the same options."""


class PodmanConfig(EngineConfig, frozen=True):
    from_environment: ClassVar[Mapping[str, str]] = {"host": "CONTAINER_HOST"}

    host: str = ""
    """Empty: /run/podman/podman.sock for root, else the one of your own session."""


class Podman(EngineProvider):
    name = "podman"
    Config = PodmanConfig
    fix = "install Podman (apt-get install podman) and start its service (systemctl [--user] start podman.socket)"
    quirks = Quirks(
        reads_seccomp_from_file=True,
        masks_by_option=True,
        tmpfs_owner="U",
        log_driver="k8s-file",
        chooses_runtime=False,
        sets_resolver=False,
        parts_bridge=False,
        builds_with_buildah=True,
        ulimits={"nproc": _NPROC},
    )

    def default_host(self) -> str:
        folder = "/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"
        return f"unix://{folder}/podman/podman.sock"

    async def check_builder(self) -> None:
        """Raise ProviderUnavailable if neither its service answers nor a program is here that builds without one."""
        if _builder() is None:
            await self.check()

    async def build_archive(
        self, build: ImageBuild, target: Path, on_progress: OnProgress, *, most: int | None = None
    ) -> None:
        try:
            await self.check()
        except ProviderUnavailable:
            if (program := _builder()) is None:
                raise
            from skerry.providers.dockerapi.program_build import ProgramBuild

            await ProgramBuild(program, build, on_progress).save(target)
        else:
            await super().build_archive(build, target, on_progress, most=most)


def _builder() -> str | None:
    from skerry.vm.images import programs

    return next((path for name in _BUILDERS if (path := programs.which(name)) is not None), None)
