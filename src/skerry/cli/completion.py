"""`skerry completion`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from skerry.cli.output import SHORT_ID

if TYPE_CHECKING:
    from skerry.records import Record


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
