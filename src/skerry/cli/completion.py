"""`skerry completion`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from skerry.cli.output import SHORT_ID

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record

T = TypeVar("T")


def provider_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The installed providers, for a shell to complete."""
    from skerry import providers

    return [name for name in providers.names() if name.startswith(incomplete)]


def references(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names and ids in the registry, for a shell to complete; a registry that cannot be read offers none."""
    import asyncio

    from skerry.errors import SkerryError

    try:
        records = asyncio.run(_live_records())
    except SkerryError:
        return []
    ids = [record.id if len(incomplete) > SHORT_ID else record.id[:SHORT_ID] for record in records]
    names = [record.name for record in records if record.name]
    return [word for word in (*names, *ids) if word.startswith(incomplete)]


def snapshot_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of snapshots, for a shell to complete."""
    return _asked(lambda manager: manager.snapshots(), lambda snapshot: snapshot.name, incomplete)


def volume_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of volumes, for a shell to complete."""
    return _asked(lambda manager: manager.volumes(), lambda volume: volume.name, incomplete)


def cache_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The tools that have a cache, for a shell to complete."""
    return _asked(lambda manager: manager.volumes("cache"), lambda volume: volume.label, incomplete)


def _asked(
    ask: Callable[[AsyncSandboxManager], Awaitable[list[T]]], name: Callable[[T], str], incomplete: str
) -> list[str]:
    """What providers hold; one that does not answer offers none."""
    from skerry.cli.registry import with_manager
    from skerry.errors import SkerryError

    try:
        found = with_manager(ask)
    except SkerryError:
        return []
    return sorted({name(each) for each in found if name(each).startswith(incomplete)})


async def _live_records() -> list[Record]:
    from skerry.config import load
    from skerry.store import Store

    store = await Store.open(load().database)
    try:
        return await store.list()
    finally:
        await store.aclose()


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for a shell.

    For bash: eval "$(skerry completion bash)"
    """
    from click.shell_completion import get_completion_class

    from skerry.cli import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "skerry", "_SKERRY_COMPLETE").source())
