"""`skerry image kernel`: what virtual machines boot."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.image_choice import ask
from skerry.cli.output import echo, format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager
    from skerry.vm.images.kernels import KernelInfo

_HEADER = ("KEY", "VERSION", "FROM", "CREATED")
_SHORT = 12


@click.group()
def command() -> None:
    """Fetch, build, list and remove the kernels that virtual machines boot."""


@command.command()
@json_option
def ls(as_json: bool) -> None:
    """List the kernels; machines boot the first."""
    found = ask(None, True, lambda manager: manager.kernels())
    if as_json:
        print_json([_data(each) for each in found])
    else:
        print_table(_HEADER, [_row(each, time.time()) for each in found])


@command.command()
@json_option
def fetch(as_json: bool) -> None:
    """Get the newest kernel that Debian makes for clouds."""
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> KernelInfo:
        with shown("fetching a kernel", as_json) as on_progress:
            return await manager.fetch_kernel(on_progress=on_progress)

    _tell(ask(None, True, work), as_json)


@command.command()
@json_option
def build(as_json: bool) -> None:
    """Build a kernel from Debian's source: it boots in half the time.

    That takes a quarter of an hour of a processor, and a compiler.
    """
    from skerry.cli.progress import shown

    async def work(manager: AsyncSandboxManager) -> KernelInfo:
        with shown("building a kernel", as_json) as on_progress:
            return await manager.build_kernel(on_progress=on_progress)

    _tell(ask(None, True, work), as_json)


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@json_option
def rm(keys: tuple[str, ...], as_json: bool) -> int:
    """Remove kernels."""
    from skerry.cli.registry import for_each, tell_each

    async def work(manager: AsyncSandboxManager) -> Any:
        return await for_each(keys, lambda key: manager.remove_kernel(key))

    return tell_each(ask(None, True, work), as_json)


def _tell(kernel: KernelInfo, as_json: bool) -> None:
    if as_json:
        print_json(_data(kernel))
    else:
        echo(kernel.key)


def _data(kernel: KernelInfo) -> dict[str, Any]:
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(kernel)
    return data


def _row(kernel: KernelInfo, now: float) -> tuple[str, ...]:
    made = f"{format_span(now - kernel.created_at)} ago"
    return kernel.key[:_SHORT], kernel.version, kernel.package, made
