"""Choice of a fleet: that of a file, or one that is up, by its name; and completion of its parts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from skerry.cli.errors import OURS
from skerry.cli.options import all_of, live_records, load_config, provider_names, refuse_if
from skerry.cli.output import printable, say
from skerry.errors import InvalidFleet, SkerryError

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.fleet.model import FleetSpec

FILES = tuple(
    f"{stem}{ending}" for stem in ("fleet", "skerry", "compose", "docker-compose") for ending in (".yaml", ".yml")
)
"""Files that are looked for in the working folder, in this order."""
_PATH = click.Path(dir_okay=False)


class Choice(NamedTuple):
    """Fleet of a command; to look at it, run commands or remove it needs only the name."""

    name: str
    project: str | None = None
    """None where only the name was given."""
    spec: FleetSpec | None = None


def fleet_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of fleets that have members."""
    from skerry.fleet.model import FLEET_LABEL

    return _beginning(incomplete, (record.spec.labels.get(FLEET_LABEL) for record in live_records()))


_FILE_HELP = "What describes the fleet; ./fleet.yaml or ./compose.yaml if nothing is said."
file_option = click.option("-f", "--file", metavar="FILE", type=_PATH, help=_FILE_HELP)
provider_option = click.option(
    "--provider", metavar="NAME", shell_complete=provider_names, help="Instead of those that the file names."
)
file_argument = all_of(file_option, click.argument("given", metavar="[FILE]", required=False, type=_PATH))
"""FILE as an argument or with -f; they arrive as `given` and `file`."""
fleet_options = all_of(
    file_option,
    click.option("--fleet", metavar="NAME", shell_complete=fleet_names, help="One that is up, without its file."),
    click.option("--project", metavar="NAME", help="With --fleet: its project, if two have one name."),
)
"""-f FILE or --fleet NAME; they arrive as keywords for `choose`."""


def choose(options: dict[str, Any]) -> Choice:
    """Take the options of `fleet_options` out, and give their fleet. Raises UsageError."""
    file, fleet, project = (options.pop(name) for name in ("file", "fleet", "project"))
    refuse_if(fleet is None and project is not None, "--project needs --fleet")
    if fleet is None:
        spec = load(file)
        return Choice(spec.name, spec.project, spec)
    refuse_if(file is not None, "--fleet and -f exclude each other")
    return Choice(fleet, project)


def path_of(file: str | None, given: str | None = None) -> str:
    """Path of the file, however it was named. Raises UsageError if there is none."""
    ctx = click.get_current_context()
    refuse_if(file is not None and given is not None, "the file is named twice, as an argument and with -f")
    found = file or given or next(filter(os.path.isfile, FILES), None)
    if found is None:
        by_name = " Or name a fleet that is up: --fleet NAME" if "fleet" in ctx.params else ""
        raise click.UsageError(f"there is no {FILES[0]} or compose.yaml here: name the file with -f.{by_name}", ctx)
    return found


def load(file: str | None, given: str | None = None, provider: str | None = None, **changes: Any) -> FleetSpec:
    """Load the fleet of a file, with those changes to it that are not None; print its mistakes line by line as
    compilers do, and end the command. With --json, raises InvalidFleet instead."""
    from msgspec.structs import replace

    from skerry.fleet.load import load

    ctx = click.get_current_context()
    try:
        settings = load_config()
        chosen = default_provider(settings)
        spec = load(path_of(file, given), provider=chosen, sets=settings.network.sets)
    except InvalidFleet as error:
        if ctx.params.get("as_json"):
            raise
        raise click.exceptions.Exit(print_problems(error, by_name="fleet" in ctx.params)) from None
    if provider is not None:
        changes["phases"] = tuple(replace(each, spec=replace(each.spec, provider=provider)) for each in spec.phases)
    return replace(spec, **{name: value for name, value in changes.items() if value is not None})


def default_provider(config: Config) -> str:
    """The provider of phases that name none: the one of the settings, or the server's own if nothing is set here."""
    if not config.url or config.origins.get("provider") != "default":
        return config.provider
    import asyncio

    from skerry.remote.manager import AsyncRemoteManager

    manager = AsyncRemoteManager(config.url, config.token or None, ca=config.ca or None, config=config)
    return asyncio.run(manager.default_provider())


def print_problems(error: InvalidFleet, *, by_name: bool = False) -> int:
    """Print each mistake as `path:line:column: message`, and give the exit code."""
    for line in error.message.split("\n"):
        click.echo(printable(line), err=True)
    if by_name:
        say("with --fleet NAME this works without the file")
    return OURS


def phase_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the phases of the fleet."""
    return _beginning(incomplete, _phases(_choice(ctx)))


def scales(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete `PHASE=` for each phase."""
    return _beginning(incomplete, (f"{name}=" for name in _phases(_choice(ctx))))


def targets(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete `all`, the phases and the members of the fleet."""
    from skerry.fleet.model import ALL, FLEET_LABEL

    choice = _choice(ctx)
    members = [record.member_name for record in live_records() if record.spec.labels.get(FLEET_LABEL) == choice.name]
    return _beginning(incomplete, (ALL, *_phases(choice), *members))


def _phases(choice: Choice) -> list[str]:
    from skerry.fleet.model import FLEET_LABEL, PHASE_LABEL

    if choice.spec is not None:
        return [phase.name for phase in choice.spec.phases]
    of_fleet = (record.spec.labels for record in live_records() if record.spec.labels.get(FLEET_LABEL) == choice.name)
    return sorted({labels[PHASE_LABEL] for labels in of_fleet if PHASE_LABEL in labels})


def _choice(ctx: click.Context) -> Choice:
    """Choose as `choose` does, but without errors while somebody types."""
    from skerry.fleet.load import load

    if fleet := ctx.params.get("fleet"):
        return Choice(fleet)
    path = ctx.params.get("file") or next(filter(os.path.isfile, FILES), None)
    try:
        spec = load(path) if path else None
    except SkerryError:
        spec = None
    return Choice("") if spec is None else Choice(spec.name, spec.project, spec)


def _beginning(incomplete: str, words: Iterable[str | None]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word and word.startswith(incomplete)]
