"""Images and kernels that sandboxes are made of. All tenants of a host share them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from skerry.agent.guest import trees
from skerry.aio import run_to_end
from skerry.errors import Conflict, InvalidSpec, NotPermitted
from skerry.gate import base as gate
from skerry.gate.decide import host_of
from skerry.gate.dialer import Dialer
from skerry.host import folders
from skerry.manager.images import BuildOptions
from skerry.model.rules import Rules
from skerry.model.spec import Network, SandboxId
from skerry.model.tenants import Scope
from skerry.providers.base import Image, OnProgress, Progress
from skerry.surfaces.rest.operations import OperationView, WaitQuery, begin, show
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.streams import Upload
from skerry.surfaces.rest.views import Page, PageQuery, page_of
from skerry.surfaces.server.operations import Tell

routes = Routes("images")
TAR = "application/x-tar"
_UPLOADS = "upload-"
_ABANDONED_S = 3600.0
_LARGEST = 64 << 30
_LARGEST_CONTEXT = 8 << 30
_MOST_ENTRIES = 1_000_000
_CHUNK = 1 << 20
_LEFT_FREE = 1 << 30
"""Bytes that an upload leaves of the file system of the state, on which the registry is."""


class ImageView(msgspec.Struct, frozen=True, kw_only=True):
    """An image; its id changes with every byte of it."""

    id: str
    names: tuple[str, ...]
    size: int
    created_at: float | None
    digests: tuple[str, ...]
    """Under which digests a registry has it."""
    used_by: int | None
    """How many boxes are made of it, of all tenants; null for those who do not see them."""


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None
    """Whose images; else those of the server's own provider."""


class ProviderQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None


class BuildImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image to build, of the text of a Dockerfile or, for machines, of a recipe."""

    dockerfile: str = ""
    name: str | None = None
    recipe: str | None = None
    args: dict[str, str] = {}
    target: str | None = None
    no_cache: bool = False
    network: str = "none"
    """What its RUN steps have: `none` or `bridge`."""
    memory: int | str | None = None
    provider: str | None = None
    builder: str | None = None
    """A provider that runs the steps in the place of the one that has the image then."""
    context: str | None = None
    """A folder of the server's host, for its owner alone; others send it, see `build/context`."""


class BuildQuery(WaitQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to build of a context that is sent."""

    name: str
    dockerfile: str = "Dockerfile"
    """Its path in the context."""
    arg: tuple[str, ...] = ()
    """`NAME=VALUE`"""
    target: str | None = None
    no_cache: bool = False
    network: str = "none"
    memory: str | None = None
    provider: str | None = None
    builder: str | None = None


class PullImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    provider: str | None = None


class ImportQuery(WaitQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    provider: str | None = None


class RemoveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    force: bool = False
    """Take all its names."""
    provider: str | None = None


class KernelView(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel of machines."""

    id: str
    version: str
    package: str
    """The version of the package that it comes from, or the file."""
    own: bool
    """Built by skerry."""
    created_at: float


@routes.get("/images", Scope.READ)
async def list(call: Call, query: ListQuery) -> Page[ImageView]:
    """All images that sandboxes can be made of, the newest first."""
    found = await call.manager.images(provider=query.provider)
    return page_of([_view(call, each) for each in found], query)


@routes.post("/images/build", Scope.IMAGES, status=202, headers=("Idempotency-Key",))
async def build(call: Call, query: WaitQuery, body: BuildImage) -> OperationView:
    """Build an image; the answer is the operation. Without a context its COPY finds nothing."""
    if body.context is not None and not call.principal.is_admin:
        raise NotPermitted("context: that is a folder of the host, and for its owner alone: send it to build/context")
    _refuse_network(call, body.network)
    options = BuildOptions(
        name=body.name, context=body.context, args=body.args, target=body.target, no_cache=body.no_cache,
        recipe=body.recipe, network=body.network, memory=body.memory,
    )  # fmt: skip

    async def work(on_progress: OnProgress) -> Image:
        return await call.manager.build_base_image(
            body.dockerfile, provider=body.provider, builder=body.builder, on_progress=on_progress, **options
        )

    return await _begin(call, "image.build", body.name or body.recipe or "", work, query.wait_s)


@routes.post("/images/build/context", Scope.IMAGES, status=202, takes=TAR)
async def build_context(call: Call, query: BuildQuery) -> OperationView:
    """Build an image of a context that is sent as a tar, with its Dockerfile in it."""
    pairs = [text.partition("=") for text in query.arg]
    if any(not separator for _, separator, _ in pairs):
        raise InvalidSpec("arg: write NAME=VALUE", field="arg")
    _refuse_network(call, query.network)
    options = BuildOptions(
        name=query.name, args={name: value for name, _, value in pairs}, target=query.target, no_cache=query.no_cache,
        network=query.network, memory=query.memory,
    )  # fmt: skip

    async def work(archive: Path, on_progress: OnProgress) -> Image:
        context = archive.parent / "context"
        await asyncio.to_thread(_unpack, archive, context)
        dockerfile = (context / query.dockerfile).resolve()
        if not dockerfile.is_relative_to(context.resolve()) or not dockerfile.is_file():
            raise InvalidSpec(f"dockerfile: the context has no file {query.dockerfile!r}", field="dockerfile")
        options["context"] = context
        return await call.manager.build_base_image(
            dockerfile, provider=query.provider, builder=query.builder, on_progress=on_progress, **options
        )

    return await _begin_upload(call, "image.build", query.name, work, _LARGEST_CONTEXT, query.wait_s)


@routes.post("/images/pull", Scope.IMAGES, status=202, headers=("Idempotency-Key",))
async def pull(call: Call, query: WaitQuery, body: PullImage) -> OperationView:
    """Get an image from its registry; the answer is the operation."""
    if not call.principal.is_admin:
        await _refuse_registry(body.name)

    async def work(on_progress: OnProgress) -> Image:
        return await call.manager.pull_image(body.name, provider=body.provider, on_progress=on_progress)

    return await _begin(call, "image.pull", body.name, work, query.wait_s)


@routes.post("/images/import", Scope.IMAGES, status=202, takes=TAR)
async def import_image(call: Call, query: ImportQuery) -> OperationView:
    """Make an image of a tar that is sent: an image archive, an OCI layout or a root file system."""

    async def work(archive: Path, on_progress: OnProgress) -> Image:
        return await call.manager.import_image(archive, query.name, provider=query.provider, on_progress=on_progress)

    return await _begin_upload(call, "image.import", query.name, work, _LARGEST, query.wait_s)


@routes.delete("/images/{name:path}", Scope.IMAGES)
async def remove(call: Call, name: str, query: RemoveQuery) -> None:
    """Remove an image. It is a conflict while a sandbox is made of it."""
    try:
        await call.manager.remove_image(name, force=query.force, provider=query.provider)
    except Conflict:
        if call.principal.is_admin:
            raise
        raise Conflict(f"image {name!r} is in use") from None  # by whom is not theirs to know


@routes.get("/kernels", Scope.READ)
async def list_kernels(call: Call, query: ListQuery) -> Page[KernelView]:
    """The kernels of machines: our own first, then the newest."""
    found = await call.manager.kernels(provider=query.provider)
    views = [
        KernelView(id=each.key, version=each.version, package=each.package, own=each.own, created_at=each.created_at)
        for each in found
    ]
    return page_of(views, query)


@routes.post("/kernels/fetch", Scope.ADMIN, status=202)
async def fetch_kernel(call: Call, query: WaitQuery, body: ProviderQuery) -> OperationView:
    """Get the newest of Debian's kernels for machines; the answer is the operation."""

    async def work(on_progress: OnProgress) -> Any:
        return await call.manager.fetch_kernel(provider=body.provider, on_progress=on_progress)

    return await _begin(call, "kernel.fetch", "", work, query.wait_s, Scope.ADMIN)


@routes.post("/kernels/build", Scope.ADMIN, status=202)
async def build_kernel(call: Call, query: WaitQuery, body: ProviderQuery) -> OperationView:
    """Build a kernel for machines, which takes long; the answer is the operation."""

    async def work(on_progress: OnProgress) -> Any:
        return await call.manager.build_kernel(provider=body.provider, on_progress=on_progress)

    return await _begin(call, "kernel.build", "", work, query.wait_s, Scope.ADMIN)


@routes.delete("/kernels/{key}", Scope.ADMIN)
async def remove_kernel(call: Call, key: str, query: ProviderQuery) -> None:
    """Remove a kernel. Machines that run keep what they have read of it."""
    await call.manager.remove_kernel(key, provider=query.provider)


def _view(call: Call, found: Image) -> ImageView:
    return ImageView(
        id=found.id,
        names=found.names,
        size=found.size,
        created_at=found.created_at,
        digests=found.digests,
        used_by=found.used_by if call.principal.is_admin else None,
    )


async def _begin(
    call: Call,
    kind: str,
    target: str,
    work: Callable[[OnProgress], Awaitable[Any]],
    wait_s: float,
    scope: Scope = Scope.IMAGES,
) -> OperationView:
    async def told(tell: Tell) -> Any:
        made = await work(_progress(tell))
        return _view(call, made) if isinstance(made, Image) else made

    return await begin(call, kind, target, scope, told, wait_s=wait_s)


async def _begin_upload(
    call: Call,
    kind: str,
    target: str,
    work: Callable[[Path, OnProgress], Awaitable[Image]],
    most: int,
    wait_s: float,
) -> OperationView:
    """Begin work with what a call sends, which is kept in a folder of the state meanwhile."""
    parent = Path(call.manager.config.state_dir, "uploads")
    await asyncio.to_thread(folders.make, parent)
    await asyncio.to_thread(folders.sweep, parent, _UPLOADS, _ABANDONED_S)
    with ExitStack() as stack:
        folder = stack.enter_context(folders.scratch(parent, _UPLOADS))
        archive = folder / "upload.tar"
        await _receive(call, archive, most)
        kept = stack.pop_all()

    async def told(tell: Tell) -> Any:
        try:
            return _view(call, await work(archive, _progress(tell)))
        finally:
            await run_to_end(asyncio.to_thread(kept.close))

    try:
        begun = await begin(call, kind, target, Scope.IMAGES, told, keyed=False)
    except BaseException:
        await run_to_end(asyncio.to_thread(kept.close))
        raise
    return begun if not wait_s else await show(call, begun.id, WaitQuery(wait_s=wait_s))


async def _receive(call: Call, path: Path, most: int) -> None:
    """Write a body to a file. Raises Refused."""
    upload, size, waiting = Upload(call), 0, bytearray()
    try:
        with path.open("xb") as file:
            while True:
                chunk = await upload.read(_CHUNK)
                waiting += chunk
                size += len(chunk)
                if size > most:
                    raise Refused(413, f"the body is larger than {most} bytes", "too_large")
                if len(waiting) >= _CHUNK or not chunk:
                    await asyncio.to_thread(_add, file, bytes(waiting))
                    waiting.clear()
                if not chunk:
                    break
    except OSError as error:
        raise Refused(507, f"the body cannot be kept: {error.strerror}", "disk_full") from error
    if not size:
        raise Refused(400, "the body is empty: send a tar", "invalid_request")


def _add(file: BinaryIO, data: bytes) -> None:
    """Write more of an upload. Raises OSError where too little would be left."""
    if shutil.disk_usage(file.name).free - len(data) < _LEFT_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.write(data)


def _refuse_network(call: Call, network: str) -> None:
    """Raise NotPermitted for steps of a tenant that would reach what its sandboxes may not: they have no gate."""
    if network != Network.NONE and not call.principal.is_admin:
        raise NotPermitted("network: builds of tenants have none; the owner of the host can build it for you")


async def _refuse_registry(name: str) -> None:
    """Raise NotPermitted for an image whose registry is at an address that is not of the internet. One that is not
    found here is left to the engine, which may know it."""
    registry, slash, _ = name.partition("/")
    host, _, port = registry.rpartition(":") if registry.rpartition(":")[2].isdecimal() else (registry, "", "443")
    if not slash or not ("." in registry or ":" in registry or registry.lower() == "localhost"):
        return  # it has none of its own
    try:
        policy = gate.Policy(id=SandboxId("images"), rules=Rules())
        await Dialer().find(policy, host_of(host.strip("[]")), int(port) if len(port) < 6 else 0)
    except gate.Unreachable:
        return
    except gate.Refused as error:
        raise NotPermitted(f"name: the registry of {name!r} is not on the internet") from error


def _unpack(archive: Path, target: Path) -> None:
    """Unpack a context. Raises InvalidSpec for what is none."""
    try:
        with archive.open("rb") as file:
            trees.unpack(file.read, os.fsencode(target), max_bytes=_LARGEST_CONTEXT, max_entries=_MOST_ENTRIES)
    except (trees.UnsafeTar, trees.TooMuch, OSError) as error:
        raise InvalidSpec(f"context: {error}", field="context") from None


def _progress(tell: Tell) -> OnProgress:
    def on_progress(progress: Progress) -> None:
        tell(progress.message, done=progress.done, total=progress.total)

    return on_progress
