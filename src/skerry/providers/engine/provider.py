"""Boxes as containers of an engine that speaks Docker's API: any image, found again after any restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.errors import (
    AgentError,
    Conflict,
    CreateFailed,
    NotFound,
    ProviderError,
    ProviderUnavailable,
    SkerryError,
    Unsupported,
)
from skerry.providers import layout
from skerry.providers.base import (
    BoxChange,
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    Isolation,
    OnProgress,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.engine import states, way
from skerry.providers.engine.api import Engine
from skerry.providers.engine.habits import Habits
from skerry.providers.engine.reach import Reach, check_running
from skerry.providers.engine.runtime import Runtime
from skerry.providers.engine.settings import EngineConfig
from skerry.providers.image_verbs import ImageVerbs
from skerry.spec import SandboxId, Spec

if TYPE_CHECKING:
    from skerry.providers.engine.creation import Creator
    from skerry.providers.engine.homes import Homes
    from skerry.providers.engine.images import Images
    from skerry.providers.engine.info import Info
    from skerry.providers.engine.snapshots import Snapshots
    from skerry.providers.engine.volumes import Volumes

_CHECK_S = 5.0
_GRACE_S = 5.0
"""How long the processes of a box that is stopped have to end."""
_REMOVE_TIMEOUT_S = 60.0
_LOG_TAIL = 50


class EngineProvider(ImageVerbs, Provider):
    isolation = Isolation.CONTAINER
    capabilities = frozenset(Capability)
    honours = frozenset({"image", "runtime", "writable_root", "data", "cache", "cache_paths", "snapshot"})
    fix: ClassVar[str]
    """What to do when the daemon does not answer."""
    habits: ClassVar[Habits] = Habits()

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._defaults = config.limits(self.name)
        self._engine = Engine(
            config.host or self.default_host(), provider=self.name, fix=self.fix, timeout_s=config.timeout_s
        )
        self._cache, self._state_dir = config.cache(), config.state(self.name)
        self._runtime = Runtime(self._engine, self._cache)
        self._reach = Reach(self._engine, self._runtime, may_be_here=self.habits.may_be_here)
        self._known_info: Info | None = None

    # Imported when they are needed: a command line that only dials a box needs none of them.

    @cached_property
    def _homes(self) -> Homes:
        from skerry.providers.engine.homes import Homes

        return Homes(self._state_dir, self._cache)

    @cached_property
    def _volumes(self) -> Volumes:
        from skerry.providers.engine.volumes import Volumes

        return Volumes(self._engine)

    @cached_property
    def _images(self) -> Images:
        from skerry.providers.engine.images import Images

        return Images(self._engine)

    @cached_property
    def _snapshots(self) -> Snapshots:
        from skerry.providers.engine.snapshots import Snapshots

        return Snapshots(self._engine, self._cache)

    @cached_property
    def _creator(self) -> Creator:
        from skerry.providers.engine.creation import Creator

        seccomp_file = self._state_dir / "seccomp.json"
        return Creator(self._engine, self._runtime, self._volumes, self._homes, self.habits, seccomp_file)

    def default_host(self) -> str:
        raise NotImplementedError("an engine without a default address must be told one")

    async def _info(self) -> Info:
        if self._known_info is None:
            from skerry.providers.engine.info import Info

            info = await self._engine.get("/info", Info)
            info.check(self.name)
            info.elsewhere = not self.habits.may_be_here
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
        held = info.enforcement(Spec(provider=self.name), self._config.runtime or None, self._defaults, self.habits)
        chosen = info.runtimes_there() if self.habits.chooses_runtime else {}
        return {"daemon": Enforcement(by=info.place(self._engine.address)), **held, **chosen}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._creator.check(spec)
        info, runtime = await self._creator.place(await self._info()), self._runtime_of(spec)
        if runtime is not None and not self.habits.chooses_runtime:
            raise Unsupported("runtime", self.name, "its API runs all boxes with the service's own; set it there")
        info.check_runtime(self.name, runtime)
        held = info.enforcement(spec, runtime, self._defaults.of(spec), self.habits)
        return {**held, **await self._creator.origin(spec, info)}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        limits, info = self._defaults.of(spec), await self._info()
        image = await self._creator.make(id, spec, limits, self._runtime_of(spec), info)
        async with self._started(id, spec) as client:
            if spec.snapshot is not None:
                await self._snapshots.unfold(image, client)

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        name = layout.container_name(id)
        self._reach.forget(id)
        owned = await self._data_of(id) if volumes else []
        await self._let_go_on(id)
        try:
            await self._engine.delete(
                f"/containers/{name}", query={"force": True, "v": True}, timeout_s=_REMOVE_TIMEOUT_S
            )
        except NotFound:
            pass
        except Conflict:  # another is at it already
            await self._wait_until_gone(id)
        await asyncio.to_thread(self._homes.remove, id)
        for volume in owned:
            with suppress(NotFound):
                await self._engine.delete(f"/volumes/{volume}")

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        from skerry.providers.engine import scratch

        boxes = await states.all_boxes(self._engine)
        await scratch.sweep(self._engine)
        left = await asyncio.to_thread(self._homes.all)
        return {**{id: BoxStatus(state=BoxState.REMAINS, labels=labels) for id, labels in left.items()}, **boxes}

    async def dial(self, id: SandboxId) -> Stream:
        return await self._reach.dial(id)

    async def aclose(self) -> None:
        self._reach.close()

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._reach.as_user(id, user)

    async def stop(self, id: SandboxId) -> None:
        name = layout.container_name(id)
        await self._let_go_on(id)
        with suppress(AgentError, ProviderError):  # what does not listen is ended all the same
            async with self._reach.client(await states.inspect(self._engine, id)) as client:
                await client.call("shutdown", {"grace_s": _GRACE_S}, type=dict[str, Any])
                query = {"condition": "not-running"}
                await self._engine.post(f"/containers/{name}/wait", query=query, timeout_s=_GRACE_S + 2)
        await self._engine.post(f"/containers/{name}/stop", query={"t": "0"}, timeout_s=_REMOVE_TIMEOUT_S)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        await states.inspect(self._engine, id)
        await asyncio.to_thread(self._homes.attach, id)
        async with self._started(id, spec) as client:
            params = {"lifetime_s": spec.lifetime_s or None, "idle_s": spec.idle_s or None}
            await client.call("set_lifetime", params, type=dict[str, Any])

    async def pause(self, id: SandboxId) -> None:
        await self._switch(id, "pause")

    async def resume(self, id: SandboxId) -> None:
        await self._switch(id, "unpause")

    async def _switch(self, id: SandboxId, verb: str) -> None:
        wanted = verb == "pause"
        box = await states.inspect(self._engine, id)
        check_running(box)
        if box.state.paused is not wanted:
            await self._engine.post(f"/containers/{layout.container_name(id)}/{verb}")

    def watch(self) -> AsyncIterator[BoxChange]:
        from skerry.providers.engine import watching

        return watching.watch(self._engine)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        box = await states.inspect(self._engine, id)
        async with self._reach.client(box) as client:
            return await self._snapshots.take(id, name, box, client)

    async def snapshots(self) -> Sequence[Snapshot]:
        return await self._snapshots.all()

    async def remove_snapshot(self, name: str) -> None:
        await self._snapshots.remove(name)

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return await self._volumes.all(sizes=sizes)

    async def remove_volume(self, name: str) -> None:
        await self._volumes.remove(name)

    async def export_image(self, name: str, target: Path, on_progress: OnProgress) -> None:
        await self._images.export_image(name, target, on_progress)

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        query = {"stdout": True, "stderr": True, "follow": follow, "tail": "all" if tail is None else str(tail)}
        frames = way.Demultiplexer()
        path = f"/containers/{layout.container_name(id)}/logs"
        async with self._engine.stream("GET", path, query=query) as answer:
            async for piece in answer:
                for _, data in frames.feed(memoryview(piece)):
                    yield bytes(data)

    # how they are done

    @asynccontextmanager
    async def _started(self, id: SandboxId, spec: Spec) -> AsyncIterator[AgentClient]:
        """Start a container and talk to its agent; if nothing comes of it, what the box said is told."""
        try:
            await self._engine.post(
                f"/containers/{layout.container_name(id)}/start", timeout_s=self._config.start_timeout_s
            )
            async with self._reach.first_client(id, self._config.start_timeout_s) as client:
                if spec.env:
                    await client.call("set_env", {"env": spec.env}, type=dict[str, Any])
                yield client
        except (AgentError, NotFound, Conflict) as error:
            self._runtime.forget()
            raise CreateFailed(f"the agent did not come up: {error}", log=await self._last_words(id)) from error
        except ProviderError as error:
            if isinstance(error, CreateFailed) or "unavailable" in error.code:
                raise
            self._runtime.forget()
            raise CreateFailed(str(error), log=await self._last_words(id)) from error

    async def _let_go_on(self, id: SandboxId) -> None:
        """What is frozen does not die, until some engines lose their patience, or refuse."""
        try:
            await self._engine.post(f"/containers/{layout.container_name(id)}/unpause")
        except ProviderUnavailable:
            raise
        except SkerryError:
            pass  # it is not frozen, or not there

    async def _last_words(self, id: SandboxId) -> str:
        said = b""
        with suppress(SkerryError, TimeoutError):
            async with asyncio.timeout(self._config.timeout_s):
                async for piece in self.logs(id, tail=_LOG_TAIL):
                    said += piece
        return said.decode(errors="replace")[-4096:]

    async def _data_of(self, id: SandboxId) -> list[str]:
        """The data volume of a box, by its mounts if it is there, else by its label."""
        found = {
            volume.name
            for volume in await self._volumes.all(sizes=False)
            if volume.kind == "data" and volume.sandbox == id and not volume.in_use
        }
        with suppress(NotFound):
            box = await states.inspect(self._engine, id)
            found |= {str(m["Name"]) for m in box.mounts or [] if m.get("Destination") == layout.DATA and m.get("Name")}
        return sorted(found)

    async def _wait_until_gone(self, id: SandboxId) -> None:
        delay_s, end = 0.01, time.monotonic() + _REMOVE_TIMEOUT_S
        while await states.status_of(self._engine, id) is not None:
            if time.monotonic() > end:
                raise ProviderError(f"{self.name}: the container of box {id} is being removed, and does not go")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 0.5)
