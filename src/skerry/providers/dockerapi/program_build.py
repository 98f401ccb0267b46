"""Builds by a program of this host, Buildah's or one with its options, where no service does them."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, ProviderError
from skerry.model.spec import Network
from skerry.providers.base import ImageBuild, OnProgress, Progress
from skerry.providers.dockerapi import build_context
from skerry.providers.dockerapi.image_config import full_name
from skerry.providers.dockerapi.images import BUILD_MEMORY, build_work
from skerry.providers.shared.layout import ADMIN_CAPABILITIES
from skerry.vm.images import programs

_LOOK_S = 60.0
_LONGEST_S = 86400.0


class ProgramBuild:
    """One build, with the same walls around its steps as a build by a service."""

    def __init__(self, program: str, build: ImageBuild, on_progress: OnProgress) -> None:
        self._program = program
        self._build = build
        self._on_progress = on_progress
        self._work = build_work(build, build.name, on_progress)

    async def save(self, target: Path) -> None:
        """Build, and write the image as an archive. Raises InvalidSpec, or ProviderError with the end of its output."""
        build = self._build
        full_name(build.name, digest=False)
        build_context.check_dockerfile(build.dockerfile, build.network)
        for base in build_context.base_images(build.dockerfile, build.args, build.target):
            await self._check_base(base)
        async with self._context() as folder:
            file = str(folder / build_context.DOCKERFILE)
            try:
                await self._show("build", *self._options(), "-f", file, "-t", build.name, str(folder))
            except ProviderError as error:
                raise self._work.failure(error.message.partition(":")[0]) from error  # its last words are the work's
        self._on_progress(Progress(f"taking {build.name} out of {Path(self._program).name}"))
        await self._show("push", build.name, f"docker-archive:{target}")

    def _options(self) -> list[str]:
        build, memory = self._build, str(self._build.memory or BUILD_MEMORY)
        capabilities = ",".join(ADMIN_CAPABILITIES)
        return [
            *("--isolation=oci", "--format=docker", "--layers", "--force-rm", "--http-proxy=false", "--pull=never"),
            *(f"--memory={memory}", f"--memory-swap={memory}", "--cap-drop=ALL", f"--cap-add={capabilities}"),
            f"--network={'none' if build.network is Network.NONE else 'private'}",
            *(f"--build-arg={name}={value}" for name, value in build.args.items()),
            *([f"--target={build.target}"] if build.target else []),
            *(["--no-cache"] if build.no_cache else []),
        ]

    async def _check_base(self, name: str) -> None:
        """Have an image that is built on. Raises ProviderError, and InvalidSpec if it has steps of its own."""
        full_name(name)
        try:
            found = await self._look(name)
        except ProviderError as error:
            if self._build.network is Network.NONE:
                reason = f"it builds on {name}, which is not here, and has no network to get it (--network bridge)"
                raise self._work.failure(reason) from error
            await self._show("pull", name)
            found = await self._look(name)
        if _has_steps(found):
            reason = f"FROM {name}: it has ONBUILD steps, which are not run; write them into the Dockerfile"
            raise InvalidSpec(reason, field="dockerfile")

    @asynccontextmanager
    async def _context(self) -> AsyncIterator[Path]:
        """The files that a service would be sent, in a folder."""

        def unpack(folder: str) -> None:
            packed = Path(folder, "context.tar")
            with packed.open("xb") as file:
                file.writelines(build_context.pack(self._build.dockerfile, self._build.context))
            with tarfile.open(packed) as archive:
                archive.extractall(Path(folder, "context"), filter="fully_trusted")

        with tempfile.TemporaryDirectory(prefix="skerry-build-") as folder:
            await asyncio.to_thread(unpack, folder)
            yield Path(folder, "context")

    async def _look(self, image: str) -> Any:
        found = await programs.run(self._program, "inspect", "--type=image", image, timeout_s=_LOOK_S)
        return msgspec.json.decode(found)

    async def _show(self, verb: str, *arguments: str) -> None:
        """Run it to its end; what it says is progress, and not kept, as a step can talk without end."""
        on_line = self._work.on_text
        await programs.run(self._program, verb, *arguments, timeout_s=_LONGEST_S, on_line=on_line, keep=False)


def _has_steps(told: Any) -> bool:
    """Whether what is told of an image has ONBUILD steps; programs have them in different places."""
    if isinstance(told, dict):
        return bool(told.get("OnBuild")) or any(_has_steps(each) for each in told.values())
    return isinstance(told, list) and any(_has_steps(each) for each in told)
