"""`skerry start`."""

from __future__ import annotations

import click

from skerry.cli.completion import references
from skerry.cli.options import environment
from skerry.cli.output import json_option


@click.command()
@click.argument("sandboxes", nargs=-1, required=True, metavar="SANDBOX...", shell_complete=references)
@click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name.")
@json_option
def command(sandboxes: tuple[str, ...], env: tuple[str, ...], as_json: bool) -> int:
    """Start sandboxes that were stopped.

    Their files are as they were. The environment that they were made with is gone, unless it is given again.
    """
    from skerry.cli.registry import change_each

    given = environment(env)
    return change_each(sandboxes, as_json, "starting", lambda manager, each: manager.start(each, given))
