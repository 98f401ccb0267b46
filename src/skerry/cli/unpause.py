"""`skerry unpause`."""

from __future__ import annotations

import click

from skerry.cli.completion import references
from skerry.cli.output import json_option


@click.command()
@click.argument("sandboxes", nargs=-1, required=True, metavar="SANDBOX...", shell_complete=references)
@json_option
def command(sandboxes: tuple[str, ...], as_json: bool) -> int:
    """Let paused sandboxes go on.

    Their processes go on where they stood.
    """
    from skerry.cli.registry import change_each

    return change_each(sandboxes, as_json, "letting them go on", lambda manager, each: manager.resume(each))
