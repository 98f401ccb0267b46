"""`skerry run`: a command in a sandbox of its own, as if it ran here."""

from __future__ import annotations

import sys
from typing import Any

import click

from skerry.cli.options import make_spec, spec_options
from skerry.cli.output import json_option, say


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Exit codes: the command's own; 124 timeout, 125 skerry failed, 126 cannot run, 127 no such command.",
)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on to the command.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal: this one.")
@spec_options
@click.option("--timeout", metavar="TIME", help="End the command after this, e.g. 30s.")
@click.option("--rm/--keep", "remove", default=True, help="Remove the sandbox at the end (default), or keep it.")
@json_option
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    timeout: str | None,
    remove: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a command in a new sandbox.

    Without a COMMAND and with -t, the box's shell. Options end at the first word that is none.
    """
    _refuse_what_cannot_be(argv, tty, as_json)
    config, spec = make_spec(options)
    from skerry.cli.running import Job, run_job
    from skerry.spec import Network
    from skerry.units import parse_duration

    if spec.network is Network.HOST:
        say("warning: --network host shares this machine's network with the sandbox, its local services included")
    job = Job(
        argv=argv or None,
        stdin=interactive or tty,
        tty=tty,
        timeout_s=None if timeout is None else parse_duration(timeout, "--timeout"),
        keep=not remove,
        as_json=as_json,
    )
    return run_job(job, spec, config.load_provider(spec.provider))


def _refuse_what_cannot_be(argv: tuple[str, ...], tty: bool, as_json: bool) -> None:
    ctx = click.get_current_context()
    if tty and not (sys.stdin and sys.stdin.isatty()):
        raise click.UsageError("-t needs a terminal, and standard input is none: leave -t out, -i is enough", ctx)
    if tty and as_json:
        raise click.UsageError("--json and -t exclude each other: a terminal's output is not data", ctx)
    if not argv and not tty:
        raise click.UsageError("no command: write it after --, or use -it for a shell", ctx)
