"""`skerry kill`."""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from skerry.cli.completion import references
from skerry.cli.output import json_option

if TYPE_CHECKING:
    from skerry.cli.registry import Result
    from skerry.sandbox import AsyncSandbox


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@click.argument("number", metavar="[PROCESS]", type=int, required=False)
@click.option("-s", "--signal", default="KILL", show_default=True, metavar="SIGNAL", help="Its name or number.")
@json_option
def command(sandbox: str, number: int | None, signal: str, as_json: bool) -> int:
    """Send a signal to a background process, or to all of a sandbox.

    Prints the numbers of those that got it. KILL takes with it all that a process has started.
    """
    chosen = _signal(signal)
    from skerry.cli.registry import tell_each, with_sandbox

    return tell_each(with_sandbox(sandbox, lambda opened: _send(opened, number, chosen)), as_json)


async def _send(sandbox: AsyncSandbox, number: int | None, signal: signals.Signals) -> Sequence[Result]:
    from skerry.cli.registry import for_each

    if number is None:
        running = [each for each in await sandbox.processes.list() if each.background and each.running]
        numbers = [str(process.process) for process in running]
    else:
        numbers = [str(number)]
    tree = signal is signals.SIGKILL
    return await for_each(numbers, lambda each: sandbox.processes.signal(int(each), signal, tree=tree))


def _signal(text: str) -> signals.Signals:
    name = text.upper()
    try:
        if name.isdecimal():
            return signals.Signals(int(name))
        return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except (KeyError, ValueError):
        ctx = click.get_current_context()
        raise click.UsageError(f"--signal: {text!r} is no signal; e.g. TERM or 15", ctx) from None
