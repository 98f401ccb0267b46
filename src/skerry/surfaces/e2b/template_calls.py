"""Templates by E2B's control plane: asked for, built from steps, tagged and removed."""

from __future__ import annotations

import asyncio
import hmac
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from skerry.errors import Conflict, InvalidSpec, NotFound, NotPermitted, SkerryError
from skerry.model.tenants import Scope
from skerry.store.documents import Document
from skerry.surfaces.e2b import answers, names, snapshots, wire
from skerry.surfaces.e2b.answers import answer
from skerry.surfaces.e2b.builds import SERVER_ENDED, Order
from skerry.surfaces.e2b.kept import KeptBuild, KeptTemplate
from skerry.surfaces.e2b.route import Call, Surface, route
from skerry.surfaces.rest.problems import Refused

_LOGS_AT_ONCE = 100
_UPLOAD_S = 3600
_LARGEST = 2 << 30
_UPLOADS = "/e2b/uploads/{project}/{hash}"


class NewBuild(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    alias: str = ""
    tags: tuple[str, ...] = ()
    cpu_count: float = 0.0
    memory_mb: int = msgspec.field(name="memoryMB", default=0)


class NewTags(msgspec.Struct, frozen=True):
    target: str
    tags: tuple[str, ...]


class OldTags(msgspec.Struct, frozen=True):
    name: str
    tags: tuple[str, ...]


def routes(surface: Surface) -> list[BaseRoute]:
    table = (
        ("GET", "/templates", Scope.READ, list_all),
        ("GET", "/templates/aliases/{alias:path}", Scope.READ, by_alias),
        ("POST", "/v3/templates", Scope.CREATE, request_build),
        ("POST", "/templates/tags", Scope.CREATE, tag),
        ("DELETE", "/templates/tags", Scope.DESTROY, untag),
        ("GET", "/templates/{id}/tags", Scope.READ, tags),
        ("GET", "/templates/{id}/files/{hash}", Scope.CREATE, upload_link),
        ("POST", "/v2/templates/{id}/builds/{build}", Scope.CREATE, start_build),
        ("GET", "/templates/{id}/builds/{build}/status", Scope.READ, build_status),
        ("DELETE", "/templates/{id:path}", Scope.DESTROY, remove),
    )
    found: list[BaseRoute] = [route(surface, method, path, scope, handler) for method, path, scope, handler in table]
    return [*found, _upload_route(surface)]


async def list_all(call: Call) -> list[dict[str, Any]]:
    """Templates that were built."""
    return [_told(each) for each in await call.templates.built(call)]


async def by_alias(call: Call) -> dict[str, Any]:
    """Whether there is a template of a name. Raises NotFound."""
    found = await call.templates.find(call.part("alias"), call)
    return {"templateID": found.id, "public": False}


async def request_build(call: Call) -> Response:
    """A template of a name, and a new build of it, to which files may now be sent."""
    asked = await call.body(NewBuild)
    name, _, tag = (asked.name or asked.alias).rpartition("/")[2].partition(":")
    if not names.is_plain(name) or (tag and not names.is_plain(tag)):
        raise InvalidSpec("name: letters, digits, '-', '_' and '.', and a tag after a colon", field="name")
    tags = tuple(dict.fromkeys((*([tag] if tag else []), *asked.tags)))
    builds = call.templates.builds
    template, build = await builds.request(name, tags, asked.cpu_count, asked.memory_mb, call)
    body = {"templateID": template, "buildID": build, "public": False, "aliases": [name], "names": [name]}
    return answer({**body, "tags": list(tags or (names.TAG,))}, 202)


async def upload_link(call: Call) -> Response:
    """Where the files of a COPY are to be sent, unless they are here."""
    await _template(call)
    path = call.templates.builds.files.path(call.project, call.part("hash"))
    if path.exists():
        return answer({"present": True}, 201)
    await call.boxes.keys.open()
    until = str(int(time.time()) + _UPLOAD_S)
    target = _UPLOADS.format(project=call.project or "-", hash=call.part("hash"))
    query = urlencode({"until": until, "signature": call.boxes.keys.derive("upload", f"{target} {until}")})
    base = call.request.url.replace(path="", query="")
    return answer({"present": False, "url": f"{base}{target}?{query}"}, 201)


def _upload_route(surface: Surface) -> Route:
    """The upload itself, which shows no key, but the signature of its URL."""

    async def endpoint(request: Request) -> Response:
        try:
            await surface.boxes.keys.open()
            until, signature = request.query_params.get("until", ""), request.query_params.get("signature", "")
            expected = surface.boxes.keys.derive("upload", f"{request.url.path} {until}")
            if not hmac.compare_digest(signature.encode(), expected.encode()) or int(until) < time.time():
                raise Refused(403, "this URL is not valid, or not any more", "not_permitted")
            project = str(request.path_params["project"]).removeprefix("-")
            path = surface.templates.builds.files.path(project, str(request.path_params["hash"]))
            await asyncio.to_thread(surface.templates.builds.files.make_room, path.parent)
            await _receive(request, path)
            return answer(status=200)
        except SkerryError as error:
            return answers.of_error(error)

    return Route(_UPLOADS, endpoint, methods=["PUT"])


async def _receive(request: Request, path: Path) -> None:
    """Write an upload to its place, whole or not at all. Raises Refused."""
    fd, name = tempfile.mkstemp(prefix=".upload-", dir=path.parent)
    try:
        size = 0
        with os.fdopen(fd, "wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > _LARGEST:
                    raise Refused(413, f"files of a build are larger than {_LARGEST} bytes", "too_large")
                await asyncio.to_thread(file.write, chunk)
        Path(name).replace(path)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


async def start_build(call: Call) -> Response:
    """Begin a build."""
    order = await call.body(Order)
    await _build(call)
    if order.from_image_registry:
        raise Refused(422, "images of other registries are pulled by the owner of the host", "unsupported")
    await call.templates.builds.start(call.part("build"), order, call)
    return answer(status=202)


async def build_status(call: Call) -> dict[str, Any]:
    """How a build is, and what it has said after a place in its log."""
    id, builds = call.part("build"), call.templates.builds
    kept = (await _build(call)).body
    offset = call.request.query_params.get("logsOffset", "0")
    lines = builds.logs(id, kept)[int(offset) if offset.isascii() and offset.isdecimal() else 0 :][:_LOGS_AT_ONCE]
    entries = [{"timestamp": wire.instant(kept.at), "level": "info", "message": line} for line in lines]
    status, reason, kind = kept.status, kept.reason, kept.kind
    if status == "building" and not builds.is_running(id) and time.time() > kept.at + _UPLOAD_S:
        status, reason, kind = "error", "the server ended during the build", dict(SERVER_ENDED)
    body: dict[str, Any] = {"templateID": kept.template, "buildID": id, "status": status}
    if status == "error":
        body["reason"] = {"message": reason, "step": kept.step, "logEntries": [], **kind}
    return {**body, "logs": list(lines), "logEntries": entries}


async def tag(call: Call) -> Response:
    """Have more tags name the build that a name means."""
    asked = await call.body(NewTags)
    found = await call.templates.find_built(asked.target, call)
    if found is None:
        raise NotFound(f"template {asked.target[:100]!r} was not found")
    plain = tuple(_tag(text, found[0].body.name) for text in asked.tags)
    await call.templates.builds.tag(found[0].id, plain, found[1])
    return answer({"buildID": found[1], "tags": list(plain)}, 201)


async def untag(call: Call) -> Response:
    asked = await call.body(OldTags)
    document = await _named(call, asked.name)
    await call.templates.builds.untag(document.id, [_tag(text, document.body.name) for text in asked.tags])
    return answer(status=204)


async def tags(call: Call) -> list[dict[str, Any]]:
    document = await _named(call, call.part("id"))
    found = sorted(document.body.tags.items(), key=lambda each: -each[1].at)
    return [{"tag": name, "buildID": each.build, "createdAt": wire.instant(each.at)} for name, each in found]


async def remove(call: Call) -> Response:
    """Remove a snapshot, or a template that was built. Raises NotFound, and Conflict while a sandbox is made of it."""
    name = call.part("id")
    if (snapshot := await call.templates.snapshot(name, call)) is not None:
        await snapshots.remove(call, snapshot)
        return answer(status=204)
    if (built := await call.templates.find_built(name, call)) is not None:
        await _remove_built(call, built[0])
        return answer(status=204)
    await call.templates.find(name, call)
    raise NotPermitted("this template is one of the configuration's")


async def _remove_built(call: Call, document: Document[KeptTemplate]) -> None:
    """Remove a template with all its builds."""
    builds = call.templates.builds
    manager = await call.boxes.manager_of(document.project)
    for id in {tag.build for tag in document.body.tags.values()}:
        with suppress(NotFound):  # somebody removed it at the provider
            await manager.remove_snapshot(id)
        with suppress(NotFound):
            await builds.builds.remove(id)
    with suppress(Conflict, NotFound):
        await builds.templates.remove(document.id)


async def _template(call: Call) -> Document[KeptTemplate]:
    """The template that the path names. Raises NotFound."""
    return await _named(call, call.part("id"))


async def _named(call: Call, name: str) -> Document[KeptTemplate]:
    plain = name.rpartition("/")[2].partition(":")[0]
    for document in await call.templates.built(call):
        if plain in (document.id, document.body.name):
            return document
    raise NotFound(f"template {name[:100]!r} was not found")


async def _build(call: Call) -> Document[KeptBuild]:
    """The build that the path names. Raises NotFound."""
    template = await _template(call)
    found = await call.templates.builds.builds.get(call.part("build"))
    if found.body.template != template.id:
        raise NotFound("the build was not found")
    return found


def _tag(text: str, template: str) -> str:
    """A tag, which may have its template before it. Raises InvalidSpec."""
    name, colon, tag = text.rpartition("/")[2].rpartition(":")
    if (colon and name != template) or not names.is_plain(tag):
        raise InvalidSpec(f"tags: {text[:100]!r} is none", field="tags")
    return tag


def _told(document: Document[KeptTemplate]) -> dict[str, Any]:
    kept = document.body
    return {
        "templateID": document.id,
        "buildID": max(kept.tags.values(), key=lambda each: each.at).build if kept.tags else "",
        "public": False,
        "aliases": [kept.name],
        "names": [kept.name],
        "cpuCount": max(1, round(kept.cpus)),
        "memoryMB": kept.memory_mb or 512,
        "createdAt": wire.instant(document.created_at),
    }
