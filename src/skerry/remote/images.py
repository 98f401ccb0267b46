"""Images and kernels of a server: listed, built, pulled, imported and removed by calls to it."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from skerry.agent.guest import trees
from skerry.errors import FileError
from skerry.manager.images import BuildOptions, build_of
from skerry.model.results import OnProgress, Progress
from skerry.providers.base import Image
from skerry.remote.api import LONG_S, Api, segment
from skerry.remote.operations import Operation, Step, follow

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelInfo

_CHUNK = 1 << 20
_UPLOAD_S = 4 * 3600.0
_OWN_DOCKERFILE = ".skerry.dockerfile"
"""Name in the context of a Dockerfile that is not in it."""


class _Image(msgspec.Struct):
    """An image as a server shows it."""

    id: str
    names: tuple[str, ...] = ()
    size: int = 0
    created_at: float | None = None
    digests: tuple[str, ...] = ()
    used_by: int | None = None

    def image(self) -> Image:
        return Image(**{**msgspec.structs.asdict(self), "used_by": self.used_by or 0})


class _Kernel(msgspec.Struct):
    """A kernel as a server shows it."""

    version: str
    package: str
    own: bool
    created_at: float
    id: str = ""
    key: str = ""

    def info(self) -> KernelInfo:
        from skerry.vm.images.kernels import KernelInfo

        return KernelInfo(
            key=self.key or self.id, version=self.version, package=self.package, own=self.own,
            started_by="", created_at=self.created_at, sizes={},
        )  # fmt: skip


class RemoteImages:
    """Images that a server's boxes are made of, and the kernels of its machines."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, provider: str | None) -> Sequence[Image]:
        return [each.image() for each in await self._api.pages("/images", _Image, {"provider": provider})]

    async def build(
        self,
        dockerfile: str | Path,
        provider: str | None,
        builder: str | None,
        on_progress: OnProgress | None,
        options: BuildOptions,
    ) -> Image:
        """Have it built there; the folder of its context is sent."""
        build = build_of(dockerfile, options)
        asked = {
            "name": build.name, "target": build.target, "no_cache": build.no_cache, "network": build.network.value,
            "memory": build.memory, "provider": provider, "builder": builder,
        }  # fmt: skip
        if build.context is None or build.recipe:
            body = {**asked, "dockerfile": build.dockerfile, "recipe": build.recipe or None, "args": build.args}
            return await self._make("build", on_progress, body={k: v for k, v in body.items() if v is not None})
        context = build.context
        query = {
            **asked, "dockerfile": _OWN_DOCKERFILE, "arg": [f"{name}={value}" for name, value in build.args.items()]
        }  # fmt: skip
        packed = _packed(lambda file: _pack_context(context, build.dockerfile, file))
        return await self._make("build/context", on_progress, query=query, content=packed)

    async def pull(self, name: str, provider: str | None, on_progress: OnProgress | None) -> Image:
        body = {"name": name, **({} if provider is None else {"provider": provider})}
        return await self._make("pull", on_progress, body=body)

    async def add(self, source: Path, name: str, provider: str | None, on_progress: OnProgress | None) -> Image:
        """Have one made there of a tar or a folder of ours, which is sent."""
        query = {"name": name, "provider": provider}
        content = (
            _packed(lambda file: trees.pack(os.fsencode(source), file.write)) if source.is_dir() else _read(source)
        )
        return await self._make("import", on_progress, query=query, content=content)

    async def remove(self, name: str, provider: str | None, *, force: bool) -> None:
        path = "/".join(map(segment, name.split("/")))
        await self._api.order("DELETE", f"/images/{path}", query={"provider": provider, "force": force})

    async def kernels(self, provider: str | None) -> Sequence[KernelInfo]:
        return [each.info() for each in await self._api.pages("/kernels", _Kernel, {"provider": provider})]

    async def make_kernel(self, verb: str, provider: str | None, on_progress: OnProgress | None) -> KernelInfo:
        body = {} if provider is None else {"provider": provider}
        begun = self._api.send("POST", f"/kernels/{verb}", Operation, body)
        return (await follow(self._api, begun, _Kernel, _told(on_progress))).info()

    async def remove_kernel(self, key: str, provider: str | None) -> None:
        await self._api.order("DELETE", f"/kernels/{segment(key)}", query={"provider": provider})

    async def _make(
        self,
        verb: str,
        on_progress: OnProgress | None,
        *,
        body: Any = None,
        query: dict[str, Any] | None = None,
        content: AsyncIterator[bytes] | None = None,
    ) -> Image:
        timeout_s = LONG_S if content is None else _UPLOAD_S
        headers = {} if content is None else {"Content-Type": "application/x-tar"}
        sent: dict[str, Any] = {"query": query, "headers": headers, "content": content, "timeout_s": timeout_s}
        begun = self._api.send("POST", f"/images/{verb}", Operation, body, **sent)
        return (await follow(self._api, begun, _Image, _told(on_progress))).image()


def _told(on_progress: OnProgress | None) -> Callable[[Step], None] | None:
    if on_progress is None:
        return None

    def tell(step: Step) -> None:
        on_progress(Progress(step.message, step.done, step.total))

    return tell


async def _packed(pack: Callable[[IO[bytes]], None]) -> AsyncIterator[bytes]:
    """A tar, which is written to a file that nobody sees before it is sent. Raises FileError."""
    with tempfile.TemporaryFile(prefix="skerry-") as file:
        try:
            await asyncio.to_thread(pack, file)
        except OSError as error:
            raise FileError(f"{error.filename or 'the folder'} cannot be sent: {error.strerror}") from None
        file.seek(0)
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece


async def _read(path: Path) -> AsyncIterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _CHUNK):
                yield piece
    except OSError as error:
        raise FileError(f"{path} cannot be sent: {error.strerror}") from None


def _pack_context(context: Path, dockerfile: str, file: IO[bytes]) -> None:
    """Write a tar of a folder, and of the Dockerfile beside what is in it."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(context.iterdir()):
            tar.add(path, arcname=path.name, filter=_nobodys)
        member = tarfile.TarInfo(_OWN_DOCKERFILE)
        text = dockerfile.encode()
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """An entry without its owner here; what is no file is left out, as builders do."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
