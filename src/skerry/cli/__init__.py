"""The command line: `main` is the entry point, and a command's own file is imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from skerry.version import __version__

# A command is the object `command` in the file of its name in this folder, with _ for -.
COMMANDS = {
    "run": "Run a command in a new sandbox.",
    "create": "Make a sandbox that lives until it is removed or its time is over.",
    "ps": "List the sandboxes.",
    "exec": "Run a command in a sandbox.",
    "attach": "Join a background process, or a shell of the sandbox.",
    "port": "Open ports of a sandbox on this machine, until Ctrl-C.",
    "cp": "Copy files and folders into a sandbox or out of it.",
    "logs": "Show the output of background processes, or of the box itself.",
    "top": "List the processes that were started in a sandbox.",
    "kill": "Send a signal to a background process, or to all of a sandbox.",
    "stats": "Show what sandboxes use, live.",
    "inspect": "Show all that is known of sandboxes, as JSON.",
    "explain": "Tell when a sandbox will end and why, or why it did.",
    "events": "Tell what happened to all sandboxes.",
    "wait": "Wait until sandboxes have ended.",
    "stop": "Stop sandboxes.",
    "start": "Start sandboxes that were stopped.",
    "pause": "Pause sandboxes.",
    "unpause": "Let paused sandboxes go on.",
    "snapshot": "Keep the files of a sandbox, to make others of them or to go back.",
    "restore": "Put the files of a sandbox back to a snapshot.",
    "fork": "Make another sandbox with the files that this one has now.",
    "rm": "End sandboxes and remove all of them.",
    "volume": "List and remove volumes: the data of sandboxes, and the caches of projects.",
    "cache": "List and remove the caches that the sandboxes of a project share.",
    "prune": "Forget the sandboxes that have ended.",
    "reconcile": "Compare the registry with the host and repair the difference.",
    "pool": "Keep sandboxes warm, so that `run --pool` and `create --pool` need not boot one.",
    "fleet": "Start many sandboxes in phases from one file, and see and command them as one.",
    "image": "Build, import, list and remove the images that boxes are made of.",
    "docker-env": "Print the address of the Docker in a project's machine, for the docker command.",
    "mcp": "Serve MCP on stdin and stdout, for an agent that uses sandboxes as tools.",
    "doctor": "Tell what works on this machine, and how to get the rest.",
    "check": "Run the conformance suite against a provider on this machine.",
    "config": "Show every setting and where it came from.",
    "version": "Show the version.",
    "completion": "Print the completion script for a shell.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def invoke(self, ctx: click.Context) -> int:
        """The exit code; a reader of our output that has gone is told here, since click would make it a failure."""
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
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="skerry %(version)s")
def cli() -> None:
    """Isolated machines for untrusted code, in one command."""


def main() -> None:
    """What the `skerry` program does."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the user's character set lacks is a ?, and no failure
    sys.exit(invoke(sys.argv[1:]))


def invoke(args: Sequence[str]) -> int:
    """Run one command line and give its exit code; every error becomes a message and a code here."""
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
