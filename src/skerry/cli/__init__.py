"""The command line, a file for each noun.

`main` is the entry point, `COMMANDS` the table of commands, whose modules are imported when they are called. Nothing
else is for use from outside.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from skerry.agent.guest import users
from skerry.version import __version__

COMMANDS = {
    "run": ("run", "Run a command in a new sandbox."),
    "create": ("run", "Make a sandbox that lives until it is removed or its time is over."),
    "ps": ("ps", "List the sandboxes."),
    "exec": ("exec", "Run a command in a sandbox."),
    "repl": ("repl", "Run code in an interpreter that remembers."),
    "attach": ("exec", "Join a background process, or a shell of the sandbox."),
    "port": ("port", "Open ports of a sandbox on this machine, until Ctrl-C."),
    "network": ("network", "Show and change what sandboxes may reach."),
    "cp": ("cp", "Copy files and folders into a sandbox or out of it."),
    "logs": ("logs", "Show the output of the service, of background processes, or of the box itself."),
    "top": ("exec", "List the processes that were started in a sandbox."),
    "kill": ("exec", "Send a signal to a background process, or to all of a sandbox."),
    "stats": ("ps", "Show what sandboxes use, live."),
    "inspect": ("ps", "Show all that is known of sandboxes, as JSON."),
    "explain": ("ps", "Tell when a sandbox will end and why, or why it did."),
    "events": ("ps", "Tell what happened to all sandboxes."),
    "ledger": ("ledger", "Show, verify and export all that was done, in lines that nobody can change unseen."),
    "wait": ("state", "Wait until sandboxes have ended."),
    "stop": ("state", "Stop sandboxes."),
    "start": ("state", "Start sandboxes that were stopped."),
    "pause": ("state", "Pause sandboxes."),
    "unpause": ("state", "Let sandboxes go on that are paused or asleep."),
    "snapshot": ("snapshot", "Keep the files of a sandbox, to make others of them or to go back."),
    "restore": ("snapshot", "Put the files of a sandbox back to a snapshot."),
    "fork": ("snapshot", "Make another sandbox with the files that this one has now."),
    "rm": ("state", "End sandboxes and remove all of them."),
    "volume": ("volume", "List and remove volumes: the data of sandboxes, and the caches of projects."),
    "cache": ("volume", "List and remove the caches that the sandboxes of a project share."),
    "prune": ("state", "Forget the sandboxes that have ended."),
    "reconcile": ("state", "Compare the registry with the host and repair the difference."),
    "pool": ("pool", "Keep sandboxes warm, so that `run --pool` and `create --pool` need not boot one."),
    "fleet": ("fleet", "Start many sandboxes in phases from one file, and see and command them as one."),
    "image": ("image", "Build, import, list and remove the images that boxes are made of."),
    "docker-env": ("port", "Print the address of the Docker in a project's machine, for the docker command."),
    "context": ("context", "Choose the server that all commands use, of those that are known by name."),
    "serve": ("serve", "Serve sandboxes to other programs and machines: REST, WebSocket, MCP and a page."),
    "tenant": ("tenant", "Make, list, change and remove tenants of `skerry serve`."),
    "token": ("token", "Make, list and revoke the tokens by which others call `skerry serve`."),
    "e2b": ("e2b", "Use E2B's SDKs with `skerry serve`."),
    "mcp": ("mcp", "Serve MCP on stdin and stdout, for an agent that uses sandboxes as tools."),
    "doctor": ("doctor", "Tell what works on this machine, and how to get the rest."),
    "check": ("doctor", "Run the conformance suite against a provider on this machine."),
    "bench": ("bench", "Measure sandboxes on this machine, beside the least that it needs for the same."),
    "config": ("about", "Show every setting and where it came from."),
    "version": ("about", "Show the version."),
    "completion": ("about", "Print the completion script for a shell."),
}
"""Module of this package and help of each command; the command is the function of its name in there, with _ for -."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> int:
        """Run the command and give its exit code; handle a broken pipe here, since click would make it a failure."""
        try:
            code: int | None = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code or 0
        except BrokenPipeError as error:
            from skerry.cli.errors import report

            return report(error, as_json=False)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="skerry %(version)s")
@click.option("-v", "--verbose", count=True, help="Log to stderr what is done; -vv logs the details too.")
def cli(verbose: int) -> None:
    """Isolated machines for untrusted code, in one command."""


def main() -> None:
    """Entry point of the `skerry` program."""
    _open_missing_streams()
    users.allow_many_files()  # each sandbox that is spoken with takes some; boxes have limits of their own
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the user's character set lacks is a ?, and no failure
    sys.exit(invoke(sys.argv[1:]))


def invoke(args: Sequence[str]) -> int:
    """Run one command line and give its exit code; turn every error into a message and a code."""
    wants_json: list[bool] = []
    try:
        code: int = cli.main(args, prog_name="skerry", standalone_mode=False, obj=wants_json)
        return code
    except (KeyboardInterrupt, click.Abort):
        return 130  # told here, since it may have cut short an import that `report` needs
    except BaseException as error:
        from skerry.cli.errors import report

        # The parser gives up at an option that nobody knows, before it has told us of --json.
        unread = isinstance(error, click.NoSuchOption) and "--json" in args
        return report(error, as_json=bool(wants_json) or unread)


def _open_missing_streams() -> None:
    """Give a closed stdin, stdout or stderr to /dev/null, so that no other file gets its number and our output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
