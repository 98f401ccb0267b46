"""What is known of fleets, for people and as JSON."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.output import SHORT_ID, echo, format_span, print_json, print_json_line, print_table

if TYPE_CHECKING:
    from skerry.fleet.fleet import AsyncFleet
    from skerry.fleet.model import FleetSpec
    from skerry.fleet.plan import Change, Plan
    from skerry.fleet.status import MemberStatus
    from skerry.records import Record

_STATUS = ("MEMBER", "ID", "STATE", "IP", "UPTIME", "CPU", "MEMORY", "ERROR")
_FLEETS = ("FLEET", "PROJECT", "PHASES", "READY", "AGE")
_EVERY_S = 1.0
_HOME = "\x1b[H\x1b[J"
_SIGNS = {"create": "+", "replace": "~", "start": ">", "destroy": "-"}
_COLOURS = {"create": "green", "replace": "yellow", "start": "cyan", "destroy": "red"}


def print_plan(spec: FleetSpec, plan: Plan) -> None:
    from skerry.fleet.plan import Kind, graph_lines

    for line in graph_lines(spec):
        echo(line)
    echo("")
    for change in plan.changes:
        if change.kind is not Kind.KEEP:
            echo(_change_line(change))
    if plan.is_empty:
        echo("nothing to do: all is as the file says")
    else:
        echo(", ".join(f"{count} to {kind}" for kind, count in plan.counts().items() if count))


def _change_line(change: Change) -> str:
    why = "" if change.id is None else f": {change.kind}, {change.why}"
    return click.style(f"{_SIGNS[change.kind]} {change.name}{why}", fg=_COLOURS[change.kind])


async def show_status(fleet: AsyncFleet, watch: bool, as_json: bool) -> None:
    import asyncio

    redraw = watch and not as_json and sys.stdout is not None and sys.stdout.isatty()
    while True:
        members = await fleet.status()
        if redraw:
            click.echo(_HOME, nl=False)
            _print_screen([_status_row(member) for member in members.values()])
        else:
            _print_status(members, watch, as_json)
        if not watch:
            return
        await asyncio.sleep(_EVERY_S)


def _print_status(members: dict[str, MemberStatus], watch: bool, as_json: bool) -> None:
    import msgspec

    if as_json:
        data = msgspec.to_builtins(members)
        print_json_line(data) if watch else print_json(data)
    else:
        print_table(_STATUS, [_status_row(member) for member in members.values()])


def _print_screen(rows: Sequence[Sequence[str]]) -> None:
    """No more than the terminal has lines for, or its head would be out of sight."""
    room = max(1, os.get_terminal_size(sys.stdout.fileno()).lines - 3)
    shown = rows if len(rows) <= room + 1 else rows[:room]
    print_table(_STATUS, shown)
    if len(shown) < len(rows):
        echo(f"... and {len(rows) - len(shown)} more")


def _status_row(member: MemberStatus) -> tuple[str, ...]:
    agent = member.agent
    measured = ("-", "-", "-")
    if agent is not None:
        measured = (format_span(agent.uptime_s), f"{agent.cpu_percent:.1f}%", f"{agent.memory_mb:.1f}M")
    return (member.name, member.id[:SHORT_ID], member.state, member.ip, *measured, member.error)


def print_gone(fleet: str, names: Sequence[str], as_json: bool) -> None:
    """The members that were removed, as `rm` names sandboxes."""
    if as_json:
        print_json({"fleet": fleet, "removed": list(names)})
        return
    for name in names:
        echo(name)


def print_fleets(records: Sequence[Record], as_json: bool) -> None:
    """Every fleet that some of these records are members of."""
    from skerry.fleet.model import FLEET_LABEL

    fleets: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if FLEET_LABEL in record.spec.labels:
            fleets[record.spec.labels[FLEET_LABEL], record.spec.project].append(record)
    found = [_fleet_data(name, project, members) for (name, project), members in sorted(fleets.items())]
    if as_json:
        print_json(found)
    else:
        print_table(_FLEETS, [_fleet_row(fleet) for fleet in found])


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
    age = format_span(time.time() - fleet["created_at"])
    return (fleet["fleet"], fleet["project"], ",".join(fleet["phases"]), f"{fleet['ready']}/{fleet['members']}", age)
