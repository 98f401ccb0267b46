"""`skerry restore`."""

from __future__ import annotations

import click

from skerry.cli.completion import references, snapshot_names
from skerry.cli.options import environment
from skerry.cli.output import echo, json_option, print_json, spinner


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@click.argument("snapshot", metavar="SNAPSHOT", shell_complete=snapshot_names)
@click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name.")
@json_option
def command(sandbox: str, snapshot: str, env: tuple[str, ...], as_json: bool) -> None:
    """Put the files of a sandbox back to a snapshot.

    It is made anew under its id, and its volumes are kept. What it changed since in other files is gone, and so is the
    environment that it was made with, unless it is given again.
    """
    from skerry.cli.registry import record_data, with_manager
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record

    async def restore(manager: AsyncSandboxManager) -> Record:
        async with spinner("restoring"):
            return await manager.record((await manager.restore(sandbox, snapshot, environment(env))).id)

    record = with_manager(restore, repair=True)
    if as_json:
        print_json(record_data(record))
    else:
        echo(sandbox)
