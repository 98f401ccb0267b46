"""Options and arguments that several commands share, their completion, and the configuration."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from skerry.cli.output import SHORT_ID, say
from skerry.errors import SkerryError

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Filter, Record
    from skerry.model.secrets import Secret
    from skerry.model.spec import Spec, SpecOptions, Workspace

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def provider_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of installed providers."""
    from skerry import providers

    return [name for name in providers.names() if name.startswith(incomplete)]


def references(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names and ids of sandboxes."""
    records = live_records()
    ids = [record.id if len(incomplete) > SHORT_ID else record.id[:SHORT_ID] for record in records]
    names = [record.name for record in records if record.name]
    return [word for word in (*names, *ids) if word.startswith(incomplete)]


def rule_sets() -> dict[str, tuple[str, ...]]:
    """Named sets of rules: those that come with skerry, and those of the configuration."""
    from skerry.model.rules import known_sets

    return {**known_sets(), **load_config().network.sets}


def set_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of sets of rules, after a comma too."""
    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in sorted(rule_sets()) if name.startswith(begun)]


rules_option = functools.partial(click.option, multiple=True, metavar="RULE,...", shell_complete=set_names)


def words(*words: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion of words that are the same everywhere."""
    return lambda _ctx, _param, incomplete: [word for word in words if word.startswith(incomplete)]


def _names(
    ask: Callable[[AsyncSandboxManager], Awaitable[list[T]]], name: Callable[[T], str]
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion of names of what providers hold; one that does not answer offers none."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        from skerry.cli.registry import with_manager

        try:
            return sorted({name(each) for each in with_manager(ask) if name(each).startswith(incomplete)})
        except SkerryError:
            return []

    return complete


snapshot_names = _names(lambda manager: manager.snapshots(), lambda snapshot: snapshot.name)
volume_names = _names(lambda manager: manager.volumes(), lambda volume: volume.name)
cache_names = _names(lambda manager: manager.volumes("cache"), lambda volume: volume.label)


def live_records() -> list[Record]:
    """Records in the registry, for completion; none if it cannot be read."""
    import asyncio
    from contextlib import aclosing

    from skerry.cli.registry import open_manager
    from skerry.config import load
    from skerry.store import Store

    async def read() -> list[Record]:
        config = load()
        if config.url:
            async with open_manager(config) as manager:
                return await manager.list()
        async with aclosing(await Store.open(config.database)) as store:
            return await store.list()

    try:
        return asyncio.run(read())
    except SkerryError:
        return []


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Decorator that adds all of these options."""
    return lambda function: functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


_STATES = ("creating", "ready", "paused", "asleep", "stopped", "lost", "destroyed")  # a test holds them to `State`
_CACHES = ("none", "read", "write", "own")  # a test holds them to `Cache`
_RESTART = ("no", "on-failure", "always")  # a test holds them to `Restart`
_PATH = click.Path(exists=True, file_okay=False, resolve_path=True)
sandbox_argument = click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
sandboxes_argument = click.argument(
    "sandboxes", nargs=-1, required=True, metavar="SANDBOX...", shell_complete=references
)
env_option = click.option(
    "-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name."
)
grace_option = click.option(
    "-t", "--grace", metavar="TIME", help="How long processes have to end after SIGTERM, e.g. 10s; 0 kills at once."
)
process_options = all_of(
    env_option,
    click.option("-w", "--workdir", "cwd", metavar="DIR", help="The folder in the box to start in."),
    click.option("-u", "--user", metavar="USER", help="A user name, UID or UID:GID of the box."),
)
"""Options of a process in a sandbox; they arrive as keywords for `make_job`."""
provider_filter = click.option(
    "--provider", metavar="NAME", shell_complete=provider_names, help="Only those of this provider."
)
project_filter = click.option("--project", metavar="NAME", help="Only those of this project.")
spec_options = all_of(
    process_options,
    click.option("-v", "--volume", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Show a path of the host."),
    click.option("--memory", metavar="SIZE", help="For all processes together, e.g. 512M."),
    click.option("--cpus", type=float, metavar="N", help="E.g. 0.5 or 2."),
    click.option("--pids", type=int, metavar="N", help="Processes and threads at once."),
    click.option("--disk", metavar="SIZE", help="What the box may write, e.g. 1G."),
    click.option("--egress", metavar="SIZE", help="What it may send in a second through its rules, e.g. 10M."),
    click.option(
        "--network",
        metavar="MODE",
        shell_complete=words("none", "rules", "host", "bridge"),
        help="none (default), rules, host, bridge, or one of the engine's.",
    ),
    rules_option("--allow", help="What it may reach: pypi.org, *.x.org, db.x.org:5432, or a set such as python."),
    rules_option("--deny", help="What it may not reach, whatever is allowed."),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME=HOST,...",
        help="A token of yours that it can use at these hosts and never has: that of the variable NAME, or of one more "
        "word, env=NAME, file=PATH or command=LINE.",
    ),
    click.option("--lifetime", metavar="TIME", help="When it ends by itself, e.g. 2h, or never."),
    click.option("--idle", metavar="TIME", help="How long it may idle before it ends by itself."),
    click.option("--sleep-after", metavar="TIME", help="How long it may idle before it sleeps; a call wakes it."),
    click.option("--default-timeout", metavar="TIME", help="For a command in it that is given no --timeout."),
    click.option("--provider", metavar="NAME", shell_complete=provider_names, help="What makes the box."),
    click.option("--root", type=click.Path(resolve_path=True), metavar="DIR", help="A folder that is the box's /."),
    click.option("--image", metavar="NAME", help="The image that the box is made from."),
    click.option("--snapshot", metavar="NAME", help="A snapshot whose files it begins with."),
    click.option("--runtime", metavar="NAME", help="The OCI runtime that runs it, e.g. runsc."),
    click.option("--target", metavar="MEMBER", help="The member of a cluster that it is to be on."),
    click.option("--group", metavar="GROUP", help="The group of members of which one is to have it."),
    click.option("--writable-root", is_flag=True, help="Let the box change the files of its image."),
    click.option("--admin", is_flag=True, help="Be a root that can install packages, add users and change owners."),
    click.option("--data/--no-data", default=None, help="A volume at /.data that outlives the box, or none."),
    click.option("--cache", type=click.Choice(_CACHES), help="The project's caches: none (default), read, write, own."),
    click.option("--cache-path", "cache_paths", multiple=True, metavar="NAME=PATH", help="A cache of your own."),
    click.option("--workspace", "work_path", type=_PATH, metavar="DIR", help="A folder to work on, at ~/workspace."),
    click.option("--workspace-copy", "work_copy", is_flag=True, help="Copy that folder instead of showing it."),
    click.option("--workspace-source", "work_source", metavar="URL|PATH", help="A git repository to clone there."),
    click.option("--workspace-commit", "work_commit", metavar="REV", help="The branch, tag or hash of that."),
    click.option("--name", metavar="NAME", help="A name for people."),
    click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; can be given again."),
    click.option("--project", metavar="NAME", help="What it belongs to."),
    click.option("--command", metavar="LINE", help="Keep this running: a line for the shell, a JSON list, or image."),
    click.option("--restart", type=click.Choice(_RESTART), help="When to start that again; on-failure by default."),
    click.option("-p", "--publish", "ports", multiple=True, metavar="[LOCAL:]PORT", help="Give a port an address."),
)
"""Options of a spec; they arrive as keywords for `make_spec`."""
filter_options = all_of(
    click.option("--label", "labels", multiple=True, metavar="K=V", help="Only with this label; can be given again."),
    project_filter,
    click.option("--state", "states", multiple=True, type=click.Choice(_STATES), help="Only in this state."),
    provider_filter,
)
"""Options that choose sandboxes; they arrive as keywords for `make_filter`."""
command_options = all_of(
    click.option("-i", "--interactive", is_flag=True, help="Pass standard input on to the command."),
    click.option("-t", "--tty", is_flag=True, help="Give the command a terminal: this one."),
    click.option("--timeout", metavar="TIME", help="End the command after this, e.g. 30s."),
)
"""Options that join a command to us; they arrive as keywords for `make_job`."""
_SETTINGS = ("provider", "project", "lifetime", "idle")


def load_config(overrides: Mapping[str, Any] | None = None) -> Config:
    """Load the configuration with these flags, and log as it says, but not while a shell completes."""
    import msgspec

    from skerry import log
    from skerry.config import load

    ctx = click.get_current_context(silent=True)
    verbose = 0 if ctx is None else ctx.find_root().params.get("verbose", 0)
    config = load({**(overrides or {}), "log": (None, "info", "debug")[min(verbose, 2)]})
    log.configure(log.OFF if ctx is None else config.log)
    return msgspec.structs.replace(config, tool="cli")


def refuse_if(wrong: object, message: str) -> None:
    """Raise UsageError with this message if something is wrong."""
    if wrong:
        raise click.UsageError(message, click.get_current_context())


def check_command(argv: tuple[str, ...], tty: bool, as_json: bool) -> None:
    """Raise UsageError for options of a command that contradict each other or where we are."""
    is_terminal = sys.stdin and sys.stdin.isatty()
    refuse_if(tty and not is_terminal, "-t needs a terminal, and standard input is none: leave -t out, -i is enough")
    refuse_if(tty and as_json, "--json and -t exclude each other: a terminal's output is not data")
    refuse_if(not argv and not tty, "no command: write it after --, or use -it for a shell")


def make_spec(options: dict[str, Any]) -> tuple[Config, Spec]:
    """Configuration with these flags in it, and the spec of both; warn of a network that is shared."""
    config = load_config({key: options.pop(key) for key in _SETTINGS})
    timeout = options.pop("default_timeout")
    workspace = _workspace(**{key: options.pop(f"work_{key}") for key in ("path", "copy", "source", "commit")})
    fields = {key: value for key, value in options.items() if value not in (None, ())}
    fields["env"] = environment(options["env"])
    fields["labels"] = _pairs(options["labels"], "--label")
    fields |= {key: split_rules(options[key]) for key in ("allow", "deny") if options[key]}
    fields["secrets"] = dict(_secret(text) for text in options["secrets"])
    fields["cache_paths"] = _pairs(options["cache_paths"], "--cache-path")
    if workspace is not None:
        fields["workspace"] = workspace
    if options["command"] is not None:
        fields["command"] = _command(options["command"])
    if timeout is not None:
        fields["timeout"] = None if timeout == "never" else duration(timeout, "--default-timeout")
    spec = config.spec(cast("SpecOptions", fields))
    if spec.network == "host":
        say("warning: --network host shares this machine's network with the sandbox, its local services included")
    return config, spec


def split_rules(given: Iterable[str]) -> list[str]:
    """Rules of options that may each hold several."""
    return [rule.strip() for text in given for rule in text.split(",") if rule.strip()]


def _secret(text: str) -> tuple[str, Secret]:
    """A secret from `NAME=HOST,...[,env=VARIABLE|,file=PATH|,command=LINE][,hook=MODULE:FUNCTION]`."""
    import shlex

    from skerry.model.secrets import Secret

    name, _, rest = text.partition("=")
    rest, by_command, line = rest.partition("command=")  # the rest of it, commas and all
    parts = split_rules([rest])
    sources = dict(part.split("=", 1) for part in parts if "=" in part)
    for each, value in [*sources.items(), *([("command", line)] if by_command else [])]:
        known = each in ("env", "file", "command", "hook")
        refuse_if(not known, f"--secret {name}: there is no {each}=; there are env=, file=, command= and hook=")
        refuse_if(not value.strip(), f"--secret {name}: {each}= is empty")
    if "file" in sources:
        sources["file"] = os.path.abspath(os.path.expanduser(sources["file"]))
    hosts = tuple(part for part in parts if "=" not in part)
    refuse_if(not name or not hosts, f"--secret {name!r} is not NAME=HOST,...: say which hosts it is for")
    try:
        command = tuple(shlex.split(line))
    except ValueError as error:
        raise click.UsageError(f"--secret {name}: command= is no line for a shell: {error}") from None
    env, file, hook = (sources.get(each) for each in ("env", "file", "hook"))
    return name, Secret(hosts=hosts, command=command, env=env, file=file, hook=hook)


def _command(text: str) -> str | list[str]:
    """Command as a Dockerfile has it: a line for the shell, or a JSON list of a program and its arguments."""
    import msgspec

    if not text.startswith("["):
        return text
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise click.UsageError(f"--command {text!r} is no JSON list of texts: {error}") from None


def _workspace(path: str | None, copy: bool, source: str | None, commit: str | None) -> Workspace | None:
    from skerry.model.spec import Workspace

    if path is None and source is None:
        refuse_if(copy, "--workspace-copy needs --workspace")
        refuse_if(commit is not None, "--workspace-commit needs --workspace-source")
        return None
    if source is not None and os.path.exists(source):
        source = os.path.abspath(source)
    return Workspace(path=path, copy=copy, source=source, commit=commit)


def make_filter(options: dict[str, Any], *, include_ended: bool = False) -> Filter:
    """Filter of the options of `filter_options`."""
    from skerry.model.records import Filter
    from skerry.model.states import State

    states, labels = frozenset(map(State, options.pop("states"))), _pairs(options.pop("labels"), "--label")
    return Filter(states=states, labels=labels, include_ended=include_ended, **options)


def environment(given: Iterable[str]) -> dict[str, str]:
    """Variables of `-e`: `K=V` as it stands, and `K` with our own value, or left out if we have none."""
    from skerry.config import variable

    found = (tuple(text.split("=", 1)) if "=" in text else (text, variable(text)) for text in given)
    return {name: value for name, value in found if value is not None}


def duration(text: str | None, flag: str) -> float | None:
    """Seconds of an option; None if it was not given."""
    from skerry.units import parse_duration

    return None if text is None else parse_duration(text, flag)


def _pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    for text in given:
        refuse_if("=" not in text, f"{flag} {text!r} is not KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in given)}
