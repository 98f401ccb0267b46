"""`skerry snapshot`, `restore` and `fork`: files of sandboxes, kept and used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from skerry.cli.options import env_option, environment, provider_filter, sandbox_argument, snapshot_names
from skerry.cli.output import SHORT_ID, age, json_option, print_list, print_one
from skerry.cli.registry import Result, change_each, list_each, print_listed, print_made, record_data, with_manager
from skerry.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Record
    from skerry.model.spec import SpecOptions
    from skerry.providers.base import Snapshot

_HEADER = ("NAME", "SANDBOX", "SIZE", "CREATED")


@click.group()
def snapshot() -> None:
    """Keep the files of a sandbox, to make others of them or to go back."""


@snapshot.command()
@sandbox_argument
@click.argument("name", metavar="NAME")
@click.option("--memory", is_flag=True, help="Keep all that runs in it too, and its data volume.")
@json_option
def create(sandbox: str, name: str, memory: bool, as_json: bool) -> None:
    """Keep the files of a sandbox as they are now, under a name.

    Its volumes and its processes are no part of that, but with --memory. `create --snapshot NAME`, `restore` and `fork`
    make use of it.
    """
    kept = with_manager(lambda manager: manager.snapshot(sandbox, name, with_memory=memory), doing="keeping its files")
    print_one(as_json, kept, kept.name)


@snapshot.command()
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@provider_filter
@json_option
def ls(quiet: bool, provider: str | None, as_json: bool) -> int:
    """List the snapshots, the oldest first; a provider that does not answer is told as `skerry volume ls` does."""

    async def listed(manager: AsyncSandboxManager) -> tuple[list[Snapshot], list[Result]]:
        return await list_each(manager, "snapshot", provider, manager.snapshots, lambda each: each.created_at)

    def show(snapshots: Sequence[Snapshot]) -> None:
        print_list(snapshots, _HEADER, _row, as_json=False, quiet=quiet, name=lambda each: each.name)

    return print_listed(with_manager(listed, doing="asking the providers"), as_json, show)


def _row(snapshot: Snapshot) -> tuple[str, ...]:
    size, created = format_size(snapshot.size), f"{age(snapshot.created_at)} ago"
    return snapshot.name, snapshot.sandbox[:SHORT_ID], size, created


@snapshot.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=snapshot_names)
@provider_filter
@json_option
def rm(names: tuple[str, ...], provider: str | None, as_json: bool) -> int:
    """Remove snapshots that no sandbox is made of."""
    return change_each(names, as_json, "removing", lambda manager, name: manager.remove_snapshot(name, provider))


@click.command()
@sandbox_argument
@click.argument("snapshot", metavar="SNAPSHOT", shell_complete=snapshot_names)
@env_option
@json_option
def restore(sandbox: str, snapshot: str, env: tuple[str, ...], as_json: bool) -> None:
    """Put the files of a sandbox back to a snapshot.

    It is made anew under its id, and its volumes are kept. What it changed since in other files is gone, and so is the
    environment that it was made with, unless it is given again.
    """
    given = environment(env)
    print_made(lambda manager: manager.restore(sandbox, snapshot, given), as_json, doing="restoring", name=sandbox)


@click.command()
@sandbox_argument
@click.option("--name", metavar="NAME", help="A name for people.")
@click.option("--memory", is_flag=True, help="All that runs in it goes on in the other too.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Make so many of one moment, or none.")
@env_option
@json_option
def fork(sandbox: str, name: str | None, memory: bool, count: int | None, env: tuple[str, ...], as_json: bool) -> None:
    """Make another sandbox with the files that this one has now.

    It is like the first in all but its name, its data volume and its environment. Prints its id.
    """
    options: SpecOptions = {"env": environment(env)}
    if name is not None:
        options["name"] = name
    if count is None:
        print_made(lambda manager: manager.fork(sandbox, with_memory=memory, **options), as_json, doing="forking")
        return

    async def fork_many(manager: AsyncSandboxManager) -> list[Record]:
        made = await manager.fork_many(sandbox, count, with_memory=memory, **options)
        return [await manager.record(each.id) for each in made]

    made = with_manager(fork_many, doing="forking")
    print_one(as_json, [record_data(each) for each in made], *(each.id for each in made))
