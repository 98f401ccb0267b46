"""`skerry run` and `skerry create`: new sandboxes."""

from __future__ import annotations

from typing import Any

import click

from skerry.cli.options import check_command, command_options, make_spec, spec_options
from skerry.cli.output import json_option

_pool_option = click.option("--pool", is_flag=True, help="Take a warm sandbox of `skerry pool run`, if there is one.")


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Exit codes: the command's own; 124 timeout, 125 skerry failed, 126 cannot run, 127 no such command.",
)
@command_options
@spec_options
@click.option("--rm/--keep", "remove", default=True, help="Remove the sandbox at the end (default), or keep it.")
@_pool_option
@json_option
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(argv: tuple[str, ...], remove: bool, pool: bool, as_json: bool, **options: Any) -> int:
    """Run a command in a new sandbox.

    Without a COMMAND and with -t, the box's shell. Options end at the first word that is none.
    """
    joined = {name: options.pop(name) for name in ("interactive", "tty", "timeout")}
    check_command(argv, joined["tty"], as_json)
    config, spec = make_spec(options)
    from skerry.cli.job import make_job, new_sandbox, run_job

    return run_job(make_job(argv, as_json, **joined), new_sandbox(config, spec, keep=not remove, pool=pool))


@click.command()
@spec_options
@click.option("--key", metavar="KEY", help="The same create with the same key again gives the same sandbox.")
@_pool_option
@json_option
def create(key: str | None, pool: bool, as_json: bool, **options: Any) -> None:
    """Make a sandbox that lives until it is removed or its time is over.

    Prints its id.
    """
    if key is not None and pool:
        raise click.UsageError("--key is for a new sandbox, --pool for one that is there already")
    config, spec = make_spec(options)
    from skerry.cli.registry import create_sandbox, print_made

    print_made(lambda manager: create_sandbox(manager, spec, key=key, pool=pool), as_json, config=config)
