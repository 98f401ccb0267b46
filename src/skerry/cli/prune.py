"""`skerry prune`."""

from __future__ import annotations

import click

from skerry.cli.options import duration
from skerry.cli.output import echo, json_option, print_json


@click.command()
@click.option("--older", default="0s", metavar="TIME", help="Only what ended longer ago than this, e.g. 7d.")
@json_option
def command(older: str, as_json: bool) -> None:
    """Forget the sandboxes that have ended.

    Only their records and events go; no sandbox that lives is touched.
    """
    older_s = duration(older, "--older") or 0.0
    from skerry.cli.registry import with_manager

    count = with_manager(lambda manager: manager.prune(older_s=older_s), repair=True)
    if as_json:
        print_json({"removed": count})
    else:
        echo(f"{count} record{'' if count == 1 else 's'} removed")
