"""`skerry attach`."""

from __future__ import annotations

import sys

import click

from skerry.cli.completion import references
from skerry.cli.options import refuse_what_cannot_run


@click.command()
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on, also when it is no terminal.")
@click.option("-t", "--tty", is_flag=True, help="Fail unless this is a terminal, which is then used as one.")
@click.option("-u", "--user", metavar="USER", help="Whose shell: a user name, UID or UID:GID of the box.")
@click.argument("reference", metavar="SANDBOX", shell_complete=references)
@click.argument("number", metavar="[PROCESS]", type=int, required=False)
def command(reference: str, number: int | None, user: str | None, interactive: bool, tty: bool) -> int:
    """Join a background process, or a shell of the sandbox.

    A process tells what it said last, then what it says. Ctrl-P Ctrl-Q leaves one that has a terminal, Ctrl-C any
    other; it lives on. Without a PROCESS it is a new shell.
    """
    is_terminal = bool(sys.stdin and sys.stdin.isatty())
    refuse_what_cannot_run(("sh",), tty, as_json=False)
    if user is not None and number is not None:
        raise click.UsageError("-u is for a new shell; a PROCESS has its user", click.get_current_context())
    from skerry.cli.registry import open_sandbox, with_sandbox
    from skerry.cli.running import Job, run_joined
    from skerry.sandbox import AsyncSandbox

    async def has_terminal(sandbox: AsyncSandbox) -> bool:
        return any(each.process == number and each.pty for each in await sandbox.processes.list())

    if number is None:
        job = Job(argv=None if is_terminal else ("sh",), stdin=True, tty=is_terminal, user=user)
    else:
        on_terminal = is_terminal and with_sandbox(reference, has_terminal)
        job = Job(process=number, stdin=interactive or is_terminal, tty=on_terminal)
    return run_joined(job, open_sandbox(reference))
