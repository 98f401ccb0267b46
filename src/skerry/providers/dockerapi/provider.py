"""Boxes as containers of an engine that speaks Docker's API: any image, found again after any restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skerry.agent.client import AgentClient
from skerry.aio import backoff
from skerry.errors import AgentError, Conflict, CreateFailed, NotFound, ProviderError, ProviderUnavailable, SkerryError
from skerry.model.spec import SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers.base import (
    BoxChange,
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    ImageBuild,
    ImageVerbs,
    Isolation,
    OnProgress,
    Provider,
    Snapshot,
    Volume,
    log,
)
from skerry.providers.dockerapi import containers
from skerry.providers.dockerapi.api import Engine, EngineConfig, EngineFailed, Quirks
from skerry.providers.dockerapi.dialer import Demultiplexer, EngineDialer, check_running
from skerry.providers.dockerapi.volumes import EngineAgentVolume, EngineVolumes, sweep_runtimes
from skerry.providers.shared import layout, loopback, volume_plan

if TYPE_CHECKING:
    from skerry.providers.dockerapi.creation import EngineCreator
    from skerry.providers.dockerapi.homes import Homes
    from skerry.providers.dockerapi.images import EngineImages
    from skerry.providers.dockerapi.info import EngineInfo
    from skerry.providers.dockerapi.snapshots import EngineSnapshots

_CHECK_S = 5.0
_END_S = 2.0
"""How long an agent may take to end its box. Whoever stops a box has given its processes time to end before."""
_REMOVE_TIMEOUT_S = 60.0
_FAILING_S = 3.0
_STILL_THERE = ": already exists"
"""Last words of containerd on a task that it has not removed yet."""
"""How long a removal is tried again that the engine fails at."""


class EngineProvider(ImageVerbs, Provider):
    isolation = Isolation.CONTAINER
    capabilities = frozenset(Capability) - {Capability.MEMORY}
    honours = frozenset({"image", "runtime", "writable_root", "admin", "data", "cache", "cache_paths", "snapshot"})
    needs_image = True
    Config: ClassVar[type[EngineConfig]] = EngineConfig
    fix: ClassVar[str]
    """What to do when the daemon does not answer."""
    quirks: ClassVar[Quirks] = Quirks()

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or self.Config()
        self._config = config
        self._defaults = config.limits(self.name)
        address = config.host or self.default_host()
        self.takes_memory_here = address.startswith("unix:") and self.quirks.may_be_here
        self._engine = Engine(address, config, provider=self.name, fix=self.fix)
        self._cache, self._state_dir = config.cache(), config.state(self.name)
        self._agent = self._agent_volume()
        self._volumes = EngineVolumes(self._engine)
        self._dialer = EngineDialer(self._engine, self._agent, may_be_here=self.quirks.may_be_here)
        self._known_info: EngineInfo | None = None

    # Imported when they are needed: a command line that only dials a box needs none of them.

    @cached_property
    def _homes(self) -> Homes:
        from skerry.providers.dockerapi.homes import Homes

        return Homes(self._state_dir, self._cache)

    @cached_property
    def _images(self) -> EngineImages:
        from skerry.providers.dockerapi.images import EngineImages

        return EngineImages(self._engine, self.quirks)

    @cached_property
    def _snapshots(self) -> EngineSnapshots:
        from skerry.providers.dockerapi.snapshots import EngineSnapshots

        return EngineSnapshots(self._engine, self._cache, self._config.root_size(self.name))

    @cached_property
    def _creator(self) -> EngineCreator:
        from skerry.providers.dockerapi.creation import EngineCreator

        seccomp_file = self._state_dir / "seccomp.json"
        return EngineCreator(self._engine, self._agent, self._volumes, self._homes, self.quirks, seccomp_file)

    def _agent_volume(self) -> EngineAgentVolume:
        return EngineAgentVolume(self._engine, self._cache)

    def default_host(self) -> str:
        raise NotImplementedError("an engine without a default address must be told one")

    async def _info(self) -> EngineInfo:
        if self._known_info is None:
            from skerry.providers.dockerapi.info import EngineInfo

            info = await self._engine.get("/info", EngineInfo)
            info.check(self.name)
            info.elsewhere = not self.quirks.may_be_here
            self._known_info = info
        return self._known_info

    def _runtime_of(self, spec: Spec) -> str | None:
        return spec.runtime or self._config.runtime or None

    # the five verbs

    async def check(self) -> None:
        self._known_info = None
        try:
            async with asyncio.timeout(_CHECK_S):
                info = await self._info()
        except TimeoutError:
            reason = f"its daemon at {self._engine.address} did not answer within {_CHECK_S:g} s"
            raise ProviderUnavailable(self.name, reason, fix=self.fix) from None
        info.check_runtime(self.name, self._config.runtime or None)

    async def describe(self) -> Mapping[str, Enforcement]:
        info = await self._info()
        held = info.enforcement(Spec(provider=self.name), self._config.runtime or None, self._defaults, self.quirks)
        chosen = info.runtimes_there() if self.quirks.chooses_runtime else {}
        admin = info.admin(info.has_own_kernel(self._config.runtime or None))
        asked = {"rules": Enforcement(by=loopback.BY_RULES), "admin": admin}
        return {"daemon": Enforcement(by=info.place(self._engine.address)), **held, **asked, **chosen}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._creator.check(spec)
        info, runtime = await self._creator.place(await self._info()), self._runtime_of(spec)
        info.check_runtime(self.name, runtime, may_choose=self.quirks.chooses_runtime)
        held = info.enforcement(spec, runtime, self._defaults.of(spec), self.quirks)
        return {**held, **await self._creator.network(spec), **await self._creator.origin(spec, info)}

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        limits, info, runtime = self._defaults.of(spec), await self._info(), self._runtime_of(spec)
        image = await self._creator.make(id, spec, limits, runtime, info)
        async with self._started(id, spec) as (client, box):
            held = self._creator.read_back(box, spec, limits, runtime, info)
            if spec.snapshot is not None:
                await self._snapshots.unfold(image, limits.disk, client)
        return held

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._dialer.forget(id)
        owned = await self._data_of(id) if volumes else []
        await self._unpause(id)
        await self._remove_container(id)
        await asyncio.to_thread(self._homes.remove, id)
        for volume in owned:
            with suppress(NotFound):
                await self._engine.delete(f"/volumes/{volume}")

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        boxes = await containers.all_boxes(self._engine)
        await containers.sweep_scratch(self._engine)
        await sweep_runtimes(self._engine)
        left = await asyncio.to_thread(self._homes.all)
        return {**{id: BoxStatus(state=BoxState.REMAINS, labels=labels) for id, labels in left.items()}, **boxes}

    async def dial(self, id: SandboxId) -> Stream:
        return await self._dialer.dial(id)

    async def aclose(self) -> None:
        self._dialer.close()

    def memory_of(self, spec: Spec) -> int:
        return self._defaults.of(spec).memory

    def holds(self, spec: Spec) -> int | None:
        has_bound = not spec.writable_root and not volume_plan.has_data(spec)
        return self._defaults.of(spec).written if has_bound else None

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._dialer.as_user(id, user)

    async def stop(self, id: SandboxId) -> None:
        name = layout.container_name(id)
        await self._unpause(id)
        try:
            async with asyncio.timeout(_END_S), self._dialer.client(await self._dialer.find(id)) as client:
                await client.call("shutdown", {"grace_s": 0}, type=dict[str, Any])
                await self._engine.post(f"/containers/{name}/wait", query={"condition": "not-running"})
        except (AgentError, ProviderError, TimeoutError) as error:  # what does not listen is ended all the same
            log.debug("%s: sandbox %s is stopped by force: %s", self.name, id, error)
        await self._engine.post(f"/containers/{name}/stop", query={"t": "0"}, timeout_s=_REMOVE_TIMEOUT_S)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        await containers.inspect(self._engine, id)
        await asyncio.to_thread(self._homes.attach, id)
        async with self._started(id, spec) as (client, _):
            await self._dialer.set_lifetime(client, spec)

    async def pause(self, id: SandboxId) -> None:
        await self._switch(id, "pause")

    async def resume(self, id: SandboxId) -> None:
        await self._switch(id, "unpause")

    async def _switch(self, id: SandboxId, verb: str) -> None:
        wanted = verb == "pause"
        box = await containers.inspect(self._engine, id)
        check_running(box)
        if box.state.paused is not wanted:
            await self._engine.post(f"/containers/{layout.container_name(id)}/{verb}")

    def watch(self) -> AsyncIterator[BoxChange]:
        return containers.watch(self._engine)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        box = await containers.inspect(self._engine, id)
        async with self._dialer.client(box) as client:
            return await self._snapshots.take(id, name, box, self.disk_of(box), client)

    def disk_of(self, box: containers.Inspected) -> int:
        """The size of a box's disk, as its label has it; boxes that were made before there was one have the usual."""
        told = (box.config.labels or {}).get(layout.DISK_LABEL, "")
        return int(told) if told.isdecimal() else self._defaults.disk

    async def snapshots(self) -> Sequence[Snapshot]:
        return await self._snapshots.all()

    async def remove_snapshot(self, name: str) -> None:
        await self._snapshots.remove(name)

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return await self._volumes.all(sizes=sizes)

    async def remove_volume(self, name: str) -> None:
        await self._volumes.remove(name)

    async def check_builder(self) -> None:
        await self.check()

    async def build_archive(
        self, build: ImageBuild, target: Path, on_progress: OnProgress, *, most: int | None = None
    ) -> None:
        await self._images.build_archive(build, target, on_progress, most=most)

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        query = {"stdout": True, "stderr": True, "follow": follow, "tail": "all" if tail is None else str(tail)}
        frames = Demultiplexer()
        path = f"/containers/{layout.container_name(id)}/logs"
        async with self._engine.stream("GET", path, query=query) as answer:
            async for piece in answer:
                for _, data in frames.feed(memoryview(piece)):
                    yield bytes(data)

    # how they are done

    @asynccontextmanager
    async def _started(self, id: SandboxId, spec: Spec) -> AsyncIterator[tuple[AgentClient, containers.Inspected]]:
        """Start a container and talk to its agent. Raises CreateFailed with what the box said."""
        try:
            timeout_s = self._config.start_timeout_s
            await self._start_container(id, timeout_s)
            box = await self._dialer.find(id)
            async with self._dialer.started_client(id, box, spec, timeout_s) as client:
                yield client, box
        except (CreateFailed, ProviderUnavailable):
            raise
        except (AgentError, NotFound, Conflict, ProviderError) as error:
            self._agent.forget()
            log.info("%s: sandbox %s did not come up: %s", self.name, id, error)
            reason = str(error) if isinstance(error, ProviderError) else f"the agent did not come up: {error}"
            raise CreateFailed(reason, log=await self._last_words(id)) from error

    async def _unpause(self, id: SandboxId) -> None:
        """Unpause a box that is to end: what is frozen dies late, or some engines refuse to kill it."""
        try:
            await self._engine.post(f"/containers/{layout.container_name(id)}/unpause")
        except ProviderUnavailable:
            raise
        except SkerryError:
            pass  # it is not frozen, or not there

    async def _last_words(self, id: SandboxId) -> str:
        said = b""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async for piece in self.logs(id, tail=50):
                    said += piece
        except (SkerryError, TimeoutError) as error:
            log.debug("%s: what sandbox %s said is not known: %s", self.name, id, error)
        return said.decode(errors="replace")[-4096:]

    async def _data_of(self, id: SandboxId) -> list[str]:
        """The data volume of a box, by its mounts if it is there, else by its label."""
        found = {
            volume.name
            for volume in await self._volumes.all(sizes=False)
            if volume.kind == "data" and volume.sandbox == id and not volume.in_use
        }
        with suppress(NotFound):
            box = await containers.inspect(self._engine, id)
            found |= {str(m["Name"]) for m in box.mounts or [] if m.get("Destination") == layout.DATA and m.get("Name")}
        return sorted(found)

    async def _start_container(self, id: SandboxId, timeout_s: float) -> None:
        """Start it, again while a daemon that was killed as it ended has not cleared away what it ran as."""
        path = f"/containers/{layout.container_name(id)}/start"
        await self._insist(id, lambda: self._engine.post(path, timeout_s=timeout_s), on=_STILL_THERE)

    async def _remove_container(self, id: SandboxId) -> None:
        """Remove it, again if the engine fails: Podman does when a container ends by itself at that very moment."""
        path, query = f"/containers/{layout.container_name(id)}", {"force": True, "v": True}
        try:
            await self._insist(id, lambda: self._engine.delete(path, query=query, timeout_s=_REMOVE_TIMEOUT_S))
        except NotFound:
            return
        except Conflict:
            log.debug("%s: another program removes the container of sandbox %s", self.name, id)
            await self._wait_until_gone(id)

    async def _insist(self, id: SandboxId, ask: Callable[[], Awaitable[None]], *, on: str = "") -> None:
        """Ask again for a while if the engine fails in such words. Raises ProviderError."""
        waits = backoff(0.05, 0.5, _FAILING_S)
        while True:
            try:
                return await ask()
            except EngineFailed as error:
                if on not in str(error) or (delay_s := next(waits, None)) is None:
                    raise
                log.debug("%s: for sandbox %s it is asked again in %s s: %s", self.name, id, delay_s, error)
                await asyncio.sleep(delay_s)

    async def _wait_until_gone(self, id: SandboxId) -> None:
        for delay_s in backoff(0.01, 0.5, _REMOVE_TIMEOUT_S):
            if await containers.status_of(self._engine, id) is None:
                return
            await asyncio.sleep(delay_s)
        raise ProviderError(f"{self.name}: the container of box {id} is being removed, and does not go")
