"""`skerry image`: what boxes are made of."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli import image_kernel
from skerry.cli.image_choice import ask, provider_options
from skerry.cli.output import echo, format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.manager import AsyncSandboxManager
    from skerry.providers.base import Image

_HEADER = ("NAME", "ID", "SIZE", "CREATED", "USED BY")
_SHORT = 12


def image_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of images, for a shell to complete; an engine that does not answer offers none."""
    from skerry.errors import SkerryError

    try:
        images = ask(ctx.params.get("provider"), bool(ctx.params.get("vm")), lambda manager: manager.images())
    except SkerryError:
        return []
    return [name for image in images for name in image.names if name.startswith(incomplete)]


@click.group()
def command() -> None:
    """Build, import, list and remove the images that boxes are made of."""


@command.command()
@click.argument("path", metavar="[PATH]", type=click.Path(), required=False)
@click.option("-t", "--tag", "name", metavar="NAME", help="What the image is called; else it is named by its text.")
@click.option("-f", "--file", "dockerfile", metavar="FILE", help="The Dockerfile, or - for stdin.  [PATH/Dockerfile]")
@click.option("--recipe", metavar="NAME", help="For machines, without a Dockerfile: minimal, debian-devbox, docker.")
@click.option("--build-arg", "args", multiple=True, metavar="K=V|K", help="A value for an ARG, or a variable of yours.")
@click.option("--target", metavar="STAGE", help="Build this stage and none after it.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@provider_options
@json_option
def build(
    path: str | None, name: str | None, dockerfile: str | None, recipe: str | None, args: tuple[str, ...],
    target: str | None, no_cache: bool, provider: str | None, vm: bool, as_json: bool,
) -> None:  # fmt: skip
    """Build an image from a Dockerfile and the folder PATH, which is the current one if none is given.

    With --vm it is an image for virtual machines: by a recipe, from a Dockerfile that Docker or Podman runs, or of what
    is at PATH, as `skerry image import` takes it.
    """
    from pathlib import Path

    from skerry.cli.options import environment
    from skerry.cli.progress import shown

    values = environment(args)
    context = path or "."
    is_source = vm and path is not None and recipe is None and dockerfile is None and _is_no_context(Path(path))
    if is_source and name is None:
        raise click.UsageError("say with -t what the image is called")
    text: str | Path = ""
    if recipe is None and not is_source:
        text = _stdin_text() if dockerfile == "-" else Path(dockerfile or f"{context}/Dockerfile")

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"building {name or recipe or 'an image'}", as_json) as on_progress:
            if is_source:
                return await manager.import_image(context, name or "", on_progress=on_progress)
            return await manager.build_base_image(
                text, name=name, context=context, args=values, target=target, no_cache=no_cache, recipe=recipe,
                on_progress=on_progress,
            )  # fmt: skip

    _tell(ask(provider, vm, work), as_json)


@command.command()
@click.argument("name", metavar="NAME")
@provider_options
@json_option
def pull(name: str, provider: str | None, vm: bool, as_json: bool) -> None:
    """Get an image from its registry."""
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"pulling {name}", as_json) as on_progress:
            return await manager.pull_image(name, on_progress=on_progress)

    _tell(ask(provider, vm, work), as_json)


@command.command(name="import")
@click.argument("source", metavar="PATH", type=click.Path(exists=True))
@click.argument("name", metavar="NAME")
@provider_options
@json_option
def import_(source: str, name: str, provider: str | None, vm: bool, as_json: bool) -> None:
    """Make an image of what is at PATH.

    That is an image archive as `docker save` writes it, an OCI layout or a root file system; a folder or a tar,
    which may be compressed.
    """
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> Image:
        with shown(f"importing {name}", as_json) as on_progress:
            return await manager.import_image(source, name, on_progress=on_progress)

    _tell(ask(provider, vm, work), as_json)


@command.command()
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@provider_options
@json_option
def ls(quiet: bool, provider: str | None, vm: bool, as_json: bool) -> None:
    """List the images."""
    images = ask(provider, vm, lambda manager: manager.images())
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
@provider_options
def inspect(names: tuple[str, ...], provider: str | None, vm: bool) -> int:
    """Show all that is known of images, as JSON."""
    from skerry.cli.registry import for_each, tell_failures

    async def work(manager: AsyncSandboxManager) -> Any:
        images = await manager.images()
        return await for_each(names, lambda name: _find(images, name))

    results = ask(provider, vm, work)
    print_json([_data(result.value) for result in results if result.error is None])
    return tell_failures(results)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=image_names)
@click.option("-f", "--force", is_flag=True, help="Also one with several names.")
@provider_options
@json_option
def rm(names: tuple[str, ...], force: bool, provider: str | None, vm: bool, as_json: bool) -> int:
    """Remove images that no sandbox is made of."""
    from skerry.cli.registry import for_each, tell_each

    async def work(manager: AsyncSandboxManager) -> Any:
        return await for_each(names, lambda name: manager.remove_image(name, force=force))

    return tell_each(ask(provider, vm, work), as_json)


command.add_command(image_kernel.command, "kernel")


async def _find(images: Sequence[Image], name: str) -> Image:
    from skerry.errors import ImageNotFound

    id = name if name.startswith("sha256:") else f"sha256:{name}"
    for image in images:
        is_named = {name, f"{name}:latest"} & {*image.names, *image.digests}
        if is_named or (len(name) >= _SHORT and image.id.startswith(id)):
            return image
    raise ImageNotFound(f"no image is called {name!r}; `skerry image ls` lists those there are")


def _is_no_context(path: Path) -> bool:
    """What is a file, or a folder without a Dockerfile, is an image already or the files of one."""
    return path.is_file() or (path.is_dir() and not (path / "Dockerfile").exists())


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
