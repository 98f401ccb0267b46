"""The options that several commands share: what a sandbox should be, and which sandboxes are meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import click

from skerry.cli.completion import provider_names

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.records import Filter
    from skerry.spec import Spec, SpecOptions, Workspace

_STATES = ("creating", "ready", "paused", "stopped", "error", "lost", "destroyed")  # a test holds them to `State`
_CACHES = ("none", "read", "write")  # a test holds them to `Cache`
_PATH = click.Path(exists=True, file_okay=False, resolve_path=True)
_OPTIONS = (
    click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name."),
    click.option("-w", "--workdir", "cwd", metavar="DIR", help="The folder in the box to start in."),
    click.option("-u", "--user", metavar="USER", help="A user name, UID or UID:GID of the box."),
    click.option("-v", "--volume", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Show a path of the host."),
    click.option("--memory", metavar="SIZE", help="For all processes together, e.g. 512M."),
    click.option("--cpus", type=float, metavar="N", help="E.g. 0.5 or 2."),
    click.option("--pids", type=int, metavar="N", help="Processes and threads at once."),
    click.option("--disk", metavar="SIZE", help="What the box may write, e.g. 1G."),
    click.option("--network", metavar="MODE", help="none (default), or what the provider has besides."),
    click.option("--lifetime", metavar="TIME", help="When it ends by itself, e.g. 2h, or never."),
    click.option("--idle", metavar="TIME", help="How long it may idle before it ends by itself."),
    click.option("--provider", metavar="NAME", shell_complete=provider_names, help="What makes the box."),
    click.option("--root", type=click.Path(resolve_path=True), metavar="DIR", help="A folder that is the box's /."),
    click.option("--image", metavar="NAME", help="The image that the box is made from."),
    click.option("--snapshot", metavar="NAME", help="A snapshot whose files it begins with."),
    click.option("--runtime", metavar="NAME", help="The OCI runtime that runs it, e.g. runsc."),
    click.option("--target", metavar="MEMBER", help="The member of a cluster that it is to be on."),
    click.option("--group", metavar="GROUP", help="The group of members of which one is to have it."),
    click.option("--writable-root", is_flag=True, help="Let the box change the files of its image."),
    click.option("--data/--no-data", default=None, help="A volume at /.data that outlives the box, or none."),
    click.option("--cache", type=click.Choice(_CACHES), help="The project's caches: none (default), read, write."),
    click.option("--cache-path", "cache_paths", multiple=True, metavar="NAME=PATH", help="A cache of your own."),
    click.option("--workspace", "work_path", type=_PATH, metavar="DIR", help="A folder to work on, at ~/workspace."),
    click.option("--workspace-copy", "work_copy", is_flag=True, help="Copy that folder instead of showing it."),
    click.option("--workspace-source", "work_source", metavar="URL|PATH", help="A git repository to clone there."),
    click.option("--workspace-commit", "work_commit", metavar="REV", help="The branch, tag or hash of that."),
    click.option("--name", metavar="NAME", help="A name for people."),
    click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; can be given again."),
    click.option("--project", metavar="NAME", help="What it belongs to."),
)
_FILTERS = (
    click.option("--label", "labels", multiple=True, metavar="K=V", help="Only with this label; can be given again."),
    click.option("--project", metavar="NAME", help="Only those of this project."),
    click.option("--state", "states", multiple=True, type=click.Choice(_STATES), help="Only in this state."),
    click.option("--provider", metavar="NAME", shell_complete=provider_names, help="Only those of this provider."),
)
_COMMAND = (
    click.option("-i", "--interactive", is_flag=True, help="Pass standard input on to the command."),
    click.option("-t", "--tty", is_flag=True, help="Give the command a terminal: this one."),
    click.option("--timeout", metavar="TIME", help="End the command after this, e.g. 30s."),
)
_SETTINGS = ("provider", "project", "lifetime", "idle")


def command_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a command is joined to us."""
    for option in reversed(_COMMAND):
        function = option(function)
    return function


def refuse_what_cannot_run(argv: tuple[str, ...], tty: bool, as_json: bool) -> None:
    """A usage error for options of a command that contradict each other or where we are."""
    ctx = click.get_current_context()
    if tty and not (sys.stdin and sys.stdin.isatty()):
        raise click.UsageError("-t needs a terminal, and standard input is none: leave -t out, -i is enough", ctx)
    if tty and as_json:
        raise click.UsageError("--json and -t exclude each other: a terminal's output is not data", ctx)
    if not argv and not tty:
        raise click.UsageError("no command: write it after --, or use -it for a shell", ctx)


def spec_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of a spec to a command; they arrive as keywords for `make_spec`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_spec(options: dict[str, Any]) -> tuple[Config, Spec]:
    """The configuration with these flags in it, and the spec that both make."""
    from skerry.config import load

    config = load({key: options.pop(key) for key in _SETTINGS})
    workspace = _workspace(**{key: options.pop(f"work_{key}") for key in ("path", "copy", "source", "commit")})
    fields = {key: value for key, value in options.items() if value not in (None, ())}
    fields["env"] = environment(options["env"])
    fields["labels"] = _labels(options["labels"])
    fields["cache_paths"] = dict(_pair(text, "--cache-path") for text in options["cache_paths"])
    if workspace is not None:
        fields["workspace"] = workspace
    return config, config.spec(cast("SpecOptions", fields))


def _workspace(path: str | None, copy: bool, source: str | None, commit: str | None) -> Workspace | None:
    from skerry.spec import Workspace

    if path is None and source is None:
        if copy or commit is not None:
            flag = "--workspace-copy needs --workspace" if copy else "--workspace-commit needs --workspace-source"
            raise click.UsageError(flag, click.get_current_context())
        return None
    if source is not None and os.path.exists(source):
        source = os.path.abspath(source)
    return Workspace(path=path, copy=copy, source=source, commit=commit)


def filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose sandboxes; they arrive as keywords for `make_filter`."""
    for option in reversed(_FILTERS):
        function = option(function)
    return function


def make_filter(options: dict[str, Any], *, include_ended: bool = False) -> Filter:
    """Which sandboxes those options mean."""
    from skerry.lifecycle import State
    from skerry.records import Filter

    states = frozenset(State(state) for state in options["states"])
    return Filter(
        states=states,
        project=options["project"],
        provider=options["provider"],
        labels=_labels(options["labels"]),
        include_ended=include_ended,
    )


def environment(given: Iterable[str]) -> dict[str, str]:
    """`K=V` as it stands, and `K` with our own value, or left out if we have none."""
    from skerry.config import variable

    found = (tuple(text.split("=", 1)) if "=" in text else (text, variable(text)) for text in given)
    return {name: value for name, value in found if value is not None}


def duration(text: str | None, flag: str) -> float | None:
    """The seconds that an option means; None if it was not given."""
    from skerry.units import parse_duration

    return None if text is None else parse_duration(text, flag)


def _labels(given: Iterable[str]) -> dict[str, str]:
    return dict(_pair(text, "--label") for text in given)


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{flag} {text!r} is not KEY=VALUE", click.get_current_context())
    return key, value
