"""`skerry fork`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from skerry.cli.completion import references
from skerry.cli.options import environment
from skerry.cli.output import echo, json_option, print_json, spinner

if TYPE_CHECKING:
    from skerry.spec import SpecOptions


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@click.option("--name", metavar="NAME", help="A name for people.")
@click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name.")
@json_option
def command(sandbox: str, name: str | None, env: tuple[str, ...], as_json: bool) -> None:
    """Make another sandbox with the files that this one has now.

    It is like the first in all but its name, its data volume and its environment. Prints its id.
    """
    from skerry.cli.registry import record_data, with_manager
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record

    options: SpecOptions = {"env": environment(env)}
    if name is not None:
        options["name"] = name

    async def fork(manager: AsyncSandboxManager) -> Record:
        async with spinner("forking"):
            return await manager.record((await manager.fork(sandbox, **options)).id)

    record = with_manager(fork, repair=True)
    if as_json:
        print_json(record_data(record))
    else:
        echo(record.id)
