"""`skerry explain`."""

from __future__ import annotations

import datetime

import click

from skerry.cli.completion import references
from skerry.cli.output import echo, json_option, print_json, printable


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@json_option
def command(sandbox: str, as_json: bool) -> None:
    """Tell when a sandbox will end and why, or why it did."""
    import msgspec

    from skerry.cli.registry import with_manager

    told = with_manager(lambda manager: manager.explain(sandbox))
    if as_json:
        print_json(msgspec.to_builtins(told))
        return
    echo(f"sandbox {told.id} is {told.state}")
    if told.ends_at is not None:
        end = datetime.datetime.fromtimestamp(told.ends_at).astimezone()
        echo(f"it ends at {end.isoformat(sep=' ', timespec='seconds')} at the latest")
    for reason in told.why:
        echo(printable(reason))
    for line in told.detail.splitlines():
        echo(f"  {printable(line)}")
