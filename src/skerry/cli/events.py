"""`skerry events`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import click

from skerry.cli.output import SHORT_ID, echo, json_option, print_json_line, printable

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Event


@click.command()
@click.option("--since", type=int, default=0, metavar="SEQ", help="Only what came after the event of this number.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@json_option
def command(since: int, follow: bool, as_json: bool) -> None:
    """Tell what happened to all sandboxes.

    One line for each event, the oldest first; with --json, one object on each. Every event has a number in one order:
    who comes back with the last one by --since has missed none.
    """
    from skerry.cli.registry import with_manager

    with_manager(lambda manager: _tell(manager, since, follow, as_json))


async def _tell(manager: AsyncSandboxManager, since: int, follow: bool, as_json: bool) -> None:
    import msgspec

    async for event in manager.events(after=since, follow=follow):
        if as_json:
            print_json_line(msgspec.to_builtins(event))
        else:
            echo(_line(event))


def _line(event: Event) -> str:
    time = datetime.datetime.fromtimestamp(event.time).astimezone().isoformat(timespec="milliseconds")
    rest = [event.cause or "", *(f"{key}={value}" for key, value in event.data.items())]
    return printable(f"{event.seq:>6}  {time}  {event.sandbox[:SHORT_ID]}  {event.kind:<10} {' '.join(rest)}").rstrip()
