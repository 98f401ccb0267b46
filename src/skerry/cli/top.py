"""`skerry top`."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

import click

from skerry.cli.completion import references
from skerry.cli.output import format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from skerry.results import ProcessInfo

_HEADER = ("PROCESS", "PID", "STATE", "AGE", "KIND", "TAG", "COMMAND")


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@json_option
def command(sandbox: str, as_json: bool) -> None:
    """List the processes that were started in a sandbox.

    Those in the background are listed after their end too. PROCESS is the number that attach, logs and kill take.
    """
    import msgspec

    from skerry.cli.registry import with_sandbox

    processes = with_sandbox(sandbox, lambda opened: opened.processes.list())
    if as_json:
        print_json(msgspec.to_builtins(processes))
    else:
        now = time.time()
        print_table(_HEADER, [_row(process, now) for process in processes])


def _row(process: ProcessInfo, now: float) -> tuple[str, ...]:
    kinds = (("background", process.background), ("terminal", process.pty))
    return (
        str(process.process),
        str(process.pid),
        _state(process),
        format_span(now - process.started),
        ",".join(kind for kind, is_it in kinds if is_it),
        process.tag or "",
        shlex.join(process.argv),
    )


def _state(process: ProcessInfo) -> str:
    if process.running:
        return "running"
    return f"signal {process.signal}" if process.signal is not None else f"exit {process.exit_code}"
