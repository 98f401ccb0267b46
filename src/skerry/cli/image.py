"""`skerry image`: images that boxes are made of, and kernels that machines boot."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from skerry.cli.options import all_of, environment, load_config, provider_names, refuse_if
from skerry.cli.output import age, json_option, print_json, print_list, print_one, print_table, show_progress, to_data
from skerry.cli.registry import Result, for_each, open_manager, print_failures, print_results
from skerry.errors import ImageNotFound, SkerryError
from skerry.units import format_size

if TYPE_CHECKING:
    from skerry.cli.registry import Change, Work
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.providers.base import Image, OnProgress
    from skerry.vm.images.kernels import KernelInfo

    Making = Callable[[AsyncSandboxManager, OnProgress], Awaitable[Image | KernelInfo]]

T = TypeVar("T")

_IMAGES = ("NAME", "ID", "SIZE", "CREATED", "USED BY")
_KERNELS = ("KEY", "VERSION", "FROM", "CREATED")
_SHORT = 12
_BUILDER = "The provider that builds it, and gives it to the one it is for; vmdocker does in a machine of its own."
_WHOSE = "Whose images; else the configured provider's."
_provider_options = all_of(
    click.option("--provider", metavar="NAME", shell_complete=provider_names, help=_WHOSE),
    click.option("--vm", is_flag=True, help="Images for virtual machines, which all providers of those share."),
)


def _with_manager(provider: str | None, vm: bool, work: Work[T]) -> T:
    """Work with a manager that opens no registry, as images are not in it."""

    async def main() -> T:
        config = load_config({"provider": provider})
        if vm and config.url:
            refuse_if(provider is None, "--vm: say with --provider which of the server's providers makes its machines")
        elif vm:
            from skerry.manager.images import provider_of_machines

            config = load_config({"provider": provider_of_machines(config)})
        async with aclosing(open_manager(config, repair=True)) as manager:
            return await work(manager)

    return asyncio.run(main())


def _make(title: str, provider: str | None, vm: bool, as_json: bool, work: Making, name: str = "id") -> None:
    """Make an image or a kernel, show the progress and print its name."""

    async def main(manager: AsyncSandboxManager) -> Image | KernelInfo:
        with show_progress(title, as_json) as on_progress:
            return await work(manager, on_progress)

    made = _with_manager(provider, vm, main)
    print_one(as_json, made, getattr(made, name))


def _remove(names: Sequence[str], provider: str | None, vm: bool, as_json: bool, remove: Change) -> int:
    """Remove images or kernels, print the results and give the exit code."""
    results = _with_manager(provider, vm, lambda manager: for_each(names, lambda name: remove(manager, name)))
    return print_results(results, as_json)


def image_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of images; an engine that does not answer offers none."""
    try:
        images = _with_manager(ctx.params.get("provider"), bool(ctx.params.get("vm")), lambda manager: manager.images())
    except SkerryError:
        return []
    return [name for image in images for name in image.names if name.startswith(incomplete)]


@click.group()
def image() -> None:
    """Build, import, list and remove the images that boxes are made of."""


@image.command()
@click.argument("path", metavar="[PATH]", type=click.Path(), required=False)
@click.option("-t", "--tag", "name", metavar="NAME", help="What the image is called; else it is named by its text.")
@click.option("-f", "--file", "dockerfile", metavar="FILE", help="The Dockerfile, or - for stdin.  [PATH/Dockerfile]")
@click.option("--recipe", metavar="NAME", help="For machines, without a Dockerfile: minimal, debian-devbox, docker.")
@click.option("--build-arg", "args", multiple=True, metavar="K=V|K", help="A value for an ARG, or a variable of yours.")
@click.option("--target", metavar="STAGE", help="Build this stage and none after it.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option("--network", type=click.Choice(["none", "bridge"]), default="none", help="What RUN steps have.  [none]")
@click.option("--memory", metavar="SIZE", help="The most that a RUN step may take.  [2G]")
@click.option("--builder", metavar="NAME", shell_complete=provider_names, help=_BUILDER)
@_provider_options
@json_option
def build(
    path: str | None, name: str | None, dockerfile: str | None, recipe: str | None, args: tuple[str, ...],
    target: str | None, no_cache: bool, network: str, memory: str | None, builder: str | None, provider: str | None,
    vm: bool, as_json: bool,
) -> None:  # fmt: skip
    """Build an image from a Dockerfile and the folder PATH, which is the current one if none is given.

    Its RUN steps are root in a container, with fewer walls than a sandbox has: what strangers wrote wants --builder
    vmdocker.

    Machines and Incus build nothing themselves: Docker, Podman or Buildah does, the first that is there, and what comes
    of it is imported.

    With --vm it is an image for virtual machines: by a recipe, from a Dockerfile, or of what is at PATH, as `skerry
    image import` takes it.
    """
    values = environment(args)
    context = path or "."
    is_source = vm and path is not None and recipe is None and dockerfile is None and _is_no_context(Path(path))
    if is_source and name is None:
        raise click.UsageError("say with -t what the image is called")
    text: str | Path = ""
    if recipe is None and not is_source:
        text = _stdin_text() if dockerfile == "-" else Path(dockerfile or f"{context}/Dockerfile")

    def work(manager: AsyncSandboxManager, show: OnProgress) -> Awaitable[Image]:
        if is_source:
            return manager.import_image(context, name or "", on_progress=show)
        return manager.build_base_image(
            text, name=name, context=context, args=values, target=target, no_cache=no_cache, recipe=recipe,
            network=network, memory=memory, builder=builder, on_progress=show,
        )  # fmt: skip

    _make(f"building {name or recipe or 'an image'}", provider, vm, as_json, work)


@image.command()
@click.argument("name", metavar="NAME")
@_provider_options
@json_option
def pull(name: str, provider: str | None, vm: bool, as_json: bool) -> None:
    """Get an image from its registry."""
    _make(f"pulling {name}", provider, vm, as_json, lambda manager, show: manager.pull_image(name, on_progress=show))


@image.command(name="import")
@click.argument("source", metavar="PATH", type=click.Path(exists=True))
@click.argument("name", metavar="NAME")
@_provider_options
@json_option
def import_(source: str, name: str, provider: str | None, vm: bool, as_json: bool) -> None:
    """Make an image of what is at PATH.

    That is an image archive as `docker save` writes it, an OCI layout or a root file system; a folder or a tar,
    which may be compressed.
    """
    title = f"importing {name}"
    _make(title, provider, vm, as_json, lambda manager, show: manager.import_image(source, name, on_progress=show))


@image.command()
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@_provider_options
@json_option
def ls(quiet: bool, provider: str | None, vm: bool, as_json: bool) -> None:
    """List the images."""
    images = _with_manager(provider, vm, lambda manager: manager.images())
    if as_json or quiet:
        print_one(as_json, images, *(each.id for each in images))
    else:
        print_table(_IMAGES, [row for each in images for row in _image_rows(each)])


@image.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=image_names)
@_provider_options
def inspect(names: tuple[str, ...], provider: str | None, vm: bool) -> int:
    """Show all that is known of images, as JSON."""

    async def work(manager: AsyncSandboxManager) -> list[Result]:
        images = await manager.images()
        return await for_each(names, lambda name: _find(images, name))

    results = _with_manager(provider, vm, work)
    print_json([to_data(result.value) for result in results if result.error is None])
    return print_failures(results)


@image.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=image_names)
@click.option("-f", "--force", is_flag=True, help="Also one with several names.")
@_provider_options
@json_option
def rm(names: tuple[str, ...], force: bool, provider: str | None, vm: bool, as_json: bool) -> int:
    """Remove images that no sandbox is made of."""
    return _remove(names, provider, vm, as_json, lambda manager, name: manager.remove_image(name, force=force))


@image.group()
def kernel() -> None:
    """Fetch, build, list and remove the kernels that virtual machines boot."""


@kernel.command("ls")
@json_option
def list_kernels(as_json: bool) -> None:
    """List the kernels; machines boot the first."""
    print_list(
        _with_manager(None, True, lambda manager: manager.kernels()),
        _KERNELS,
        lambda each: (each.key[:_SHORT], each.version, each.package, f"{age(each.created_at)} ago"),
        as_json=as_json,
    )


@kernel.command("fetch")
@json_option
def fetch_kernel(as_json: bool) -> None:
    """Get the newest kernel that Debian makes for clouds."""
    _make("fetching a kernel", None, True, as_json, lambda manager, show: manager.fetch_kernel(on_progress=show), "key")


@kernel.command("build")
@json_option
def build_kernel(as_json: bool) -> None:
    """Build a kernel from Debian's source: it boots in half the time.

    That takes a quarter of an hour of a processor, and a compiler.
    """
    _make("building a kernel", None, True, as_json, lambda manager, show: manager.build_kernel(on_progress=show), "key")


@kernel.command("rm")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@json_option
def remove_kernels(keys: tuple[str, ...], as_json: bool) -> int:
    """Remove kernels."""
    return _remove(keys, None, True, as_json, lambda manager, key: manager.remove_kernel(key))


async def _find(images: Sequence[Image], name: str) -> Image:
    id = name if name.startswith("sha256:") else f"sha256:{name}"
    for image in images:
        is_named = {name, f"{name}:latest"} & {*image.names, *image.digests}
        if is_named or (len(name) >= _SHORT and image.id.startswith(id)):
            return image
    raise ImageNotFound(f"no image is called {name!r}; `skerry image ls` lists those there are")


def _is_no_context(path: Path) -> bool:
    """Whether it is an image already or the files of one: a file, or a folder without a Dockerfile."""
    return path.is_file() or (path.is_dir() and not (path / "Dockerfile").exists())


def _stdin_text() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("-f - reads the Dockerfile from standard input, which is a terminal: pipe it in")
    return sys.stdin.read()


def _image_rows(image: Image) -> list[tuple[str, ...]]:
    created = f"{age(image.created_at)} ago" if image.created_at else ""
    rest = (image.id.removeprefix("sha256:")[:_SHORT], format_size(image.size), created, str(image.used_by or ""))
    return [(name, *rest) for name in image.names or ("<none>",)]
