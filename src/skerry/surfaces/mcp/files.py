"""Tools that read and write files, and what clients read by name: files and long outputs, as resources."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal, cast
from urllib.parse import unquote, urlsplit

import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    BlobResourceContents,
    ListResourcesResult,
    ListResourceTemplatesResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)
from pydantic import Field

from skerry.errors import InvalidSpec, PathNotFound, SkerryError, TooLarge
from skerry.model.results import FileInfo
from skerry.model.tenants import Scope
from skerry.surfaces.mcp import advice
from skerry.surfaces.mcp.caller import Caller
from skerry.surfaces.mcp.outputs import is_output_id
from skerry.surfaces.mcp.results import (
    OUTPUT_URI,
    Entry,
    FileContent,
    FileReference,
    Listing,
    Written,
    output_links,
    picture_type,
    printable,
)
from skerry.surfaces.mcp.tool import FindCaller, PathArg, SandboxArg, Tools
from skerry.units import format_size

tools = Tools()
_TEMPLATE = "skerry://{sandbox}/{+path}"
_OUTPUT_TEMPLATE = f"{OUTPUT_URI}{{id}}"
_UNTRUSTED_META = {"skerry/untrusted": True}
_MOST_NAMES = 128 << 10
"""Bytes of all paths of a listing."""
_MOST_TEXT = 1_000_000
"""Bytes of a text as it is sent, with its escapes; clients take messages of 1 MiB."""
_OFFSET = re.compile(r"offset=([0-9]{1,12})")


@tools.add(Scope.FILES, reads=True, untrusted=True)
async def read_file(
    caller: Caller,
    sandbox: SandboxArg,
    path: PathArg,
    offset: Annotated[int, Field(description="The byte to begin at", ge=0)] = 0,
) -> FileContent:
    """Read a file of a sandbox. Long files come in parts: read on at next_offset. Pictures come as pictures, other
    binary files as base64."""
    box = await caller.sandbox(sandbox)
    limit = caller.limits.output_bytes
    data = await box.files.read(path, offset=offset, length=limit + 1, max_bytes=limit + 1)
    info = await box.files.stat(path)
    kind = picture_type(data) if offset == 0 else None
    if kind is not None and info.size <= caller.limits.image_bytes:
        whole = data if len(data) <= limit else await box.files.read(path, max_bytes=caller.limits.image_bytes)
        return FileContent.of_picture(path, whole, kind)
    found = FileContent.of(path, data, offset=offset, size=info.size, limit=limit)
    if found.next_offset is not None:
        found.url = caller.file_url(box.id, info.path)
    return found


@tools.add(Scope.FILES, destroys=True, idempotent=True)
async def write_file(
    caller: Caller,
    sandbox: SandboxArg,
    path: PathArg,
    content: Annotated[str, Field(description="The whole new content")],
    encoding: Annotated[Literal["utf-8", "base64"], Field(description="base64 for binary content")] = "utf-8",
) -> Written:
    """Write a whole file in a sandbox, in place of what was there; missing folders are made."""
    box = await caller.sandbox(sandbox)
    return Written(path=path, size=await box.files.write(path, _bytes(content, encoding)))


@tools.add(Scope.FILES, reads=True, untrusted=True)
async def list_directory(
    caller: Caller,
    sandbox: SandboxArg,
    path: PathArg = ".",
    depth: Annotated[int, Field(description="How many levels of folders to go down", ge=1, le=32)] = 1,
) -> Listing:
    """List what is in a folder of a sandbox."""
    box = await caller.sandbox(sandbox)
    found: list[Entry] = []
    most, room = caller.limits.entries, _MOST_NAMES
    async with aclosing(cast("AsyncGenerator[FileInfo, None]", box.files.iter_list(path, depth=depth))) as infos:
        async for info in infos:
            entry = Entry.of(info)
            room -= len(entry.path.encode())
            if len(found) == most or room < 0:
                return Listing(path=printable(path), entries=found, more=True)
            found.append(entry)
    return Listing(path=printable(path), entries=found, more=False)


@tools.add(Scope.FILES, reads=True)
async def refer_to_file(caller: Caller, sandbox: SandboxArg, path: PathArg) -> FileReference:
    """Get references to a file of a sandbox, to hand on in the place of its content: a resource, and where the server
    has one a URL by which a program uploads or downloads a file of any size."""
    box = await caller.sandbox(sandbox)
    try:
        info = await box.files.stat(path)
        whole, size = info.path, info.size if not info.is_dir else None
    except PathNotFound:
        work = await box.cwd()
        whole, size = path if path.startswith("/") else f"{work.rstrip('/')}/{path}", None
    uri, url = caller.file_uri(box.id, whole), caller.file_url(box.id, whole)
    return FileReference.of(printable(whole), uri=uri, size=size, url=url)


@tools.add(Scope.EXEC, reads=True, untrusted=True)
async def read_output(
    caller: Caller,
    uri: Annotated[str, Field(description="The stdout_uri or stderr_uri of a command whose output was cut")],
    offset: Annotated[int, Field(description="The byte to begin at", ge=0)] = 0,
) -> FileContent:
    """Read an output that was too long for an answer, in parts. At most 2 MiB of each is kept, for an hour."""
    output = caller.outputs.get(caller.owner, uri.removeprefix(OUTPUT_URI))
    limit = caller.limits.output_bytes
    part = output.data[offset : offset + limit + 1]
    found = FileContent.of(output.title, part, offset=offset, size=len(output.data), limit=limit)
    if found.encoding == "base64":  # what a command says is text for a model, however broken
        found.content, found.encoding = part[:limit].decode(errors="replace"), "utf-8"
    return found


def _bytes(content: str, encoding: str) -> bytes:
    if encoding == "utf-8":
        return content.encode()
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise InvalidSpec(f"content: it is not base64: {error}", field="content") from None


# resources


def serve_resources(server: MCPServer[Any], find_caller: FindCaller) -> None:
    """Give a server its resources: files of sandboxes, and long outputs."""

    async def list_resources(
        request: ServerRequestContext[Any, Any], params: PaginatedRequestParams
    ) -> ListResourcesResult:
        async with _known(find_caller, request) as caller:
            kept = caller.outputs.of(caller.owner)[-caller.limits.items :]
            links = [link.model_dump(exclude={"type"}) for each in kept for link in output_links(each)]
        return ListResourcesResult(resources=[Resource.model_validate(each) for each in links])

    async def list_templates(
        request: ServerRequestContext[Any, Any], params: PaginatedRequestParams
    ) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(
            resource_templates=[
                ResourceTemplate(
                    uri_template=_TEMPLATE,
                    name="file",
                    description="A file of a sandbox, by the sandbox's id or name and its whole path: untrusted data",
                ),
                ResourceTemplate(
                    uri_template=_OUTPUT_TEMPLATE,
                    name="output",
                    description="An output of a command that was too long for the answer: untrusted data",
                    mime_type="text/plain",
                ),
            ]
        )

    async def read_resource(
        request: ServerRequestContext[Any, Any], params: ReadResourceRequestParams
    ) -> ReadResourceResult:
        async with _known(find_caller, request) as caller:
            return ReadResourceResult(contents=[await _resource(caller, str(params.uri))])

    low = server._lowlevel_server
    low.add_request_handler("resources/list", PaginatedRequestParams, list_resources)
    low.add_request_handler("resources/templates/list", PaginatedRequestParams, list_templates)
    low.add_request_handler("resources/read", ReadResourceRequestParams, read_resource)


@asynccontextmanager
async def _known(find_caller: FindCaller, request: ServerRequestContext[Any, Any]) -> AsyncIterator[Caller]:
    """Whoever asks; our errors are told in the protocol's way."""
    try:
        async with find_caller(request) as caller:
            yield caller
    except SkerryError as error:
        raise MCPError(INVALID_PARAMS, advice.text_of(error), {"code": error.code}) from None


async def _resource(caller: Caller, uri: str) -> TextResourceContents | BlobResourceContents:
    """What a URI names. Raises NotFound, NotPermitted, TooLarge, InvalidSpec for one that is none of ours, and errors
    of files."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidSpec(f"uri: {error}", field="uri") from None
    if parts.scheme != "skerry" or not parts.netloc or parts.fragment:
        raise InvalidSpec("uri: a resource is called skerry://SANDBOX/PATH or skerry://output/ID", field="uri")
    id = parts.path.removeprefix("/")
    if uri.startswith(OUTPUT_URI) and is_output_id(id):
        caller.require(Scope.EXEC)
        offset = _OFFSET.fullmatch(parts.query or "offset=0")
        if offset is None:
            raise InvalidSpec("uri: what follows the `?` is offset=NUMBER", field="uri")
        return _contents(uri, caller.outputs.get(caller.owner, id).part(int(offset[1])), lenient=True)
    caller.require(Scope.FILES)
    box = await caller.sandbox(parts.netloc)
    path, most = unquote(parts.path or "/", errors="surrogateescape"), caller.limits.resource_bytes
    if parts.query:
        raise InvalidSpec("uri: a `?` in a path is written %3F", field="uri")
    info = await box.files.stat(path)
    if info.size > most:
        url = caller.file_url(box.id, info.path)
        how = "read it in parts, with read_file" if url is None else f"GET {url} with the same token"
        raise TooLarge(f"{printable(path)} has {format_size(info.size)}, and a resource {format_size(most)}: {how}")
    return _contents(uri, await box.files.read(path, max_bytes=most))


def _contents(uri: str, data: bytes, *, lenient: bool = False) -> TextResourceContents | BlobResourceContents:
    """Bytes as a text, if they are one and not too long as such; `lenient` replaces what is none in it."""
    kind = None if lenient else picture_type(data)
    text = None if kind is not None or (b"\0" in data and not lenient) else _text(data, lenient)
    if text is not None and len(msgspec.json.encode(text)) <= _MOST_TEXT:
        return TextResourceContents(uri=uri, text=text, mime_type="text/plain", _meta=_UNTRUSTED_META)
    blob = base64.b64encode(data).decode()
    return BlobResourceContents(uri=uri, blob=blob, mime_type=kind or "application/octet-stream", _meta=_UNTRUSTED_META)


def _text(data: bytes, lenient: bool) -> str | None:
    try:
        return data.decode(errors="replace" if lenient else "strict")
    except UnicodeDecodeError:
        return None
