"""Volumes by E2B's control plane: folders that outlive sandboxes, by names, and are mounted where a sandbox wants them.

Each is a volume of its project at the provider of the template `base`; the provider makes it when it is first mounted.
"""

from __future__ import annotations

import asyncio
import hmac
import posixpath
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute

from skerry import providers
from skerry.aio import run_to_end
from skerry.errors import Conflict, InvalidSpec, LimitReached, NotFound, Unsupported
from skerry.model.spec import SpecOptions, new_id
from skerry.model.templates import BASE, Template
from skerry.model.tenants import Scope
from skerry.sandbox.files import AsyncFiles
from skerry.sandbox.users import account
from skerry.store.documents import Document
from skerry.surfaces.e2b import names
from skerry.surfaces.e2b.answers import answer
from skerry.surfaces.e2b.kept import every
from skerry.surfaces.e2b.route import Call, Surface, route
from skerry.surfaces.e2b.wire import VolumeMount

if TYPE_CHECKING:
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.surfaces.e2b.box import Boxes
    from skerry.surfaces.server.server import Server

KIND = "e2b-volume"
PLACE = "/.volume"
"""Where a volume is in the sandbox through which its files are read and written."""
_MOST = 1000
_MOST_AT_ONCE = 8
"""Calls about files that one tenant may have under way; more of them wait, so long at most."""
_TURN_S = 60.0
_CONTENT_S = 3600.0
"""Seconds that a call about a volume's files may take: a whole upload, too."""


class KeptVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume, by its id."""

    name: str
    provider: str
    at: float = msgspec.field(default_factory=time.time)


class NewVolume(msgspec.Struct, frozen=True):
    name: str


class Volumes:
    """All volumes, and the way to what is in them."""

    def __init__(self, server: Server, boxes: Boxes) -> None:
        self._documents = server.manager.store.documents(KIND, KeptVolume)
        self._server = server
        self._boxes = boxes
        self._naming = asyncio.Lock()
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_MOST_AT_ONCE))

    async def of(self, call: Call) -> list[Document[KeptVolume]]:
        """All that somebody may see, the oldest first."""
        tenant = call.principal.tenant
        found = [each for each in await every(self._documents) if tenant in (None, each.project)]
        return sorted(found, key=lambda each: (each.body.at, each.id))

    async def get(self, id: str, call: Call) -> Document[KeptVolume]:
        """Raises NotFound, also for another tenant's."""
        for each in await self.of(call):
            if each.id == id:
                return each
        raise NotFound(f"volume {id[:100]!r} was not found")

    async def make(self, name: str, call: Call) -> Document[KeptVolume]:
        """Make one. Raises InvalidSpec for a name that is none, Conflict for one that is taken, LimitReached, and
        Unsupported where the provider has no such volumes."""
        if not names.is_plain(name):
            raise InvalidSpec("name: letters, digits, '-', '_' and '.', at most 128", field="name")
        provider = self._provider()
        loaded = call.manager.loaded_provider(provider)
        if "cache_paths" not in (loaded or providers.provider_class(provider)).honours:
            reason = "it has no volumes that several sandboxes can mount; docker, podman, incus and vmdocker do"
            raise Unsupported("volumes", provider, reason)
        async with self._naming:
            mine = [each for each in await self.of(call) if each.project == call.project]
            if any(each.body.name == name for each in mine):
                raise Conflict(f"there is a volume {name!r} already")
            if len(mine) >= _MOST:
                raise LimitReached(f"there are {_MOST} volumes: remove some")
            kept = KeptVolume(name=name, provider=provider)
            return await self._documents.add(uuid.uuid4().hex[:20], kept, project=call.project)

    async def remove(self, document: Document[KeptVolume]) -> None:
        """Remove one and all that is in it. Raises Conflict while a sandbox has it."""
        manager = await self._boxes.manager_of(document.project)
        for each in await manager.volumes("own", provider=document.body.provider):
            if each.label == _label(document.id) and manager.owns(each):
                await manager.remove_volume(each.name, document.body.provider)
        await self._documents.remove(document.id)

    async def mounted(self, mounts: Sequence[VolumeMount], provider: str, call: Call) -> SpecOptions:
        """What a sandbox asks for that has them. Raises NotFound for one that is not theirs, and InvalidSpec."""
        mine = {each.body.name: each for each in reversed(await self.of(call)) if each.project == call.project}
        paths: dict[str, str] = {}
        for mount in mounts:
            document = mine.get(mount.name)
            if document is None:
                raise NotFound(f"volume {mount.name[:100]!r} was not found")
            if document.body.provider != provider:
                reason = f"it is one of {document.body.provider}, and this template's sandboxes are of {provider}"
                raise InvalidSpec(f"volumeMounts: {mount.name}: {reason}", field="volumeMounts")
            if _label(document.id) in paths:
                raise InvalidSpec(f"volumeMounts: {mount.name}: it is mounted twice", field="volumeMounts")
            paths[_label(document.id)] = posixpath.normpath(mount.path)
        if len(set(paths.values())) < len(paths):
            raise InvalidSpec("volumeMounts: two are to be at one path", field="volumeMounts")
        return {"cache": "own", "cache_paths": paths}

    async def token(self, id: str) -> str:
        """What calls about a volume's files must show."""
        await self._boxes.keys.open()
        return self._boxes.keys.derive("volume", id)

    async def shown(self, id: str, token: str) -> Document[KeptVolume]:
        """A volume whose token somebody shows. Raises NotFound for what is none, and for another token alike."""
        if hmac.compare_digest((await self.token(id)).encode(), token.encode()):
            return await self._documents.get(id)
        raise NotFound(f"volume {id[:100]!r} was not found")

    @asynccontextmanager
    async def files(self, document: Document[KeptVolume]) -> AsyncIterator[AsyncFiles]:
        """The files of a sandbox that lives as long as this, has the volume at PLACE and reaches nothing: links in a
        volume lead to no more than what is in that. Raises LimitReached, and InvalidSpec if `base` is another
        provider's by now."""
        if document.body.provider != self._provider():
            raise InvalidSpec(f"the volume is one of {document.body.provider}, of which `base` is not any more")
        manager = await self._boxes.manager_of(document.project)
        template, id = self._template, new_id()
        options = template.options()
        for name in ("env", "allow", "network", "command"):
            options.pop(name, None)  # type: ignore[misc]
        options |= {"cache": "own", "cache_paths": {_label(document.id): PLACE}, "data": False, "network": "none"}
        options |= {"lifetime": _CONTENT_S + 60.0, "idle": None, "timeout": _CONTENT_S}
        async with self._turn(document.project):
            try:
                sandbox = await manager.create(id=id, ephemeral=True, **options)
                yield (await account(sandbox, template.user)).files if template.admin else sandbox.files
            finally:
                await run_to_end(self._end(manager, id))

    @asynccontextmanager
    async def _turn(self, project: str) -> AsyncIterator[None]:
        """Be one of a tenant's calls that are under way. Raises LimitReached if none of them ends in time."""
        turns = self._turns[project]
        try:
            async with asyncio.timeout(_TURN_S):
                await turns.acquire()
        except TimeoutError:
            raise LimitReached(f"{_MOST_AT_ONCE} calls about files of volumes are under way already") from None
        try:
            yield
        finally:
            turns.release()

    async def _end(self, manager: AsyncSandboxManager, id: Any) -> None:
        try:
            await manager.destroy(id, grace_s=0.0)
        except NotFound:  # it was not made
            return

    @property
    def _template(self) -> Template:
        return self._server.config.templates.get("base", BASE)

    def _provider(self) -> str:
        return self._template.provider or self._server.config.provider


def routes(surface: Surface) -> list[BaseRoute]:
    table = (
        ("POST", "/volumes", Scope.CREATE, create),
        ("GET", "/volumes", Scope.READ, list_all),
        ("GET", "/volumes/{id}", Scope.READ, show),
        ("DELETE", "/volumes/{id}", Scope.DESTROY, remove),
    )
    return [route(surface, method, path, scope, handler) for method, path, scope, handler in table]


async def create(call: Call) -> Response:
    asked = await call.body(NewVolume)
    return answer(await _whole(await call.volumes.make(asked.name, call), call), 201)


async def list_all(call: Call) -> list[dict[str, Any]]:
    """Volumes, the oldest first."""
    return [_told(each) for each in await call.volumes.of(call)]


async def show(call: Call) -> dict[str, Any]:
    return await _whole(await call.volumes.get(call.part("id"), call), call)


async def remove(call: Call) -> Response:
    await call.volumes.remove(await call.volumes.get(call.part("id"), call))
    return answer(status=204)


async def _whole(document: Document[KeptVolume], call: Call) -> dict[str, Any]:
    """A volume with its token, which is empty for a key that may not touch files."""
    may = call.principal.may(Scope.FILES)
    return {**_told(document), "token": await call.volumes.token(document.id) if may else ""}


def _told(document: Document[KeptVolume]) -> dict[str, Any]:
    return {"volumeID": document.id, "name": document.body.name}


def _label(id: str) -> str:
    """What the provider's volume is labelled with."""
    return f"e2b-{id}"
