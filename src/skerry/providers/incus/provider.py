"""Boxes as system containers of Incus: any image, on one host or a cluster, found again after any restart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import Any, NoReturn

from skerry.agent.client import AgentClient
from skerry.aio import backoff
from skerry.errors import (
    AgentError,
    CreateFailed,
    LimitReached,
    NotFound,
    ProviderError,
    ProviderUnavailable,
    UserNotFound,
)
from skerry.model.spec import SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers.base import (
    BoxChange,
    BoxStatus,
    Capability,
    Enforcement,
    ImageVerbs,
    Isolation,
    Provider,
    Snapshot,
    Volume,
    log,
)
from skerry.providers.incus import instances, profile
from skerry.providers.incus.api import FIX, PROVIDER, AsItWas, Busy, IncusApi, IncusConfig, StillRunning
from skerry.providers.incus.creation import IncusCreator
from skerry.providers.incus.dialer import IncusDialer
from skerry.providers.incus.images import IncusImages, IncusSnapshots
from skerry.providers.incus.info import ADMIN, IncusInfo, look
from skerry.providers.incus.volumes import IncusAgentVolume, IncusVolumes
from skerry.providers.shared import volume_plan
from skerry.providers.shared.loopback import BY_RULES

_CHECK_S = 5.0
_END_S = 2.0
"""How long an agent may take to end its box. Whoever stops a box has given its processes time to end before."""
_REMOVE_TIMEOUT_S = 60.0
_LOOK_S = 0.01
_NO_USER = re.compile(r"(no user is called|the box has no user) .*")
"""Last words of the agent's first process."""


class Incus(ImageVerbs, Provider):
    name = PROVIDER
    isolation = Isolation.CONTAINER
    capabilities = frozenset(Capability) - {Capability.MEMORY}
    honours = frozenset(
        {"image", "target", "group", "writable_root", "admin", "data", "cache", "cache_paths", "snapshot"}
    )
    needs_builder = needs_image = True
    Config = IncusConfig

    def __init__(self, config: IncusConfig | None = None) -> None:
        self._config = config or IncusConfig()
        self._defaults = self._config.limits(self.name)
        self._api = IncusApi(self._config)
        self._agent = IncusAgentVolume(self._api, self._config.cache())
        self._dialer = IncusDialer(self._api, self._agent, self._info)
        self._volumes = IncusVolumes(self._api)
        self._snapshots = IncusSnapshots(self._api, self._defaults.disk)
        self._creator = IncusCreator(self._api, self._config, self._agent, self._volumes, self._snapshots)
        self._known_info: IncusInfo | None = None

    async def _info(self) -> IncusInfo:
        if self._known_info is None:
            self._known_info = await look(self._api, self._config.pool)
            self.takes_memory_here = self._known_info.is_local
        return self._known_info

    @cached_property
    def _images(self) -> IncusImages:
        return IncusImages(self._api)

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
        return {"daemon": Enforcement(by=info.place()), **held, "rules": Enforcement(by=BY_RULES), "admin": ADMIN}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._creator.check(spec)
        held = (await self._info()).enforcement(spec, self._defaults.of(spec))
        await self._creator.check_network(spec)
        return {**held, **await self._creator.origin(spec)}

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        info, limits = await self._info(), self._defaults.of(spec)
        try:
            await self._creator.make(id, spec, limits, info)
            async with self._answering(id, spec):
                pid = await self._dialer.pid(id) if info.is_local else None
                return limits.read_back(pid, info.enforcement(spec, limits))
        except ProviderError as error:
            await self._fail(id, error)

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._dialer.forget(id)
        pool = (await self._info()).pool
        owned = await self._volumes.data_of(pool, id) if volumes else []
        await self._remove(id)
        for volume, member in owned:
            await self._volumes.drop(pool, volume, member)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        boxes, info = await instances.all_boxes(self._api), await self._info()
        if not info.is_local or info.is_confined:
            await self._agent.sweep(info.pool)
        return boxes

    async def dial(self, id: SandboxId) -> Stream:
        return await self._dialer.dial(id)

    async def aclose(self) -> None:
        self._dialer.close()

    def memory_of(self, spec: Spec) -> int:
        return self._defaults.of(spec).memory

    def holds(self, spec: Spec) -> int | None:
        limits = self._defaults.of(spec)
        return limits.written + (limits.disk if volume_plan.has_data(spec) else 0)

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._dialer.as_user(id, user)

    async def stop(self, id: SandboxId) -> None:
        try:
            async with asyncio.timeout(_END_S), self._dialer.client(id) as client:
                await client.call("shutdown", {"grace_s": 0}, type=dict[str, Any])
                while True:  # until its end breaks the stream
                    await client.call("ping", type=dict[str, Any])
                    await asyncio.sleep(_LOOK_S)
        except (AgentError, ProviderError, TimeoutError) as error:  # as it ends; what does not listen is ended too
            log.debug("%s: the agent of sandbox %s does not answer any more: %s", self.name, id, error)
        try:
            await self._switch(id, "stop", force=True)
        except LimitReached as error:  # a full disk keeps Incus from writing to it, and the box has ended before that
            log.debug("%s: sandbox %s is stopped with a full disk: %s", self.name, id, error)
        await self._until_stopped(id)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        try:
            await self._start(id)
        except ProviderError as error:
            await self._fail(id, error)
        async with self._answering(id, spec) as client:
            await self._dialer.set_lifetime(client, spec)

    async def pause(self, id: SandboxId) -> None:
        await self._switch(id, "freeze")

    async def resume(self, id: SandboxId) -> None:
        await self._switch(id, "unfreeze")

    async def _start(self, id: SandboxId) -> None:
        """Start a box; Incus writes to its disk, so one that is full gets the room that was kept for this."""
        try:
            await self._switch(id, "start")
        except ProviderUnavailable:
            raise
        except (LimitReached, ProviderError) as error:
            try:
                await self._api.do("DELETE", f"{instances.path(id)}/files", query={"path": profile.RESERVE})
            except (NotFound, ProviderError):  # none was kept, or the box put something else there
                raise error from None
            log.info("%s: sandbox %s is started with the room that was kept on its disk", self.name, id)
            await self._switch(id, "start")

    async def _switch(self, id: SandboxId, action: str, *, force: bool = False) -> None:
        """Change a box's state; quiet if it is in that one."""
        timeout_s = self._config.start_timeout_s
        json = {"action": action, "force": force, "timeout": int(timeout_s)}
        busy: Busy | None = None
        for delay_s in backoff(_LOOK_S, _LOOK_S, _REMOVE_TIMEOUT_S):
            try:
                await self._api.do("PUT", f"{instances.path(id)}/state", json=json, timeout_s=timeout_s)
                return
            except NotFound:
                raise NotFound(f"there is no box {id}") from None
            except AsItWas:
                return
            except Busy as error:
                busy = error
                log.debug("%s: %s of sandbox %s is tried again: %s", self.name, action, id, error)
            await asyncio.sleep(delay_s)
        raise busy or ProviderError(f"{self.name}: box {id} stays busy")

    def watch(self) -> AsyncIterator[BoxChange]:
        return instances.watch(self._api)

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
        return instances.read_console(self._api, id, follow=follow, tail=tail)

    # how they are done

    @asynccontextmanager
    async def _answering(self, id: SandboxId, spec: Spec) -> AsyncIterator[AgentClient]:
        """Talk to the agent of a box that was just started. Raises CreateFailed with what the box said."""
        try:
            async with self._dialer.started_client(id, id, spec, self._config.start_timeout_s) as client:
                yield client
        except (AgentError, NotFound) as error:
            await self._fail(id, error)

    async def _fail(self, id: SandboxId, error: AgentError | NotFound | ProviderError) -> NoReturn:
        """Raise it, with what the box said where it is the box that failed. Raises UserNotFound too."""
        if isinstance(error, ProviderUnavailable):
            raise error
        log.info("%s: sandbox %s did not come up: %s", self.name, id, error)
        self._agent.forget()
        said = await instances.last_words(self._api, id)
        if no_user := _NO_USER.search(said):
            raise UserNotFound(f"user: {no_user[0]}") from error
        raise CreateFailed(f"the box did not come up: {error}", log=said) from error

    async def _until_stopped(self, id: SandboxId) -> None:
        """Wait for the end: Incus lists a container that has ended by itself as running for a while."""
        for delay_s in backoff(_LOOK_S, _LOOK_S, _REMOVE_TIMEOUT_S):
            if not (await instances.inspect(self._api, id)).is_running:
                return
            await asyncio.sleep(delay_s)
        raise ProviderError(f"{self.name}: box {id} does not stop")

    async def _remove(self, id: SandboxId) -> None:
        """Remove however much there is of it, whoever else does the same."""
        force = {"action": "stop", "force": True, "timeout": int(_REMOVE_TIMEOUT_S)}
        for delay_s in backoff(_LOOK_S, _LOOK_S, _REMOVE_TIMEOUT_S):
            try:
                with suppress(AsItWas, LimitReached):  # as in `stop`
                    await self._api.do("PUT", f"{instances.path(id)}/state", json=force, timeout_s=_REMOVE_TIMEOUT_S)
                await self._api.do("DELETE", instances.path(id), timeout_s=_REMOVE_TIMEOUT_S)
                return
            except NotFound:
                return
            except (Busy, StillRunning) as error:
                log.debug("%s: the removal of sandbox %s is tried again: %s", self.name, id, error)
            await asyncio.sleep(delay_s)
        raise ProviderError(f"{self.name}: box {id} does not go")
