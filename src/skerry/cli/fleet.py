"""`skerry fleet`: many sandboxes of one file, started in phases, seen and commanded as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from skerry.cli.fleet_choice import (
    Choice,
    changed,
    choose,
    file_argument,
    file_option,
    fleet_options,
    load,
    path_of,
    phase_names,
    provider_option,
    scales,
    targets,
    tell_problems,
)
from skerry.cli.fleet_tables import print_fleets, print_gone, print_plan, show_status
from skerry.cli.options import duration, environment
from skerry.cli.output import echo, json_option, print_json

if TYPE_CHECKING:
    from skerry.fleet.fleet import AsyncFleet
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record

T = TypeVar("T")
_DIGITS = 10


@click.group()
def command() -> None:
    """Start many sandboxes in phases from one file, and see and command them as one."""


@command.command()
@file_argument
@json_option
def validate(file: str | None, given: str | None, as_json: bool) -> int:
    """Check a fleet's file, and tell all that is wrong with it.

    Each mistake is a line `path:line:column: message` on stderr.
    """
    from skerry.cli.errors import OURS
    from skerry.errors import InvalidFleet
    from skerry.fleet.load import load

    path = path_of(file, given)
    try:
        spec = load(path)
    except InvalidFleet as error:
        if not as_json:
            return tell_problems(error)
        print_json({"path": path, "ok": False, "problems": [each._asdict() for each in error.problems]})
        return OURS
    phases, members = len(spec.phases), sum(phase.count for phase in spec.phases)
    if as_json:
        print_json({"path": path, "ok": True, "fleet": spec.name, "phases": phases, "members": members, "problems": []})
    else:
        echo(f"{path}: fleet {spec.name}, {phases} phases, {members} members")
    return 0


@command.command()
@file_argument
@provider_option
@json_option
def plan(file: str | None, given: str | None, provider: str | None, as_json: bool) -> None:
    """Show what waits for what, and what `up` would change. Changes nothing."""
    spec = changed(load(path_of(file, given)), provider)
    found = _with_fleet(Choice(spec.name, spec.project, spec), lambda fleet, _: fleet.plan())
    if as_json:
        import msgspec

        print_json({"fleet": spec.name, **msgspec.to_builtins(found), "changed": not found.is_empty})
    else:
        print_plan(spec, found)


@command.command(epilog="Exit codes: 0 all is ready, 125 some is not, 130 Ctrl-C.")
@file_argument
@provider_option
@click.option("--timeout", metavar="TIME", help="For all of it, e.g. 5m; instead of the file's.")
@click.option("--max-parallel", type=click.IntRange(min=1), metavar="N", help="How many start at once.")
@json_option
def up(
    file: str | None,
    given: str | None,
    provider: str | None,
    timeout: str | None,
    max_parallel: int | None,
    as_json: bool,
) -> int:
    """Make a fleet what its file says.

    Starts what is missing in the order of dependencies, replaces what changed, removes what is gone, and touches
    nothing else. Ctrl-C takes back what is not ready yet.
    """
    spec = changed(load(path_of(file, given)), provider, duration(timeout, "--timeout"), max_parallel)
    from skerry import config
    from skerry.cli.fleet_up import bring_up

    phases = [phase.name for phase in spec.phases]
    return bring_up(config.load(), spec, phases, lambda fleet, on_event: fleet.up(on_event=on_event), as_json)


@command.command()
@fleet_options
@click.option("-w", "--watch", is_flag=True, help="Every second, until Ctrl-C.")
@json_option
def status(file: str | None, fleet: str | None, project: str | None, watch: bool, as_json: bool) -> None:
    """Show how each member is.

    With --json, one object with the members by name; with -w too, one such line a second.
    """
    _with_fleet(choose(file, fleet, project), lambda opened, _: show_status(opened, watch, as_json))


@command.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the highest of the members' own, where 125 is one that was not reached.",
)
@fleet_options
@click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name.")
@click.option("-w", "--workdir", "cwd", metavar="DIR", help="The folder in the box to start in.")
@click.option("-u", "--user", metavar="USER", help="A user name, UID or UID:GID of the box.")
@click.option("-d", "--detach", is_flag=True, help="Start it in the background, for `fleet logs` to show.")
@click.option("--timeout", metavar="TIME", help="End the command after this, e.g. 30s.")
@click.option("--max-parallel", type=click.IntRange(min=1), default=128, metavar="N", help="How many run it at once.")
@json_option
@click.argument("target", shell_complete=targets)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def exec(
    file: str | None,
    fleet: str | None,
    project: str | None,
    target: str,
    argv: tuple[str, ...],
    env: tuple[str, ...],
    cwd: str | None,
    user: str | None,
    detach: bool,
    timeout: str | None,
    max_parallel: int,
    as_json: bool,
) -> int:
    """Run a command in many members at once.

    TARGET is `all`, a phase, a member, or those with a label: KEY=VALUE. Each line bears the name of who said it. With
    --json, one line for each member when it ends.
    """
    argv = argv[1:] if argv[0] == "--" else argv
    if not argv:
        raise click.UsageError("no command: write it after --", click.get_current_context())
    choice = choose(file, fleet, project)
    from skerry.cli.fleet_exec import run_on
    from skerry.cli.running import Job

    job = Job(
        argv=argv,
        timeout_s=duration(timeout, "--timeout"),
        as_json=as_json,
        env=environment(env),
        cwd=cwd,
        user=user,
        background=detach,
    )

    async def work(opened: AsyncFleet, manager: AsyncSandboxManager) -> int:
        return await run_on(manager, await _members(opened, target), job, max_parallel)

    return _with_fleet(choice, work)


@command.command()
@fleet_options
@click.option("--follow", is_flag=True, help="Go on until they end.")
@json_option
@click.argument("target", default="all", metavar="[TARGET]", shell_complete=targets)
def logs(file: str | None, fleet: str | None, project: str | None, target: str, follow: bool, as_json: bool) -> int:
    """Show the output of the members' background processes.

    TARGET is as for `fleet exec`; without one it is that of all. With --json, one line for each process.
    """
    if follow and as_json:
        raise click.UsageError("--json and --follow exclude each other", click.get_current_context())
    choice = choose(file, fleet, project)
    from skerry.cli.fleet_logs import show_logs

    async def work(opened: AsyncFleet, manager: AsyncSandboxManager) -> int:
        return await show_logs(manager, await _members(opened, target), follow=follow, as_json=as_json)

    return _with_fleet(choice, work)


@command.command()
@file_option
@provider_option
@json_option
@click.argument("counts", nargs=-1, required=True, metavar="PHASE=N...", shell_complete=scales)
def scale(file: str | None, provider: str | None, counts: tuple[str, ...], as_json: bool) -> int:
    """Have so many members in these phases.

    What is missing is started, those with the highest numbers go. The next `up` goes by the file again.
    """
    wanted = dict(_count(text) for text in counts)
    if len(wanted) < len(counts):
        raise click.UsageError("a phase is named twice", click.get_current_context())
    spec = changed(load(path_of(file)), provider).scaled(wanted)
    from skerry import config
    from skerry.cli.fleet_up import bring_up

    return bring_up(
        config.load(), spec, wanted, lambda fleet, on_event: fleet.scale(wanted, on_event=on_event), as_json
    )


def _count(text: str) -> tuple[str, int]:
    phase, _, number = text.partition("=")
    if not (phase and number.isdecimal() and len(number) < _DIGITS):
        raise click.UsageError(f"{text!r} is not PHASE=N", click.get_current_context())
    return phase, int(number)


@command.command("stop-phase")
@fleet_options
@click.option("--volumes", is_flag=True, help="Their data too.")
@json_option
@click.argument("phase", shell_complete=phase_names)
def stop_phase(
    file: str | None, fleet: str | None, project: str | None, phase: str, volumes: bool, as_json: bool
) -> None:
    """Remove the members of a phase. What waits for it stays as it is."""
    choice = choose(file, fleet, project)
    gone = _with_fleet(choice, lambda opened, _: opened.stop_phase(phase, volumes=volumes), repair=True)
    print_gone(choice.name, gone, as_json)


@command.command()
@fleet_options
@click.option("--volumes", is_flag=True, help="Their data too.")
@json_option
def down(file: str | None, fleet: str | None, project: str | None, volumes: bool, as_json: bool) -> None:
    """Remove every member, whatever state it is in.

    With --fleet it works without the file. To do it twice is no error.
    """
    choice = choose(file, fleet, project)
    gone = _with_fleet(choice, lambda opened, _: opened.down(volumes=volumes), repair=True)
    print_gone(choice.name, gone, as_json)


@command.command()
@json_option
def ls(as_json: bool) -> None:
    """List the fleets that have members."""
    from skerry.cli.registry import with_manager

    print_fleets(with_manager(lambda manager: manager.list(), repair=True), as_json)


def _with_fleet(
    choice: Choice, work: Callable[[AsyncFleet, AsyncSandboxManager], Awaitable[T]], *, repair: bool = False
) -> T:
    from skerry.cli.registry import with_manager
    from skerry.fleet.fleet import AsyncFleet

    async def main(manager: AsyncSandboxManager) -> T:
        if choice.spec is not None:
            return await work(AsyncFleet(manager, choice.spec), manager)
        return await work(await AsyncFleet.open(manager, choice.name, choice.project), manager)

    return with_manager(main, repair=repair)


async def _members(fleet: AsyncFleet, target: str) -> dict[str, Record]:
    """Those that are meant; none at all is an error, but for a phase that has none."""
    from skerry.errors import NotFound
    from skerry.fleet.broadcast import choose

    records = await fleet._roster.records()
    if not records:
        raise NotFound(f"fleet {fleet.name!r} has no members; `skerry fleet up` starts them")
    found = choose(records, target, [phase.name for phase in fleet.spec.phases] if fleet.spec else [], fleet.name)
    if not found and "=" in target:
        raise NotFound(f"fleet {fleet.name!r} has no member with the label {target!r}")
    return found
