"""`skerry fleet`: many sandboxes of one file, started in phases, seen and commanded as one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from skerry.cli import fleet_choice, output
from skerry.cli.errors import OURS
from skerry.cli.fleet_choice import Choice, choose, file_argument, fleet_options, provider_option
from skerry.cli.options import duration, grace_option, load_config, process_options, refuse_if
from skerry.cli.output import SHORT_ID, age, echo, json_option, print_json, print_one, print_table, to_data
from skerry.cli.registry import with_manager
from skerry.errors import InvalidFleet

if TYPE_CHECKING:
    from skerry.fleet.fleet import AsyncFleet
    from skerry.fleet.model import FleetSpec
    from skerry.fleet.plan import Plan
    from skerry.fleet.status import MemberStatus
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Record

T = TypeVar("T")
_STATUS: tuple[str, ...] = ("MEMBER", "ID", "STATE", "IP", "UPTIME", "CPU", "MEMORY", "ERROR")
_FLEETS = ("FLEET", "PROJECT", "PHASES", "READY", "AGE")
_STATUS_EVERY_S = 1.0
_CHANGES = {"create": ("+", "green"), "replace": ("~", "yellow"), "start": (">", "cyan"), "destroy": ("-", "red")}
"""Sign and colour of each kind of change."""
_DIGITS = 10


@click.group()
def fleet() -> None:
    """Start many sandboxes in phases from one file, and see and command them as one."""


@fleet.command()
@file_argument
@json_option
def validate(file: str | None, given: str | None, as_json: bool) -> int:
    """Check a fleet's file, and tell all that is wrong with it.

    Each mistake is a line `path:line:column: message` on stderr.
    """
    from skerry.fleet.load import load

    path = fleet_choice.path_of(file, given)
    try:
        settings = load_config()
        spec = load(path, provider=settings.provider, asks_providers=True, sets=settings.network.sets)
    except InvalidFleet as error:
        if not as_json:
            return fleet_choice.print_problems(error)
        print_json({"path": path, "ok": False, "problems": [each._asdict() for each in error.problems]})
        return OURS
    phases, members = len(spec.phases), sum(phase.count for phase in spec.phases)
    found = {"path": path, "ok": True, "fleet": spec.name, "phases": phases, "members": members, "problems": []}
    print_one(as_json, found, f"{path}: fleet {spec.name}, {phases} phases, {members} members")
    return 0


@fleet.command()
@file_argument
@provider_option
@json_option
def plan(file: str | None, given: str | None, provider: str | None, as_json: bool) -> None:
    """Show what waits for what, and what `up` would change. Changes nothing."""
    spec = fleet_choice.load(file, given, provider=provider)
    found = _with_fleet(Choice(spec.name, spec.project, spec), lambda fleet, _: fleet.plan())
    if as_json:
        print_json({"fleet": spec.name, **to_data(found), "changed": not found.is_empty})
    else:
        _print_plan(spec, found)


def _print_plan(spec: FleetSpec, plan: Plan) -> None:
    """Print the graph of phases and the changes."""
    from skerry.fleet.plan import Kind, graph_lines

    echo(*graph_lines(spec), "")
    for change in plan.changes:
        if change.kind is not Kind.KEEP:
            sign, colour = _CHANGES[change.kind]
            why = "" if change.id is None else f": {change.kind}, {change.why}"
            echo(click.style(f"{sign} {change.name}{why}", fg=colour))
    if plan.is_empty:
        echo("nothing to do: all is as the file says")
    else:
        echo(", ".join(f"{count} to {kind}" for kind, count in plan.counts().items() if count))


@fleet.command(epilog="Exit codes: 0 all is ready, 125 some is not, 130 Ctrl-C.")
@file_argument
@provider_option
@click.option("--timeout", metavar="TIME", help="For all of it, e.g. 5m; instead of the file's.")
@click.option("--max-parallel", type=click.IntRange(min=1), metavar="N", help="How many start at once.")
@json_option
def up(timeout: str | None, as_json: bool, **options: Any) -> int:
    """Make a fleet what its file says.

    Starts what is missing in the order of dependencies, replaces what changed, removes what is gone, and touches
    nothing else. Ctrl-C takes back what is not ready yet.
    """
    spec = fleet_choice.load(**options, timeout_s=duration(timeout, "--timeout"))
    from skerry.cli.fleet_up import bring_up

    phases = [phase.name for phase in spec.phases]
    return bring_up(spec, phases, lambda fleet, on_event: fleet.up(on_event=on_event), as_json)


@fleet.command()
@fleet_options
@click.option("-w", "--watch", is_flag=True, help="Every second, until Ctrl-C.")
@json_option
def status(watch: bool, as_json: bool, **options: Any) -> None:
    """Show how each member is.

    With --json, one object with the members by name; with -w too, one such line a second.
    """
    _with_fleet(choose(options), lambda opened, _: _show_status(opened, watch, as_json))


async def _show_status(fleet: AsyncFleet, watch: bool, as_json: bool) -> None:
    """Print the members, with `watch` every second."""
    while True:
        members = await fleet.status()
        if as_json:
            (output.print_json_line if watch else print_json)(to_data(members))
        else:
            _print_status(list(members.values()), watch and output.clear_screen())
        if not watch:
            return
        await asyncio.sleep(_STATUS_EVERY_S)


def _print_status(members: Sequence[MemberStatus], redraw: bool) -> None:
    """Redraw no more rows than the terminal has lines for, or the header would be out of sight."""
    rows, header = [_status_row(member) for member in members], _STATUS
    addresses = [",".join(f"{at}->{port}" for port, at in member.addresses.items()) for member in members]
    reach = [",".join(member.reach) for member in members]
    for name, cells in (("ADDRESSES", addresses), ("REACH", reach)):
        if any(cells):
            rows, header = [(*row, cell) for row, cell in zip(rows, cells, strict=True)], (*header, name)
    room = max(1, os.get_terminal_size(sys.stdout.fileno()).lines - 3) if redraw else len(rows)
    shown = rows if len(rows) <= room + 1 else rows[:room]
    print_table(header, shown)
    if len(shown) < len(rows):
        echo(f"... and {len(rows) - len(shown)} more")


def _status_row(member: MemberStatus) -> tuple[str, ...]:
    agent = member.agent
    measured = ("-", "-", "-")
    if agent is not None:
        measured = (output.format_span(agent.uptime_s), f"{agent.cpu_percent:.1f}%", f"{agent.memory_mb:.1f}M")
    return (member.name, member.id[:SHORT_ID], member.state, member.ip, *measured, member.error)


@fleet.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the highest of the members' own, where 125 is one that was not reached.",
)
@fleet_options
@process_options
@click.option("-d", "--detach", is_flag=True, help="Start it in the background, for `fleet logs` to show.")
@click.option("--timeout", metavar="TIME", help="End the command after this, e.g. 30s.")
@click.option("--max-parallel", type=click.IntRange(min=1), default=128, metavar="N", help="How many run it at once.")
@json_option
@click.argument("target", shell_complete=fleet_choice.targets)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def exec(target: str, argv: tuple[str, ...], max_parallel: int, as_json: bool, **options: Any) -> int:
    """Run a command in many members at once.

    TARGET is `all`, a phase, a member, or those with a label: KEY=VALUE. Each line bears the name of who said it. With
    --json, one line for each member when it ends.
    """
    argv = argv[1:] if argv[0] == "--" else argv
    refuse_if(not argv, "no command: write it after --")
    choice = choose(options)
    from skerry.cli.fleet_exec import run_in_members
    from skerry.cli.job import make_job

    job = make_job(argv, as_json, **options)
    return _with_fleet(choice, lambda opened, manager: run_in_members(manager, opened, target, job, max_parallel))


@fleet.command()
@fleet_options
@click.option("--follow", is_flag=True, help="Go on until they end.")
@json_option
@click.argument("target", default="all", metavar="[TARGET]", shell_complete=fleet_choice.targets)
def logs(target: str, follow: bool, as_json: bool, **options: Any) -> int:
    """Show the output of the members' background processes.

    TARGET is as for `fleet exec`; without one it is that of all. With --json, one line for each process.
    """
    refuse_if(follow and as_json, "--json and --follow exclude each other")
    choice = choose(options)
    from skerry.cli.fleet_exec import show_logs

    return _with_fleet(choice, lambda opened, manager: show_logs(manager, opened, target, follow, as_json))


@fleet.command()
@fleet_choice.file_option
@provider_option
@json_option
@click.argument("counts", nargs=-1, required=True, metavar="PHASE=N...", shell_complete=fleet_choice.scales)
def scale(file: str | None, provider: str | None, counts: tuple[str, ...], as_json: bool) -> int:
    """Have so many members in these phases.

    What is missing is started, those with the highest numbers go. The next `up` goes by the file again.
    """
    wanted: dict[str, int] = {}
    for text in counts:
        phase, _, number = text.partition("=")
        refuse_if(not (phase and number.isdecimal() and len(number) < _DIGITS), f"{text!r} is not PHASE=N")
        wanted[phase] = int(number)
    refuse_if(len(wanted) < len(counts), "a phase is named twice")
    spec = fleet_choice.load(file, provider=provider).scaled(wanted)
    from skerry.cli.fleet_up import bring_up

    return bring_up(spec, wanted, lambda fleet, on_event: fleet.scale(wanted, on_event=on_event), as_json)


@fleet.command("start-phase", epilog="Exit codes: 0 it is ready, 125 it is not, 130 Ctrl-C.")
@fleet_choice.file_option
@provider_option
@json_option
@click.argument("phase", shell_complete=fleet_choice.phase_names)
def start_phase(file: str | None, provider: str | None, phase: str, as_json: bool) -> int:
    """Make one phase what the file says, as `up` does for all.

    The phases that it waits for must be ready.
    """
    spec = fleet_choice.load(file, provider=provider)
    from skerry.cli.fleet_up import bring_up

    return bring_up(spec, [phase], lambda fleet, on_event: fleet.start_phase(phase, on_event=on_event), as_json)


@fleet.command("stop-phase")
@fleet_options
@click.option("--volumes", is_flag=True, help="Their data too.")
@grace_option
@json_option
@click.argument("phase", shell_complete=fleet_choice.phase_names)
def stop_phase(phase: str, volumes: bool, grace: str | None, as_json: bool, **options: Any) -> None:
    """Remove the members of a phase. What waits for it stays as it is."""
    grace_s = duration(grace, "--grace")
    _remove(choose(options), as_json, lambda opened: opened.stop_phase(phase, volumes=volumes, grace_s=grace_s))


@fleet.command()
@fleet_options
@click.option("--volumes", is_flag=True, help="Their data too.")
@grace_option
@json_option
def down(volumes: bool, grace: str | None, as_json: bool, **options: Any) -> None:
    """Remove every member, whatever state it is in.

    Phases end in the reverse order of their start, the processes of each by themselves within --grace (2s), or by
    force. With --fleet it works without the file. To do it twice is no error.
    """
    grace_s = duration(grace, "--grace")
    _remove(choose(options), as_json, lambda opened: opened.down(volumes=volumes, grace_s=grace_s))


def _remove(choice: Choice, as_json: bool, act: Callable[[AsyncFleet], Awaitable[Sequence[str]]]) -> None:
    """Print the members that were removed, as `rm` names sandboxes."""
    gone = _with_fleet(choice, lambda opened, _: act(opened), repair=True)
    print_one(as_json, {"fleet": choice.name, "removed": gone}, *gone)


@fleet.command()
@json_option
def ls(as_json: bool) -> None:
    """List the fleets that have members."""
    from skerry.fleet.model import FLEET_LABEL

    fleets: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in with_manager(lambda manager: manager.list(), repair=True):
        if FLEET_LABEL in record.spec.labels:
            fleets[record.spec.labels[FLEET_LABEL], record.spec.project].append(record)
    found = [_fleet_data(name, project, members) for (name, project), members in sorted(fleets.items())]
    output.print_list(found, _FLEETS, _fleet_row, as_json=as_json)


def _fleet_data(name: str, project: str, members: Sequence[Record]) -> dict[str, Any]:
    from skerry.fleet.model import PHASE_LABEL
    from skerry.fleet.status import is_ready

    return {
        "fleet": name,
        "project": project,
        "phases": sorted({record.spec.labels.get(PHASE_LABEL, "") for record in members}),
        "ready": sum(map(is_ready, members)),
        "members": len(members),
        "created_at": min(record.created_at for record in members),
    }


def _fleet_row(fleet: dict[str, Any]) -> tuple[str, ...]:
    ready = f"{fleet['ready']}/{fleet['members']}"
    return fleet["fleet"], fleet["project"], ",".join(fleet["phases"]), ready, age(fleet["created_at"])


def _with_fleet(
    choice: Choice, work: Callable[[AsyncFleet, AsyncSandboxManager], Awaitable[T]], *, repair: bool = False
) -> T:
    from skerry.fleet.fleet import AsyncFleet

    async def main(manager: AsyncSandboxManager) -> T:
        if choice.spec is not None:
            return await work(AsyncFleet(manager, choice.spec), manager)
        return await work(await AsyncFleet.open(manager, choice.name, choice.project), manager)

    return with_manager(main, repair=repair)
