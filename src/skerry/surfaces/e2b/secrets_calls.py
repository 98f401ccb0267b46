"""Secrets by E2B's control plane: values that rules of the network put into requests on their way out, and that no call
tells. A value is in the memory of the server that was given it, and nowhere else; what the registry has of it is its
name."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute

from skerry.errors import Conflict, InvalidSpec, LimitReached, NotFound, SkerryError
from skerry.model.tenants import Scope
from skerry.store.documents import Document
from skerry.surfaces.e2b import headers, wire
from skerry.surfaces.e2b.answers import answer
from skerry.surfaces.e2b.kept import every
from skerry.surfaces.e2b.pages import paged
from skerry.surfaces.e2b.route import Call, Surface, route

if TYPE_CHECKING:
    from skerry.surfaces.e2b.box import Boxes
    from skerry.surfaces.server.server import Server

KIND = "e2b-secret"
_MOST = 1000
_MOST_METADATA = 32
_NAME = re.compile(r"[^{}\x00-\x1f\x7f-\x9f]{1,256}")
_VALUE = re.compile(r"[\t -~]{1,8192}")
"""What a header can have."""
_log = logging.getLogger("skerry.server")
Metadata = dict[Annotated[str, msgspec.Meta(max_length=256)], Annotated[str, msgspec.Meta(max_length=4096)]]


class KeptSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret, by its id, without its value."""

    name: str
    metadata: dict[str, str] = {}
    version: int = 1
    created_at: float = msgspec.field(default_factory=time.time)
    updated_at: float = msgspec.field(default_factory=time.time)


class NewSecret(msgspec.Struct, frozen=True):
    name: str
    value: str
    metadata: Metadata | None = None


class SecretUpdate(msgspec.Struct, frozen=True):
    value: str
    metadata: Metadata | None = None


class Secrets:
    """All secrets, and the values that this server was given."""

    def __init__(self, server: Server, boxes: Boxes) -> None:
        self._documents = server.manager.store.documents(KIND, KeptSecret)
        self._boxes = boxes
        self._values: dict[str, str] = {}

    async def of(self, project: str) -> list[Document[KeptSecret]]:
        """All of a project."""
        return [each for each in await every(self._documents) if each.project == project]

    async def known(self, project: str) -> dict[str, str]:
        """Ids of all of a project, by their names."""
        return {each.body.name: each.id for each in await self.of(project)}

    async def value(self, name: str, project: str) -> str | None:
        """The value of a secret; None where there is none, or it is not known here."""
        return self._values.get((await self.known(project)).get(name, ""))

    async def get(self, text: str, project: str) -> Document[KeptSecret]:
        """One by its id or name. Raises NotFound."""
        for each in await self.of(project):
            if text == each.id or text.lower() == each.body.name:
                return each
        raise NotFound(f"secret {text[:100]!r} was not found")

    async def make(self, asked: NewSecret, project: str) -> Document[KeptSecret]:
        """Raises InvalidSpec, Conflict for a name that is taken, and LimitReached."""
        if not _NAME.fullmatch(asked.name):
            raise InvalidSpec("name: at most 256 letters, without '{', '}' and control characters", field="name")
        _check(asked)
        name, mine = asked.name.lower(), await self.of(project)
        if any(each.body.name == name for each in mine):
            raise Conflict(f"there is a secret {name!r} already: update it")
        if len(mine) >= _MOST:
            raise LimitReached(f"there are {_MOST} secrets: remove some")
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{project}\n{name}"))  # so that of two at once one is refused
        document = await self._documents.add(id, KeptSecret(name=name, metadata=asked.metadata or {}), project=project)
        self._values[id] = asked.value
        return document

    async def update(self, document: Document[KeptSecret], asked: SecretUpdate) -> Document[KeptSecret]:
        """Have another value from the next request on. Raises InvalidSpec, and Conflict."""
        _check(asked)
        body = document.body
        metadata = body.metadata if asked.metadata is None else asked.metadata
        body = msgspec.structs.replace(body, version=body.version + 1, metadata=metadata, updated_at=time.time())
        changed = await self._documents.replace(document.id, body, version=document.version)
        self._values[document.id] = asked.value
        await self._tell(document)
        return changed

    async def remove(self, document: Document[KeptSecret]) -> None:
        """Forget one. Requests that need it are sent no longer."""
        await self._documents.remove(document.id)
        self._values.pop(document.id, None)
        await self._tell(document)

    async def _tell(self, document: Document[KeptSecret]) -> None:
        """Give the gate what sandboxes with a secret have now. Raises SkerryError if one cannot be told."""
        failure: SkerryError | None = None
        for id, rules in tuple(self._boxes.headers.items()):
            if document.body.name not in headers.names(rules):
                continue
            try:
                box = await self._boxes.get(id)
                if box.project == document.project:
                    await headers.provide(box, rules, self)
            except NotFound:
                continue
            except SkerryError as error:
                _log.warning("sandbox %s has an old value of a secret: %s", id, error)
                failure = error
        if failure is not None:
            raise failure


def _check(asked: NewSecret | SecretUpdate) -> None:
    if not _VALUE.fullmatch(asked.value):
        raise InvalidSpec("value: 1 to 8192 printable letters of ASCII, as headers have them", field="value")
    if len(asked.metadata or {}) > _MOST_METADATA:
        raise InvalidSpec(f"metadata: at most {_MOST_METADATA} of them", field="metadata")


def routes(surface: Surface) -> list[BaseRoute]:
    table = (
        ("POST", "", Scope.NETWORK, create),
        ("GET", "", Scope.READ, list_all),
        ("GET", "/{id:path}", Scope.READ, show),
        ("POST", "/{id:path}", Scope.NETWORK, update),
        ("DELETE", "/{id:path}", Scope.NETWORK, remove),
    )
    return [route(surface, method, f"/secrets{path}", scope, handler) for method, path, scope, handler in table]


async def create(call: Call) -> Response:
    return answer(_told(await call.secrets.make(await call.body(NewSecret), call.project)), 201)


async def list_all(call: Call) -> Response:
    """Secrets without their values, the newest first, a page at a time."""
    query = call.request.query_params
    found = [(each.body.created_at, each.id, each) for each in await call.secrets.of(call.project)]
    page, more = paged(found, query.get("limit"), query.get("nextToken"))
    return answer([_told(each) for each in page], 200, more)


async def show(call: Call) -> dict[str, Any]:
    return _told(await call.secrets.get(call.part("id"), call.project))


async def update(call: Call) -> dict[str, Any]:
    asked = await call.body(SecretUpdate)
    return _told(await call.secrets.update(await call.secrets.get(call.part("id"), call.project), asked))


async def remove(call: Call) -> Response:
    await call.secrets.remove(await call.secrets.get(call.part("id"), call.project))
    return answer(status=204)


def _told(document: Document[KeptSecret]) -> dict[str, Any]:
    body = document.body
    return {
        "secretID": document.id,
        "name": body.name,
        "currentVersion": body.version,
        "metadata": body.metadata,
        "createdAt": wire.instant(body.created_at),
        "updatedAt": wire.instant(body.updated_at),
    }
