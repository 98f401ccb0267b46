"""The manager of a server: the interface of the one at home, each call of which the server does."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import msgspec

from skerry import config as settings
from skerry.aio import require_asyncio
from skerry.config import Config
from skerry.errors import CallTimeout, ConfigError, InvalidSpec
from skerry.manager.decide import Verdict
from skerry.manager.images import BuildOptions
from skerry.manager.manager import ALL, AsyncSandboxManager
from skerry.manager.repair import Repair
from skerry.manager.watch import Explanation
from skerry.model.records import Cause, Event, Filter, Record
from skerry.model.spec import SandboxId, Spec, SpecOptions, new_id
from skerry.model.states import State
from skerry.model.tenants import NO_QUOTA, Quota
from skerry.providers.base import Image, OnProgress, Provider, Snapshot, Volume
from skerry.remote.api import LONG_S, TIMEOUT_S, Api, segment
from skerry.remote.fleet import AsyncRemoteFleet
from skerry.remote.handles import RemoteHandles, not_here, path_of
from skerry.remote.images import RemoteImages
from skerry.remote.ledger import RemoteLedger
from skerry.remote.records import View, is_default
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelInfo

_log = logging.getLogger("skerry.remote")
_WAIT_S = 20.0
"""Seconds of one question whether a state has come; there are as many as it takes."""
_T = TypeVar("_T")


class AsyncRemoteManager(AsyncSandboxManager):
    """Many sandboxes of a server. `async with skerry.aconnect(url, token) as manager:` is used as any manager is."""

    fleet_type = AsyncRemoteFleet

    def __init__(
        self, url: str, token: str | None = None, *, ca: str | None = None, config: Config | None = None
    ) -> None:
        """`ca` is a file of certificates that are trusted beside those of the system. Raises ConfigError."""
        self.config = config or settings.load()
        self.api = Api(url, token, ca=ca)
        self.ledger = RemoteLedger(self.config, self.api)
        self._remote_images = RemoteImages(self.api)
        self._remote_handles = RemoteHandles(self.api, self.config)

    def of_project(self, project: str, quota: Quota = NO_QUOTA) -> Self:
        raise not_here("a manager of one project")

    async def __aenter__(self) -> Self:
        require_asyncio()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of streams. Sandboxes live on, but for those that end with this program."""
        await self._remote_handles.aclose()

    # for other parts of skerry

    @property
    def store(self) -> Store:
        raise not_here("the registry")

    @property
    def handles(self) -> RemoteHandles:
        return self._remote_handles

    @property
    def repair(self) -> Repair:
        raise not_here("repair")

    @property
    def is_remote(self) -> bool:
        return True

    def provider(self, name: str) -> Provider:
        return self._remote_handles.provider(name)

    def loaded_provider(self, name: str) -> Provider | None:
        return self.provider(name)

    def set_limits(self, config: Config) -> None:
        raise not_here("its limits")

    async def providers_with(self, capability: str) -> list[str]:
        """One that stands for all: the server asks them itself."""
        return [""]

    async def default_provider(self) -> str:
        """The provider that the server takes where nothing is said."""
        found = await self.api.get("/providers", _Providers)
        return next((each.name for each in found.items if each.default), self.config.provider)

    def owns(self, volume: Volume) -> bool:
        return True

    def end_overdue(self) -> None:
        """The server does so by itself."""

    async def follow(self) -> None:
        """The server does so by itself."""
        await asyncio.Event().wait()

    # states

    async def pause(self, reference: str, *, save: bool = False) -> None:
        await self._change(reference, "pause", {"save": save}, more_s=LONG_S if save else 0.0)

    async def resume(self, reference: str) -> None:
        await self._change(reference, "resume", more_s=LONG_S)

    async def stop(self, reference: str, timeout_s: float | None = None) -> None:
        await self._change(reference, "stop", {"timeout_s": timeout_s}, more_s=timeout_s or 0.0)

    async def start(self, reference: str, env: Mapping[str, str] | None = None) -> None:
        await self._change(reference, "start", {"env": dict(env or {})}, more_s=LONG_S)

    async def _change(
        self, reference: str, verb: str, body: dict[str, Any] | None = None, *, more_s: float = 0.0
    ) -> None:
        """Change the state of a sandbox, and have its handle follow."""
        asked = {name: value for name, value in (body or {}).items() if value}
        path = f"{path_of(reference)}/{verb}"
        changed = await self.api.send("POST", path, View, asked, timeout_s=TIMEOUT_S + more_s)
        handle = self.handles.of(changed.record())
        await handle.close()

    # snapshots and volumes

    async def snapshot(self, reference: str, name: str, *, with_memory: bool = False) -> Snapshot:
        body = {"name": name, **({"with_memory": True} if with_memory else {})}
        made = self.api.send("POST", f"{path_of(reference)}/snapshots", _Snapshot, body, timeout_s=LONG_S)
        return (await made).snapshot()

    async def snapshots(self, provider: str | None = None) -> list[Snapshot]:
        found = await self.api.pages("/snapshots", _Snapshot, {"provider": provider or None})
        return [each.snapshot() for each in found]

    async def remove_snapshot(self, name: str, provider: str | None = None) -> None:
        await self.api.order("DELETE", f"/snapshots/{segment(name)}", query={"provider": provider or None})

    async def restore(self, reference: str, snapshot: str, env: Mapping[str, str] | None = None) -> AsyncSandbox:
        body = {"snapshot": snapshot, "env": dict(env or {})}
        made = await self.api.send("POST", f"{path_of(reference)}/restore", View, body, timeout_s=LONG_S)
        handle = self.handles.of(made.record())
        await handle.close()
        return handle

    async def fork(self, reference: str, *, with_memory: bool = False, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        made = await self._fork(reference, View, {"with_memory": with_memory}, options)
        return self.handles.of(made.record())

    async def fork_many(
        self, reference: str, count: int, *, with_memory: bool = False, **options: Unpack[SpecOptions]
    ) -> list[AsyncSandbox]:
        made = await self._fork(reference, _Views, {"with_memory": with_memory, "count": count}, options, "forks")
        return [self.handles.of(each.record()) for each in made.items]

    async def _fork(
        self, reference: str, kind: type[_T], how: dict[str, Any], options: SpecOptions, verb: str = "fork"
    ) -> _T:
        body = msgspec.to_builtins(dict(options), enc_hook=os.fspath) | {name: how[name] for name in how if how[name]}
        return await self.api.send("POST", f"{path_of(reference)}/{verb}", kind, body, timeout_s=LONG_S)

    async def volumes(
        self, kind: str | None = None, *, sizes: bool = False, provider: str | None = None
    ) -> list[Volume]:
        asked = {"kind": kind, "sizes": sizes, "provider": provider or None}
        return await self.api.pages("/volumes", Volume, asked)

    async def remove_volume(self, name: str, provider: str | None = None) -> None:
        await self.api.order("DELETE", f"/volumes/{segment(name)}", query={"provider": provider or None})

    # images

    @property
    def _chosen(self) -> str | None:
        """The provider that somebody has set; None leaves it to the server."""
        return None if is_default(self.config, "provider") else self.config.provider

    async def images(self, *, provider: str | None = None) -> Sequence[Image]:
        return await self._remote_images.list(provider or self._chosen)

    async def build_base_image(
        self,
        dockerfile: str | Path = "",
        *,
        provider: str | None = None,
        builder: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[BuildOptions],
    ) -> Image:
        return await self._remote_images.build(dockerfile, provider or self._chosen, builder, on_progress, options)

    async def pull_image(
        self, name: str, *, provider: str | None = None, on_progress: OnProgress | None = None
    ) -> Image:
        return await self._remote_images.pull(name, provider or self._chosen, on_progress)

    async def import_image(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        return await self._remote_images.add(Path(source), name, provider or self._chosen, on_progress)

    async def remove_image(self, name: str, *, force: bool = False, provider: str | None = None) -> None:
        await self._remote_images.remove(name, provider or self._chosen, force=force)

    async def kernels(self, *, provider: str | None = None) -> Sequence[KernelInfo]:
        return await self._remote_images.kernels(provider)

    async def fetch_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        return await self._remote_images.make_kernel("fetch", provider, on_progress)

    async def build_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        return await self._remote_images.make_kernel("build", provider, on_progress)

    async def remove_kernel(self, key: str, *, provider: str | None = None) -> None:
        await self._remote_images.remove_kernel(key, provider)

    # sandboxes

    async def create(
        self,
        spec: Spec | None = None,
        *,
        key: str | None = None,
        ephemeral: bool = False,
        id: SandboxId | None = None,
        **options: Unpack[SpecOptions],
    ) -> AsyncSandbox:
        if id is not None:
            raise InvalidSpec("id: a server gives its sandboxes their ids", field="id")
        whole = self.complete(spec, options)
        return self.handles.of(await self.handles.make(new_id(), whole, ephemeral=ephemeral, key=key))

    async def register(self, sandbox: AsyncSandbox) -> AsyncSandbox:
        raise not_here("taking in a sandbox that was made elsewhere")

    async def record(self, reference: str) -> Record:
        return await self.handles.record(reference)

    async def refresh(self, filter: Filter = ALL) -> Sequence[str]:
        """The server asks its hosts by itself."""
        return ()

    async def list(self, filter: Filter = ALL) -> list[Record]:
        asked = {
            "state": sorted(filter.states),
            "provider": filter.provider,
            "project": filter.project,
            "name": filter.name,
            "label": [f"{name}={value}" for name, value in filter.labels.items()],
            "ended": filter.include_ended,
        }
        return [view.record() for view in await self.api.pages("/sandboxes", View, asked)]

    async def count(self, filter: Filter = ALL) -> int:
        return len(await self.list(filter))

    async def destroy(
        self, reference: str, *, volumes: bool = False, cause: Cause = Cause.USER, grace_s: float | None = None
    ) -> None:
        await self.handles.destroy(reference, volumes=volumes, cause=cause, grace_s=grace_s)

    async def explain(self, reference: str) -> Explanation:
        return await self.api.get(f"{path_of(reference)}/explain", Explanation)

    async def wait(self, reference: str, states: set[State] | None = None, timeout_s: float | None = None) -> Record:
        id = (await self.record(reference)).id
        async with asyncio.timeout(timeout_s):
            while True:
                body = {"states": sorted(states or ()), "timeout_s": _WAIT_S}
                asked = self.api.send("POST", f"{path_of(id)}/wait", View, body, timeout_s=_WAIT_S + TIMEOUT_S)
                try:
                    return (await asked).record()
                except CallTimeout as error:
                    _log.debug("wait on: %s", error)

    async def look_after(self, reference: str) -> Record:
        return await self.handles.look((await self.record(reference)).id)

    async def events(self, *, after: int = 0, follow: bool = False, sandbox: str | None = None) -> AsyncIterator[Event]:
        """Events of the server's registry. A stream that breaks is opened again where it was."""
        id = None if sandbox is None else (await self.record(sandbox)).id
        asked = {"after": after, "sandbox": id, "follow": follow}
        told = self.api.follow("/events", asked) if follow else self.api.events("/events", asked)
        async with aclosing(told) as events:
            async for each in events:
                yield each.read(Event)

    async def logs(self, reference: str, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        async with self.api.stream(f"{path_of(reference)}/logs", {"follow": follow, "tail": tail}) as answer:
            async for chunk in answer:
                yield chunk

    async def prune(self, *, older_s: float = 86400.0) -> int:
        return (await self.api.send("POST", "/prune", _Pruned, {"older_s": older_s})).records

    async def reconcile(self, *, dry_run: bool = False, rebuild: bool = False) -> Sequence[Verdict]:
        body = {"dry_run": dry_run, "rebuild": rebuild}
        return (await self.api.send("POST", "/reconcile", _Verdicts, body, timeout_s=LONG_S)).items


class _Pruned(msgspec.Struct):
    records: int


class _Snapshot(msgspec.Struct):
    """A snapshot as a server shows it; the provider's own id of it is not told."""

    name: str
    sandbox: str
    size: int
    created_at: float
    memory: bool = False

    def snapshot(self) -> Snapshot:
        return Snapshot(id="", **msgspec.structs.asdict(self))


class _Views(msgspec.Struct):
    items: list[View]


class _Provider(msgspec.Struct):
    name: str
    default: bool = False


class _Providers(msgspec.Struct):
    items: list[_Provider]


class _Verdicts(msgspec.Struct):
    items: list[Verdict]


def aconnect(url: str | None = None, token: str | None = None, *, ca: str | None = None) -> AsyncRemoteManager:
    """The manager of a server, to be entered with `async with`: at `https://host`, `http://host:port` or
    `unix:///path`. What is not given is as the configuration says (SKERRY_URL, SKERRY_TOKEN, `skerry context`). Raises
    ConfigError."""
    config = settings.load()
    url = url or config.url
    if not url:
        raise ConfigError("url: say which server: connect(url), SKERRY_URL, or `skerry context use NAME`")
    if url == config.url:
        token, ca = token or config.token or None, ca or config.ca or None
    return AsyncRemoteManager(url, token, ca=ca, config=config)
