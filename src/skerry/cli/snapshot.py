"""`skerry snapshot`: the files of sandboxes as they once were."""

from __future__ import annotations

import time
from typing import Any

import click

from skerry.cli.completion import provider_names, references, snapshot_names
from skerry.cli.output import SHORT_ID, echo, format_span, json_option, print_json, print_table

_HEADER = ("NAME", "SANDBOX", "SIZE", "CREATED")
_provider_option = click.option(
    "--provider", metavar="NAME", shell_complete=provider_names, help="Only those of this provider."
)


@click.group()
def command() -> None:
    """Keep the files of a sandbox, to make others of them or to go back."""


@command.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@click.argument("name", metavar="NAME")
@json_option
def create(sandbox: str, name: str, as_json: bool) -> None:
    """Keep the files of a sandbox as they are now, under a name.

    Its volumes and its processes are no part of that. `create --snapshot NAME`, `restore` and `fork` make use of it.
    """
    import msgspec

    from skerry.cli.registry import with_manager

    snapshot = with_manager(lambda manager: manager.snapshot(sandbox, name), doing="keeping its files")
    if as_json:
        print_json(msgspec.to_builtins(snapshot))
    else:
        echo(snapshot.name)


@command.command()
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@_provider_option
@json_option
def ls(quiet: bool, provider: str | None, as_json: bool) -> None:
    """List the snapshots, the oldest first."""
    import msgspec

    from skerry.cli.registry import with_manager
    from skerry.units import format_size

    snapshots = with_manager(lambda manager: manager.snapshots(provider), doing="asking the providers")
    if as_json:
        print_json(msgspec.to_builtins(snapshots))
    elif quiet:
        for each in snapshots:
            echo(each.name)
    else:
        now = time.time()
        rows = [
            (each.name, each.sandbox[:SHORT_ID], format_size(each.size), f"{format_span(now - each.created_at)} ago")
            for each in snapshots
        ]
        print_table(_HEADER, rows)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=snapshot_names)
@_provider_option
@json_option
def rm(names: tuple[str, ...], provider: str | None, as_json: bool) -> int:
    """Remove snapshots that no sandbox is made of."""
    from skerry.cli.registry import for_each, tell_each, with_manager

    async def remove(manager: Any) -> Any:
        return await for_each(names, lambda name: manager.remove_snapshot(name, provider))

    return tell_each(with_manager(remove, doing="removing"), as_json)
