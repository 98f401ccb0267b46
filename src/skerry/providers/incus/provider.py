"""Boxes as system containers of Incus: any image, on one host or a cluster, found again after any restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import Any, NoReturn

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.errors import (
    AgentError,
    CreateFailed,
    LimitReached,
    NotFound,
    ProviderError,
    ProviderUnavailable,
    SkerryError,
)
from skerry.providers import layout
from skerry.providers.base import (
    BoxChange,
    BoxStatus,
    Capability,
    Enforcement,
    Isolation,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.image_verbs import ImageVerbs
from skerry.providers.incus import instances, logs, profile, watching
from skerry.providers.incus.api import FIX, PROVIDER, Api
from skerry.providers.incus.creation import Creator
from skerry.providers.incus.images import Images
from skerry.providers.incus.info import Info, look
from skerry.providers.incus.networks import Networks
from skerry.providers.incus.reach import Reach
from skerry.providers.incus.refusals import AsItWas, Busy, StillRunning
from skerry.providers.incus.runtime import Runtime
from skerry.providers.incus.settings import IncusConfig
from skerry.providers.incus.snapshots import Snapshots
from skerry.providers.incus.volumes import Volumes
from skerry.spec import SandboxId, Spec

_CHECK_S = 5.0
_GRACE_S = 5.0
"""How long the processes of a box that is stopped have to end."""
_REMOVE_TIMEOUT_S = 60.0
_LOOK_S = 0.01


class Incus(ImageVerbs, Provider):
    name = PROVIDER
    isolation = Isolation.CONTAINER
    capabilities = frozenset(Capability)
    honours = frozenset({"image", "target", "group", "writable_root", "data", "cache", "cache_paths", "snapshot"})
    Config = IncusConfig

    def __init__(self, config: IncusConfig | None = None) -> None:
        self._config = config or IncusConfig()
        self._defaults = self._config.limits(self.name)
        self._api = Api(self._config)
        self._runtime = Runtime(self._api, self._config.cache())
        self._reach = Reach(self._api, self._runtime)
        self._volumes = Volumes(self._api)
        self._snapshots = Snapshots(self._api)
        networks = Networks(self._api, self._config.network)
        self._creator = Creator(
            self._api, self._runtime, self._volumes, self._snapshots, networks, self._config.start_timeout_s
        )
        self._known_info: Info | None = None

    async def _info(self) -> Info:
        if self._known_info is None:
            self._known_info = await look(self._api, self._config.pool)
        return self._known_info

    @cached_property
    def _images(self) -> Images:
        return Images(self._api)

    # the five verbs

    async def check(self) -> None:
        self._known_info = None
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._info()
        except TimeoutError:
            reason = f"its daemon at {self._api.address} did not answer within {_CHECK_S:g} s"
            raise ProviderUnavailable(self.name, reason, fix=FIX) from None

    async def describe(self) -> Mapping[str, Enforcement]:
        info = await self._info()
        held = info.enforcement(Spec(provider=self.name), self._defaults)
        return {"daemon": Enforcement(by=info.place()), **held}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._creator.check(spec)
        held = (await self._info()).enforcement(spec, self._defaults.of(spec))
        return {**held, **await self._creator.origin(spec)}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        info = await self._info()
        try:
            await self._creator.make(id, spec, self._defaults.of(spec), info)
        except ProviderError as error:
            await self._fail(id, error)
        async with self._answering(id, spec, info):
            pass

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._reach.forget(id)
        pool = (await self._info()).pool
        owned = await self._data_of(id, pool) if volumes else []
        await self._remove(id)
        for volume, member in owned:
            await self._volumes.drop(pool, volume, member)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return await instances.all_boxes(self._api)

    async def dial(self, id: SandboxId) -> Stream:
        return await self._reach.dial(id, await self._info())

    async def aclose(self) -> None:
        self._reach.close()

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._reach.as_user(id, user)

    async def stop(self, id: SandboxId) -> None:
        with suppress(AgentError, ProviderError):  # what does not listen is ended all the same
            async with self._reach.client(id, await self._info()) as client:
                await client.call("shutdown", {"grace_s": _GRACE_S}, type=dict[str, Any])
                end = time.monotonic() + _GRACE_S + 2
                while time.monotonic() < end:  # until its end breaks the stream
                    await client.call("ping", type=dict[str, Any], timeout_s=_GRACE_S)
                    await asyncio.sleep(_LOOK_S)
        with suppress(LimitReached):  # a full disk keeps Incus from writing to it, and the box has ended before that
            await self._switch(id, "stop", force=True)
        await self._until_stopped(id)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        info = await self._info()
        try:
            await self._start(id)
        except ProviderError as error:
            await self._fail(id, error)
        async with self._answering(id, spec, info) as client:
            params = {"lifetime_s": spec.lifetime_s or None, "idle_s": spec.idle_s or None}
            await client.call("set_lifetime", params, type=dict[str, Any])

    async def pause(self, id: SandboxId) -> None:
        await self._switch(id, "freeze")

    async def resume(self, id: SandboxId) -> None:
        await self._switch(id, "unfreeze")

    async def _start(self, id: SandboxId) -> None:
        """Incus writes to the disk of what it starts: one that is full is given the room that was kept for this."""
        try:
            await self._switch(id, "start")
        except ProviderUnavailable:
            raise
        except (LimitReached, ProviderError) as error:
            try:
                await self._api.do("DELETE", f"{instances.path(id)}/files", query={"path": profile.RESERVE})
            except (NotFound, ProviderError):  # none was kept, or the box put something else there
                raise error from None
            await self._switch(id, "start")

    async def _switch(self, id: SandboxId, action: str, *, force: bool = False) -> None:
        """Change a box's state; quiet if it is in that one."""
        end = time.monotonic() + _REMOVE_TIMEOUT_S
        while True:
            json = {"action": action, "force": force, "timeout": int(self._config.start_timeout_s)}
            try:
                await self._api.do(
                    "PUT", f"{instances.path(id)}/state", json=json, timeout_s=self._config.start_timeout_s
                )
            except NotFound:
                raise NotFound(f"there is no box {id}") from None
            except AsItWas:
                return
            except Busy:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                return

    def watch(self) -> AsyncIterator[BoxChange]:
        return watching.watch(self._api)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        return await self._snapshots.take(id, name)

    async def snapshots(self) -> Sequence[Snapshot]:
        return await self._snapshots.all()

    async def remove_snapshot(self, name: str) -> None:
        await self._snapshots.remove(name)

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return await self._volumes.all((await self._info()).pool, sizes=sizes)

    async def remove_volume(self, name: str) -> None:
        await self._volumes.remove((await self._info()).pool, name)

    def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        return logs.read(self._api, id, follow=follow, tail=tail)

    # how they are done

    @asynccontextmanager
    async def _answering(self, id: SandboxId, spec: Spec, info: Info) -> AsyncIterator[AgentClient]:
        """Talk to the agent of a box that was just started; if nothing comes of it, what the box said is told."""
        try:
            async with self._reach.first_client(id, info, self._config.start_timeout_s) as client:
                if spec.env:
                    await client.call("set_env", {"env": spec.env}, type=dict[str, Any])
                yield client
        except (AgentError, NotFound) as error:
            await self._fail(id, error)

    async def _fail(self, id: SandboxId, error: SkerryError) -> NoReturn:
        """Raise it, with what the box said where it is the box that failed."""
        if isinstance(error, ProviderUnavailable):
            raise error
        self._runtime.forget()
        log = await logs.last_words(self._api, id)
        raise CreateFailed(f"the box did not come up: {error}", log=log) from error

    async def _data_of(self, id: SandboxId, pool: str) -> list[tuple[str, str]]:
        """The data volume of a box and its member, by its devices if it is there, else by its label."""
        try:
            box = await instances.inspect(self._api, id)
        except NotFound:
            return await self._volumes.data_of(pool, id)
        return [(each["source"], box.location) for each in box.devices.values() if each.get("path") == layout.DATA]

    async def _until_stopped(self, id: SandboxId) -> None:
        """Of a container that has ended by itself Incus says at once that it is stopped, and lists it as running for
        a while."""
        end = time.monotonic() + _REMOVE_TIMEOUT_S
        while True:
            if not (await instances.inspect(self._api, id)).is_running:
                return
            if time.monotonic() > end:
                raise ProviderError(f"{self.name}: box {id} does not stop")
            await asyncio.sleep(_LOOK_S)

    async def _remove(self, id: SandboxId) -> None:
        """However much there is of it, and whoever else is at the same."""
        end = time.monotonic() + _REMOVE_TIMEOUT_S
        force = {"action": "stop", "force": True, "timeout": int(_REMOVE_TIMEOUT_S)}
        while time.monotonic() < end:
            try:
                with suppress(AsItWas, LimitReached):  # as in `stop`
                    await self._api.do("PUT", f"{instances.path(id)}/state", json=force, timeout_s=_REMOVE_TIMEOUT_S)
                await self._api.do("DELETE", instances.path(id), timeout_s=_REMOVE_TIMEOUT_S)
            except NotFound:
                return
            except (Busy, StillRunning):
                await asyncio.sleep(_LOOK_S)
            else:
                return
        raise ProviderError(f"{self.name}: box {id} does not go")
