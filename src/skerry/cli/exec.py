"""`skerry exec`: a command in a sandbox that is there, as if it ran here."""

from __future__ import annotations

import click

from skerry.cli.completion import references
from skerry.cli.options import command_options, duration, environment, refuse_what_cannot_run
from skerry.cli.output import echo, json_option, print_json


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Exit codes: the command's own; 124 timeout, 125 skerry failed, 126 cannot run, 127 no such command.",
)
@command_options
@click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name.")
@click.option("-w", "--workdir", "cwd", metavar="DIR", help="The folder in the box to start in.")
@click.option("-u", "--user", metavar="USER", help="A user name, UID or UID:GID of the box.")
@click.option("-d", "--detach", is_flag=True, help="Start it in the background and print its number.")
@json_option
@click.argument("reference", metavar="SANDBOX", shell_complete=references)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    reference: str,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    timeout: str | None,
    env: tuple[str, ...],
    cwd: str | None,
    user: str | None,
    detach: bool,
    as_json: bool,
) -> int:
    """Run a command in a sandbox.

    Without a COMMAND and with -t, the box's shell.
    """
    argv = argv[1:] if argv[:1] == ("--",) else argv
    refuse_what_cannot_run(argv, tty, as_json)
    from skerry.cli.registry import open_sandbox, with_sandbox
    from skerry.cli.running import Job, run_joined
    from skerry.sandbox import AsyncSandbox

    job = Job(
        argv=argv or None,
        stdin=interactive or tty,
        tty=tty,
        timeout_s=duration(timeout, "--timeout"),
        as_json=as_json,
        env=environment(env),
        cwd=cwd,
        user=user,
        background=detach,
    )
    if not detach:
        return run_joined(job, open_sandbox(reference))

    async def start(sandbox: AsyncSandbox) -> tuple[str, int | None]:
        return sandbox.id, (await job.start(sandbox)).number

    id, number = with_sandbox(reference, start)
    if as_json:
        print_json({"sandbox": id, "process": number})
    else:
        echo(str(number))
    return 0
