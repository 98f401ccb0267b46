"""Making one container, from the request to the first answer of its agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, ProviderError
from skerry.providers import layout, volume_plan
from skerry.providers.base import Enforcement
from skerry.providers.engine import image_config, profile, seccomp, snapshots
from skerry.providers.engine.api import Engine
from skerry.providers.engine.habits import Habits
from skerry.providers.engine.homes import Homes
from skerry.providers.engine.image_config import ImageConfig, User
from skerry.providers.engine.info import Info
from skerry.providers.engine.profile import Frame
from skerry.providers.engine.runtime import Runtime
from skerry.providers.engine.scratch import scratch
from skerry.providers.engine.volumes import Volumes, as_mount
from skerry.providers.limits import ULIMITS, Limits
from skerry.providers.mounts import check_source
from skerry.spec import Network, SandboxId, Spec

NETWORK = "skerry"
"""The bridge of boxes that ask for one."""


class Creator:
    """Makes containers. It undoes nothing: whoever asked for one destroys what is left of it."""

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        volumes: Volumes,
        homes: Homes,
        habits: Habits,
        seccomp_file: Path,
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._volumes = volumes
        self._homes = homes
        self._habits = habits
        self._seccomp_file = seccomp_file

    def check(self, spec: Spec) -> None:
        """Refuse what can be told to be wrong without asking anybody."""
        image_name(spec)
        for mount in spec.mounts:
            check_source(mount)

    async def origin(self, spec: Spec, info: Info) -> dict[str, Enforcement]:
        """What it is made of, and who runs in it. A snapshot may be taken only once there is a place for its box."""
        if spec.snapshot is not None:
            return {}
        image = await self._image(spec)
        user = info.user(spec.user or (image.user if image.user.partition(":")[0] not in ("", "0", "root") else None))
        return {"image": Enforcement(by=f"{spec.image} at {image.id}"), "uid": user}

    async def make(self, id: SandboxId, spec: Spec, limits: Limits, runtime: str | None, info: Info) -> str:
        """A container that is made and not started; the id of its image."""
        image = await self._image(spec)
        await self._runtime.prepare(image.id)
        info = self._where(info)
        default_uid = image_config.own_uid(spec) if info.has_all_uids else layout.DEFAULT_UID
        user = image_config.known_user(spec.user, image, default_uid)
        wanted = volume_plan.wanted(self._engine.provider, id, spec)
        if user is None:
            user = await self._look_up(image, spec.user or image.user)
        await self._volumes.make(wanted, user, image.id, is_local=info.is_local)
        labels = {
            **spec.labels,
            "skerry": self._engine.provider,
            "skerry.sandbox": id,
            "skerry.project": spec.project,
            "skerry.image": image_name(spec),
        }
        frame = Frame(
            image=image,
            user=user,
            limits=limits,
            runtime=runtime,
            has_own_kernel=info.has_own_kernel(runtime),
            argv=self._runtime.argv,
            runtime_volume=self._runtime.volume,
            home=str(self._homes.point(id)) if info.has_disks else None,
            volumes=[as_mount(each) for each in wanted],
            seccomp=self._seccomp(),
            labels=labels,
            network=await self._network(spec.network),
            log_driver=self._habits.log_driver,
            ulimits={**ULIMITS, **self._habits.ulimits},
            scratch=self._habits.scratch if not spec.writable_root else (),
            tmpfs_has_owner=self._habits.tmpfs_has_owner,
        )
        async with self._home(id, limits.disk, user, labels, has_disk=info.has_disks):
            await self._create(id, profile.container(id, spec, frame))
        return image.id

    async def place(self, info: Info) -> Info:
        """What is known of where the daemon is before anything is made."""
        return self._where(info) if info.is_local and await self._runtime.look() else info

    def _where(self, info: Info) -> Info:
        """Machines may have the same name, kernel and memory, but not the same files. Only root needs to know."""
        is_twin = info.is_local and os.geteuid() == 0 and not self._runtime.is_here
        return msgspec.structs.replace(info, elsewhere=True) if is_twin else info

    async def _image(self, spec: Spec) -> ImageConfig:
        try:
            return await image_config.resolve(self._engine, image_name(spec))
        except ImageNotFound as error:
            if spec.snapshot is None:
                raise
            raise NotFound(f"{self._engine.provider} has no snapshot {spec.snapshot!r}") from error

    @asynccontextmanager
    async def _home(
        self, id: SandboxId, size: int, user: User, labels: dict[str, str], *, has_disk: bool
    ) -> AsyncIterator[None]:
        """Make the disk while the engine makes the container, which needs no more than the folder until it starts."""
        if not has_disk:
            yield
            return
        await asyncio.to_thread(self._homes.reserve, id, labels)
        making = asyncio.ensure_future(asyncio.to_thread(self._homes.make, id, size, user.uid, user.gid))
        try:
            yield
        finally:
            await asyncio.wait([making])  # nobody may remove it while it is made
        making.result()

    async def _create(self, id: SandboxId, body: dict[str, Any]) -> None:
        try:
            await self._engine.post("/containers/create", query={"name": layout.container_name(id)}, json=body)
        except NotFound as error:
            raise ImageNotFound(str(error)) from error
        except ProviderError as error:
            if "bind source path does not exist" in str(error):
                raise InvalidSpec(f"mounts: {error}", field="mounts") from error
            raise

    async def _look_up(self, image: ImageConfig, name: str) -> User:
        """Who a name is in an image, before anything is made for that user."""
        async with scratch(self._engine, image.id) as container:
            try:
                return await image_config.find_user(self._engine, container, name)
            except NotFound as error:
                raise InvalidSpec(f"user: {error}", field="user") from None

    def _seccomp(self) -> str:
        """Inline, or as a file where the engine wants one."""
        text = seccomp.profile()
        if not self._habits.reads_seccomp_from_file:
            return text
        if not self._seccomp_file.exists() or self._seccomp_file.read_text() != text:
            self._seccomp_file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._seccomp_file.with_suffix(f".{os.getpid()}")
            aside.write_text(text)
            aside.replace(self._seccomp_file)
        return str(self._seccomp_file)

    async def _network(self, network: Network) -> str:
        if network is not Network.BRIDGE:
            return network.value
        try:
            await self._engine.get(f"/networks/{NETWORK}", dict[str, Any])
        except NotFound:
            options = {"com.docker.network.bridge.enable_icc": "false"}
            labels = {"skerry": self._engine.provider}
            with suppress(Conflict):  # somebody else was quicker
                await self._engine.post(
                    "/networks/create",
                    json={"Name": NETWORK, "CheckDuplicate": True, "Options": options, "Labels": labels},
                )
        return NETWORK


def image_name(spec: Spec) -> str:
    """The name of the image that a box is made of."""
    if spec.snapshot is not None:
        return f"{snapshots.REPOSITORY}:{spec.snapshot}"
    if spec.image is None:
        raise InvalidSpec("image: a container needs one; give image= or --image", field="image")
    return spec.image
