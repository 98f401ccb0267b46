"""Which fleet a command means: that of a file, or one that is up, by its name. And what a shell can complete of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from skerry.cli import completion
from skerry.cli.output import printable, say

if TYPE_CHECKING:
    from skerry.errors import InvalidFleet
    from skerry.fleet.model import FleetSpec
    from skerry.records import Record

FILES = tuple(
    f"{stem}{ending}" for stem in ("fleet", "skerry", "compose", "docker-compose") for ending in (".yaml", ".yml")
)
"""What is looked for in the working folder, in this order."""
_PATH = click.Path(dir_okay=False)


class Choice(NamedTuple):
    """A fleet; all that only looks, runs commands or removes needs no more of it than the name."""

    name: str
    project: str | None = None
    """None where only the name was given."""
    spec: FleetSpec | None = None


def file_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """FILE as an argument or with -f; it arrives as `file`."""
    function = click.argument("given", metavar="[FILE]", required=False, type=_PATH)(function)
    return file_option(function)


def fleet_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """-f FILE or --fleet NAME; they arrive as `file`, `fleet` and `project`."""
    project = click.option("--project", metavar="NAME", help="With --fleet: its project, if two have one name.")
    named = click.option(
        "--fleet", metavar="NAME", shell_complete=fleet_names, help="One that is up, without its file."
    )
    return file_option(named(project(function)))


def file_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """-f FILE; it arrives as `file`."""
    text = "What describes the fleet; ./fleet.yaml or ./compose.yaml if nothing is said."
    return click.option("-f", "--file", metavar="FILE", type=_PATH, help=text)(function)


def provider_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--provider, for `changed`."""
    text = "Instead of those that the file names."
    return click.option("--provider", metavar="NAME", shell_complete=completion.provider_names, help=text)(function)


def choose(file: str | None, fleet: str | None, project: str | None) -> Choice:
    """The fleet that those options mean."""
    if fleet is None and project is not None:
        raise click.UsageError("--project needs --fleet", click.get_current_context())
    if fleet is None:
        spec = load(path_of(file))
        return Choice(spec.name, spec.project, spec)
    if file is not None:
        raise click.UsageError("--fleet and -f exclude each other", click.get_current_context())
    return Choice(fleet, project)


def path_of(file: str | None, given: str | None = None) -> str:
    """The file that is meant, however it was named."""
    ctx = click.get_current_context()
    if file is not None and given is not None:
        raise click.UsageError("the file is named twice, as an argument and with -f", ctx)
    found = file or given or next((name for name in FILES if os.path.isfile(name)), None)
    if found is None:
        by_name = " Or name a fleet that is up: --fleet NAME" if "fleet" in ctx.params else ""
        raise click.UsageError(f"there is no {FILES[0]} or compose.yaml here: name the file with -f.{by_name}", ctx)
    return found


def load(path: str) -> FleetSpec:
    """The fleet of a file. What is wrong with it is told line by line as compilers do it, and ends the command; with
    --json the error is for whoever made us."""
    from skerry import config
    from skerry.errors import InvalidFleet
    from skerry.fleet.load import load

    ctx = click.get_current_context()
    try:
        return load(path, provider=config.load().provider)
    except InvalidFleet as error:
        if ctx.params.get("as_json"):
            raise
        raise click.exceptions.Exit(tell_problems(error, by_name="fleet" in ctx.params)) from None


def changed(
    spec: FleetSpec, provider: str | None, timeout_s: float | None = None, max_parallel: int | None = None
) -> FleetSpec:
    """The fleet with what the options say in place of what its file says."""
    from msgspec.structs import replace

    changes: dict[str, Any] = {}
    if provider is not None:
        changes["phases"] = tuple(replace(each, spec=replace(each.spec, provider=provider)) for each in spec.phases)
    if timeout_s is not None:
        changes["timeout_s"] = timeout_s
    if max_parallel is not None:
        changes["max_parallel"] = max_parallel
    return replace(spec, **changes)


def tell_problems(error: InvalidFleet, *, by_name: bool = False) -> int:
    """Each mistake on a line of its own, `path:line:column: message`, and the exit code."""
    from skerry.cli.errors import OURS

    for line in error.message.split("\n"):
        click.echo(printable(line), err=True)
    if by_name:
        say("with --fleet NAME this works without the file")
    return OURS


# completion


def fleet_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Fleets that have members, for a shell to complete."""
    from skerry.fleet.model import FLEET_LABEL

    return _beginning(incomplete, (record.spec.labels.get(FLEET_LABEL) for record in _live_records()))


def phase_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The phases of the fleet that is meant, for a shell to complete."""
    return _beginning(incomplete, _phases(_choice(ctx)))


def scales(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """`PHASE=` for each phase, for a shell to complete."""
    return _beginning(incomplete, (f"{name}=" for name in _phases(_choice(ctx))))


def targets(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """`all`, the phases and the members of the fleet that is meant, for a shell to complete."""
    from skerry.fleet.model import ALL, FLEET_LABEL

    choice = _choice(ctx)
    members = [record.name for record in _live_records() if record.spec.labels.get(FLEET_LABEL) == choice.name]
    return _beginning(incomplete, (ALL, *_phases(choice), *members))


def _phases(choice: Choice) -> list[str]:
    from skerry.fleet.model import FLEET_LABEL, PHASE_LABEL

    if choice.spec is not None:
        return [phase.name for phase in choice.spec.phases]
    of_fleet = (record.spec.labels for record in _live_records() if record.spec.labels.get(FLEET_LABEL) == choice.name)
    return sorted({labels[PHASE_LABEL] for labels in of_fleet if PHASE_LABEL in labels})


def _choice(ctx: click.Context) -> Choice:
    """As `choose`, but nothing is an error while somebody types."""
    from skerry.errors import SkerryError
    from skerry.fleet.load import load

    if fleet := ctx.params.get("fleet"):
        return Choice(fleet)
    path = ctx.params.get("file") or next((name for name in FILES if os.path.isfile(name)), None)
    try:
        spec = load(path) if path else None
    except SkerryError:
        spec = None
    return Choice("") if spec is None else Choice(spec.name, spec.project, spec)


def _live_records() -> list[Record]:
    """A registry that cannot be read offers none."""
    import asyncio

    from skerry.errors import SkerryError

    try:
        return asyncio.run(completion._live_records())
    except SkerryError:
        return []


def _beginning(incomplete: str, words: Iterable[str | None]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word and word.startswith(incomplete)]
