"""`skerry image`: what boxes are made of."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from skerry.cli.completion import provider_names
from skerry.cli.output import echo, format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager
    from skerry.providers.base import Image

T = TypeVar("T")

_HEADER = ("NAME", "ID", "SIZE", "CREATED", "USED BY")
_SHORT = 12


def image_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of images, for a shell to complete; an engine that does not answer offers none."""
    from skerry.errors import SkerryError

    try:
        images = _ask(ctx.params.get("provider"), lambda manager: manager.images())
    except SkerryError:
        return []
    return [name for image in images for name in image.names if name.startswith(incomplete)]


_provider_option = click.option(
    "--provider", metavar="NAME", shell_complete=provider_names, help="Whose images; else the configured provider's."
)


@click.group()
def command() -> None:
    """Build, import, list and remove the images that boxes are made of."""


@command.command()
@click.argument("context", metavar="PATH", type=click.Path(), default=".")
@click.option("-t", "--tag", "name", metavar="NAME", help="What the image is called; else it is named by its text.")
@click.option("-f", "--file", "dockerfile", metavar="FILE", help="The Dockerfile, or - for stdin.  [PATH/Dockerfile]")
@click.option("--build-arg", "args", multiple=True, metavar="K=V|K", help="A value for an ARG, or a variable of yours.")
@click.option("--target", metavar="STAGE", help="Build this stage and none after it.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@_provider_option
@json_option
def build(
    context: str, name: str | None, dockerfile: str | None, args: tuple[str, ...], target: str | None,
    no_cache: bool, provider: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Build an image from a Dockerfile and the folder PATH, which is the current one if none is given."""
    from pathlib import Path

    from skerry.cli.options import environment
    from skerry.cli.progress import shown

    text = _stdin_text() if dockerfile == "-" else Path(dockerfile or f"{context}/Dockerfile")
    values = environment(args)

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"building {name or 'an image'}", as_json) as on_progress:
            return await manager.build_base_image(
                text, name=name, context=context, args=values, target=target, no_cache=no_cache, on_progress=on_progress
            )

    _tell(_ask(provider, work), as_json)


@command.command()
@click.argument("name", metavar="NAME")
@_provider_option
@json_option
def pull(name: str, provider: str | None, as_json: bool) -> None:
    """Get an image from its registry."""
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"pulling {name}", as_json) as on_progress:
            return await manager.pull_image(name, on_progress=on_progress)

    _tell(_ask(provider, work), as_json)


@command.command(name="import")
@click.argument("source", metavar="PATH", type=click.Path(exists=True))
@click.argument("name", metavar="NAME")
@_provider_option
@json_option
def import_(source: str, name: str, provider: str | None, as_json: bool) -> None:
    """Make an image of what is at PATH.

    That is an image archive as `docker save` writes it, an OCI layout or a root file system; a folder or a tar,
    which may be compressed.
    """
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"importing {name}", as_json) as on_progress:
            return await manager.import_image(source, name, on_progress=on_progress)

    _tell(_ask(provider, work), as_json)


@command.command()
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@_provider_option
@json_option
def ls(quiet: bool, provider: str | None, as_json: bool) -> None:
    """List the images."""
    images = _ask(provider, lambda manager: manager.images())
    if as_json:
        print_json([_data(image) for image in images])
    elif quiet:
        for image in images:
            echo(image.id)
    else:
        now = time.time()
        print_table(_HEADER, [row for image in images for row in _rows(image, now)])


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=image_names)
@_provider_option
def inspect(names: tuple[str, ...], provider: str | None) -> int:
    """Show all that is known of images, as JSON."""
    from skerry.cli.registry import for_each, tell_failures

    async def work(manager: AsyncSandboxManager) -> Any:
        images = await manager.images()
        return await for_each(names, lambda name: _find(images, name))

    results = _ask(provider, work)
    print_json([_data(result.value) for result in results if result.error is None])
    return tell_failures(results)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=image_names)
@click.option("-f", "--force", is_flag=True, help="Also one with several names.")
@_provider_option
@json_option
def rm(names: tuple[str, ...], force: bool, provider: str | None, as_json: bool) -> int:
    """Remove images that no sandbox is made of."""
    from skerry.cli.registry import for_each, tell_each

    async def work(manager: AsyncSandboxManager) -> Any:
        return await for_each(names, lambda name: manager.remove_image(name, force=force))

    return tell_each(_ask(provider, work), as_json)


def _ask(provider: str | None, work: Callable[[AsyncSandboxManager], Awaitable[T]]) -> T:
    """Do something with a manager that opens no registry, as images are not in it."""
    import asyncio

    from skerry.config import load
    from skerry.manager import AsyncSandboxManager

    async def main() -> T:
        manager = AsyncSandboxManager(load({"provider": provider}))
        try:
            return await work(manager)
        finally:
            await manager.aclose()

    return asyncio.run(main())


async def _find(images: Sequence[Image], name: str) -> Image:
    from skerry.errors import ImageNotFound

    id = name if name.startswith("sha256:") else f"sha256:{name}"
    for image in images:
        is_named = {name, f"{name}:latest"} & {*image.names, *image.digests}
        if is_named or (len(name) >= _SHORT and image.id.startswith(id)):
            return image
    raise ImageNotFound(f"no image is called {name!r}; `skerry image ls` lists those there are")


def _stdin_text() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("-f - reads the Dockerfile from standard input, which is a terminal: pipe it in")
    return sys.stdin.read()


def _tell(image: Image, as_json: bool) -> None:
    if as_json:
        print_json(_data(image))
    else:
        echo(image.id)


def _data(image: Image) -> dict[str, Any]:
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(image)
    return data


def _rows(image: Image, now: float) -> list[tuple[str, ...]]:
    from skerry.units import format_size

    created = f"{format_span(now - image.created_at)} ago" if image.created_at else ""
    rest = (image.id.removeprefix("sha256:")[:_SHORT], format_size(image.size), created, str(image.used_by or ""))
    return [(name, *rest) for name in image.names or ("<none>",)]
