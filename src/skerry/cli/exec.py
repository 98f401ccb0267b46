"""`skerry exec`, `attach`, `kill` and `top`: processes in a sandbox."""

from __future__ import annotations

import signal as signals
import sys
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import check_command, command_options, process_options, refuse_if, sandbox_argument
from skerry.cli.output import age, json_option, print_list, print_one

if TYPE_CHECKING:
    from skerry.cli.registry import Result
    from skerry.model.results import ProcessInfo
    from skerry.sandbox.sandbox import AsyncSandbox

_number_argument = click.argument("number", metavar="[PROCESS]", type=int, required=False)
_TOP = ("PROCESS", "PID", "STATE", "AGE", "KIND", "TAG", "COMMAND")


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Exit codes: the command's own; 124 timeout, 125 skerry failed, 126 cannot run, 127 no such command.",
)
@command_options
@process_options
@click.option("-d", "--detach", is_flag=True, help="Start it in the background and print its number.")
@json_option
@sandbox_argument
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def exec(sandbox: str, argv: tuple[str, ...], tty: bool, detach: bool, as_json: bool, **options: Any) -> int:
    """Run a command in a sandbox.

    Without a COMMAND and with -t, the box's shell.
    """
    argv = argv[1:] if argv[:1] == ("--",) else argv
    check_command(argv, tty, as_json)
    from skerry.cli.job import make_job, run_job
    from skerry.cli.registry import open_sandbox, with_sandbox

    job = make_job(argv, as_json, tty=tty, detach=detach, **options)
    if not detach:
        return run_job(job, open_sandbox(sandbox))

    async def start(opened: AsyncSandbox) -> tuple[str, int | None]:
        return opened.id, (await job.start(opened)).number

    id, number = with_sandbox(sandbox, start)
    print_one(as_json, {"sandbox": id, "process": number}, str(number))
    return 0


@click.command()
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on, also when it is no terminal.")
@click.option("-t", "--tty", is_flag=True, help="Fail unless this is a terminal, which is then used as one.")
@click.option("-u", "--user", metavar="USER", help="Whose shell: a user name, UID or UID:GID of the box.")
@sandbox_argument
@_number_argument
def attach(sandbox: str, number: int | None, user: str | None, interactive: bool, tty: bool) -> int:
    """Join a background process, or a shell of the sandbox.

    A process tells what it said last, then what it says. Ctrl-P Ctrl-Q leaves one that has a terminal, Ctrl-C any
    other; it lives on. Without a PROCESS it is a new shell.
    """
    is_terminal = bool(sys.stdin and sys.stdin.isatty())
    check_command(("sh",), tty, as_json=False)
    refuse_if(user is not None and number is not None, "-u is for a new shell; a PROCESS has its user")
    from skerry.cli.job import Job, run_job
    from skerry.cli.registry import open_sandbox, with_sandbox

    async def has_terminal(opened: AsyncSandbox) -> bool:
        return any(each.process == number and each.pty for each in await opened.processes.list())

    if number is None:
        job = Job(argv=None if is_terminal else ("sh",), stdin=True, tty=is_terminal, user=user)
    else:
        on_terminal = is_terminal and with_sandbox(sandbox, has_terminal)
        job = Job(process=number, stdin=interactive or is_terminal, tty=on_terminal)
    return run_job(job, open_sandbox(sandbox))


@click.command()
@sandbox_argument
@_number_argument
@click.option("-s", "--signal", default="KILL", show_default=True, metavar="SIGNAL", help="Its name or number.")
@json_option
def kill(sandbox: str, number: int | None, signal: str, as_json: bool) -> int:
    """Send a signal to a background process, or to all of a sandbox.

    Prints the numbers of those that got it. KILL takes with it all that a process has started.
    """
    chosen = _signal(signal)
    tree = chosen is signals.SIGKILL
    from skerry.cli.registry import for_each, print_results, with_sandbox

    async def send(opened: AsyncSandbox) -> list[Result]:
        numbers = [str(number)]
        if number is None:
            processes = await opened.processes.list()
            numbers = [str(each.process) for each in processes if each.background and each.running]
        return await for_each(numbers, lambda each: opened.processes.signal(int(each), chosen, tree=tree))

    return print_results(with_sandbox(sandbox, send), as_json)


def _signal(text: str) -> signals.Signals:
    name = text.upper()
    try:
        if name.isdecimal():
            return signals.Signals(int(name))
        return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except (KeyError, ValueError):
        ctx = click.get_current_context()
        raise click.UsageError(f"--signal: {text!r} is no signal; e.g. TERM or 15", ctx) from None


@click.command()
@sandbox_argument
@json_option
def top(sandbox: str, as_json: bool) -> None:
    """List the processes that were started in a sandbox.

    Those in the background are listed after their end too. PROCESS is the number that attach, logs and kill take.
    """
    from skerry.cli.registry import with_sandbox

    print_list(with_sandbox(sandbox, lambda opened: opened.processes.list()), _TOP, _process_row, as_json=as_json)


def _process_row(process: ProcessInfo) -> tuple[str, ...]:
    import shlex

    kinds = (("background", process.background), ("terminal", process.pty))
    state = f"signal {process.signal}" if process.signal is not None else f"exit {process.exit_code}"
    return (
        str(process.process),
        str(process.pid),
        "running" if process.running else state,
        age(process.started),
        ",".join(kind for kind, is_it in kinds if is_it),
        process.tag or "",
        shlex.join(process.argv),
    )
