"""`skerry volume`: what outlives a sandbox."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import provider_names, volume_names
from skerry.cli.output import SHORT_ID, echo, format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from skerry.providers.base import Volume

_HEADER = ("NAME", "KIND", "PROJECT", "OF", "SIZE", "IN USE", "CREATED")
provider_option = click.option(
    "--provider", metavar="NAME", shell_complete=provider_names, help="Only those of this provider."
)


@click.group()
def command() -> None:
    """List and remove volumes: the data of sandboxes, and the caches of projects."""


@command.command()
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("-s", "--size", "sizes", is_flag=True, help="Tell their sizes, which takes longer.")
@provider_option
@json_option
def ls(quiet: bool, sizes: bool, provider: str | None, as_json: bool) -> None:
    """List the volumes."""
    from skerry.cli.registry import with_manager

    tell(
        with_manager(lambda manager: manager.volumes(sizes=sizes, provider=provider), doing="asking the providers"),
        quiet,
        as_json,
    )


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="VOLUME...", shell_complete=volume_names)
@provider_option
@json_option
def rm(names: tuple[str, ...], provider: str | None, as_json: bool) -> int:
    """Remove volumes that no sandbox uses, and all that is in them."""
    from skerry.cli.registry import for_each, tell_each, with_manager

    async def remove(manager: Any) -> Any:
        return await for_each(names, lambda name: manager.remove_volume(name, provider))

    return tell_each(with_manager(remove, doing="removing"), as_json)


def tell(volumes: Sequence[Volume], quiet: bool, as_json: bool) -> None:
    """Volumes as a table, as names, or as JSON."""
    import msgspec

    if as_json:
        print_json(msgspec.to_builtins(volumes))
    elif quiet:
        for volume in volumes:
            echo(volume.name)
    else:
        now = time.time()
        print_table(_HEADER, [_row(volume, now) for volume in volumes])


def _row(volume: Volume, now: float) -> tuple[str, ...]:
    from skerry.units import format_size

    of = volume.label or (volume.sandbox or "")[:SHORT_ID]
    size = "" if volume.size is None else format_size(volume.size)
    created = "" if volume.created_at is None else f"{format_span(now - volume.created_at)} ago"
    return volume.name, volume.kind, volume.project, of, size, "yes" if volume.in_use else "", created
