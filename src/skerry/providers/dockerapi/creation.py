"""Creation of one container, from the request to the limits as they are read back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, ProviderError, Unsupported
from skerry.host import folders
from skerry.model.spec import Network, SandboxId, Spec
from skerry.providers.base import Enforcement
from skerry.providers.dockerapi import image_config, profile, snapshots
from skerry.providers.dockerapi.api import Engine, Quirks
from skerry.providers.dockerapi.containers import Inspected, file_tar, scratch, unpack
from skerry.providers.dockerapi.homes import Homes
from skerry.providers.dockerapi.image_config import BoxUser, ImageConfig
from skerry.providers.dockerapi.info import EngineInfo
from skerry.providers.dockerapi.profile import ContainerFrame
from skerry.providers.dockerapi.volumes import EngineAgentVolume, EngineVolumes, as_mount
from skerry.providers.shared import layout, loopback, proc_socket, seccomp, volume_plan
from skerry.providers.shared.limits import BoxLimits

BRIDGE = "skerry"
"""The bridge of boxes that ask for one."""


class EngineCreator(msgspec.Struct, frozen=True):
    """Makes containers. It undoes nothing: whoever asked for one destroys what is left of it."""

    _engine: Engine
    _agent: EngineAgentVolume
    _volumes: EngineVolumes
    _homes: Homes
    _quirks: Quirks
    _seccomp_file: Path

    def check(self, spec: Spec) -> None:
        """Refuse what can be told to be wrong without asking anybody."""
        image_name(spec)
        for mount in spec.mounts:
            volume_plan.check_source(mount)

    async def origin(self, spec: Spec, info: EngineInfo) -> dict[str, Enforcement]:
        """Tell the image and who runs in it. A snapshot may be taken only once there is a place for its box."""
        if spec.snapshot is not None:
            return {}
        image = await self._image(spec)
        layout.check_command(spec, image.command)
        user = info.user(spec.user or (image.user if image.user.partition(":")[0] not in ("", "0", "root") else None))
        return {"image": Enforcement(by=f"{spec.image} at {image.id}"), "uid": user}

    async def network(self, spec: Spec) -> dict[str, Enforcement]:
        """Tell what a network of the engine's own is. Raises Unsupported if there is none of that name."""
        if spec.network in frozenset(Network):
            return {}
        found = await find_network(self._engine, spec.network)
        leads = "leads nowhere else" if found.internal else "all that it leads to can be reached"
        reason = f"nothing of ours: it is on the engine's network {found.name} ({found.driver}) with all others there; "
        return {"network": Enforcement(by=f"{reason}{leads}")}

    async def make(self, id: SandboxId, spec: Spec, limits: BoxLimits, runtime: str | None, info: EngineInfo) -> str:
        """Make a container without starting it; return the id of its image."""
        image = await self._image(spec)
        layout.check_command(spec, image.command)
        await self._agent.prepare(image.id)
        info = self.where(info)
        default_uid = image_config.own_uid(spec) if info.has_all_uids else layout.DEFAULT_UID
        user = image_config.known_user(spec.user, image, default_uid)
        wanted = volume_plan.wanted(self._engine.provider, id, spec)
        if user is None:
            async with scratch(self._engine, image.id) as unstarted:
                user = await image_config.find_user(self._engine, unstarted, spec.user or image.user)
        await self._volumes.make(wanted, user, image.id, is_local=info.is_local)
        labels = {
            **layout.labels(self._engine.provider, id, spec, image_name(spec)),
            layout.DISK_LABEL: str(limits.disk),
        }
        frame = ContainerFrame(
            image=image,
            user=user,
            limits=limits,
            runtime=runtime,
            has_own_kernel=info.has_own_kernel(runtime),
            argv=self._agent.argv,
            runtime_volume=self._agent.volume,
            home=str(self._homes.point(id)) if info.has_disks else None,
            volumes=[as_mount(each.name, each.target, read_only=each.read_only) for each in wanted],
            seccomp=self._seccomp(),
            labels=labels,
            network=(await find_network(self._engine, spec.network)).name,
            quirks=self._quirks,
        )
        async with self._home(id, limits.disk, user, labels, has_disk=info.has_disks):
            await self._create(id, profile.container(id, spec, frame))
            if spec.network is Network.RULES and not self._quirks.sets_resolver:
                content = file_tar(loopback.RESOLV_CONF.lstrip("/"), loopback.RESOLV_CONF_TEXT)
                await unpack(self._engine, layout.container_name(id), "/", content)
        return image.id

    def read_back(
        self, box: Inspected, spec: Spec, limits: BoxLimits, runtime: str | None, info: EngineInfo
    ) -> dict[str, Enforcement]:
        """Tell how the limits of a box that has just come up are held. Raises ProviderError where one is not."""
        has_own_kernel = info.has_own_kernel(runtime)
        # A process of that number is on every machine; that the engine is on this one is sure for root only.
        is_here = proc_socket.is_of(box.state.pid, box.id) or (os.geteuid() == 0 and self.where(info).is_local)
        held = limits.read_back(
            box.state.pid if is_here and self._quirks.may_be_here else None,
            info.enforcement(spec, runtime, limits, self._quirks),
            tasks=profile.host_tasks(limits.pids) if has_own_kernel else 0,
        )
        if has_own_kernel:
            held.pop("pids", None)  # the host's group only bounds the tasks of that kernel
        return held

    async def place(self, info: EngineInfo) -> EngineInfo:
        """Find where the daemon is, as far as that is known before anything is made."""
        return self.where(info) if info.is_local and await self._agent.look() else info

    def where(self, info: EngineInfo) -> EngineInfo:
        """Machines may have the same name, kernel and memory, but not the same files. Only root needs to know."""
        is_twin = info.is_local and os.geteuid() == 0 and not self._agent.is_here
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
        self, id: SandboxId, size: int, user: BoxUser, labels: dict[str, str], *, has_disk: bool
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

    def _seccomp(self) -> str:
        """The filter inline, or as a file where the engine wants one."""
        text = seccomp.oci_profile()
        if not self._quirks.reads_seccomp_from_file:
            return text
        if not self._seccomp_file.exists() or self._seccomp_file.read_text() != text:
            folders.make(self._seccomp_file.parent)
            aside = self._seccomp_file.with_suffix(f".{os.getpid()}")
            aside.write_text(text)
            aside.replace(self._seccomp_file)
        return str(self._seccomp_file)


class EngineNetwork(msgspec.Struct, rename="pascal"):
    """Network of an engine, or a mode that is none."""

    name: str
    driver: str = ""
    internal: bool = False


async def find_network(engine: Engine, network: str) -> EngineNetwork:
    """Find the network that a box or a build asks for; our bridge is made if there is none. Raises Unsupported."""
    if network in (Network.NONE, Network.HOST, Network.RULES):
        return EngineNetwork(Network.NONE if network == Network.RULES else network)
    name = BRIDGE if network == Network.BRIDGE else network
    try:
        found = await engine.get(f"/networks/{name}", EngineNetwork)
        if found.name == name:  # and not the beginning of another's id
            return found
    except NotFound:
        if name == BRIDGE:
            await _make_bridge(engine)
            return EngineNetwork(BRIDGE)
    there = sorted(each.name for each in await engine.get("/networks", list[EngineNetwork]))
    reason = f"it has no network {name!r}, but {', '.join(there)}: make it with its own tool (`network create {name}`)"
    raise Unsupported("network", engine.provider, reason)


async def _make_bridge(engine: Engine) -> None:
    body = {"Name": BRIDGE, "CheckDuplicate": True, "Labels": {"skerry": engine.provider}}
    body["Options"] = {"com.docker.network.bridge.enable_icc": "false"}
    with suppress(Conflict):  # somebody else was quicker
        await engine.post("/networks/create", json=body)


def image_name(spec: Spec) -> str:
    """The name of the image that a box is made of."""
    return layout.image_name(spec) if spec.snapshot is None else f"{snapshots.REPOSITORY}:{spec.snapshot}"
