"""`fleet up` and `fleet scale`: bring a fleet to what its file says, in sight of the user, who may stop it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from skerry.cli.errors import OURS
from skerry.cli.output import can_redraw, print_json, printable, say, to_data
from skerry.cli.registry import with_manager
from skerry.cli.terminal import on_signals
from skerry.config import variable
from skerry.fleet import events
from skerry.fleet.events import FleetEvent, OnEvent, Report
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, Phase
from skerry.fleet.status import is_ready

if TYPE_CHECKING:
    from rich.console import Group

Act = Callable[[AsyncFleet, OnEvent], Awaitable[Report]]

_SHOW_CURSOR = b"\x1b[?25h\n"
_TAKING_BACK = "taking back what is not ready yet; once more to leave at once"
_NAMED = 8
_HEADER = ("PHASE", "STATE", "READY", "TIME", "LAST ERROR")
_COLOURS = {"waiting": "dim", "starting": "cyan", "ready": "green", "gone": ""}
_COLOURS |= dict.fromkeys(("partial", "skipped", "stopped"), "yellow")
_WRONG = "red"
_PER_SECOND = 8


def bring_up(spec: FleetSpec, phases: Collection[str], act: Act, as_json: bool) -> int:
    """Act on a fleet, show the progress of these phases, print the report and give the exit code."""
    view = View(phase for phase in spec.phases if phase.name in phases)
    return with_manager(lambda manager: _bring_up(AsyncFleet(manager, spec), view, act, as_json), repair=True)


async def _bring_up(fleet: AsyncFleet, view: View, act: Act, as_json: bool) -> int:
    quiet = as_json or _is_terminal()
    signals: list[int] = []

    def on_event(event: FleetEvent) -> None:
        words = view(event)
        if not quiet:
            with suppress(OSError):  # a reader that has gone
                click.echo(printable(f"{event.phase}: {words}"), err=True)

    def end(number: int) -> None:
        """Cancel at the first signal, which takes back what is not ready yet; leave at once at the next."""
        signals.append(number)
        if len(signals) > 1:  # the next command that opens the registry removes what is half made
            if _is_terminal():
                with suppress(OSError):
                    os.write(2, _SHOW_CURSOR)
            os._exit(128 + signals[0])
        view.note = _TAKING_BACK
        if not quiet:
            say(_TAKING_BACK)
        task.cancel()

    task = asyncio.ensure_future(act(fleet, on_event))
    with on_signals(end):
        try:
            with _shown(view, as_json):
                try:
                    report = await task
                finally:
                    view.stop()
        except asyncio.CancelledError:
            if not signals:
                raise
            up = [name for name, record in (await fleet.records()).items() if is_ready(record)]
            removed = [name for name in view.touched if name not in up]
            if as_json:
                print_json({"fleet": fleet.name, "ok": False, "interrupted": True, "up": up, "removed": removed})
            else:
                say(f"interrupted; up: {_names(up)}; removed: {_names(removed)}")
            return 128 + signals[0]
    return _print_report(report, as_json)


def _names(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(list(names)[:_NAMED]) + more or "none"


def _print_report(report: Report, as_json: bool) -> int:
    code = 0 if report.ok else OURS
    if as_json:
        print_json({"ok": report.ok, **to_data(report)})
        return code
    for name, phase in report.phases.items():
        if not phase.ok:
            why = f": {phase.errors[name]}" if name in phase.errors else ""
            say(f"{name}: {phase.state.replace('_', ' ')}, {phase.ready} of {phase.total} ready{why}")
        for member, error in phase.errors.items():
            if member != name:
                say(f"{member}: {error}")
    for member, error in report.errors.items():
        say(f"{member} could not be removed: {error}")
    ready = sum(phase.ready for phase in report.phases.values())
    total = sum(phase.total for phase in report.phases.values())
    say(f"fleet {report.fleet}: {ready} of {total} ready, {_format_seconds(report.duration_s)}")
    return code


@dataclass
class _Row:
    """Progress of one phase."""

    total: int
    state: str
    ready: set[str] = field(default_factory=set)
    started_at: float | None = None
    duration_s: float | None = None
    error: str = ""

    def cells(self, name: str) -> Sequence[str]:
        spent_s = self.duration_s
        if spent_s is None and self.started_at is not None:
            spent_s = time.monotonic() - self.started_at
        spent = "" if spent_s is None else _format_seconds(spent_s)
        return (name, self.state, f"{len(self.ready)}/{self.total}", spent, _first_line(self.error))


class View:
    """Table of phases that follows the events of a fleet; all phases are in it from the start."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self.rows = {phase.name: _Row(phase.count, "waiting") for phase in phases}
        self.touched: dict[str, None] = {}
        """Members that were begun or removed, in the order of that."""
        self.note = ""
        """Line below the table."""

    def __call__(self, event: FleetEvent) -> str:
        """Follow an event, and give its words for a line."""
        row = self.rows.setdefault(event.phase, _Row(0, "gone"))  # of a phase that was taken out of the file
        match event:
            case events.PhaseStarted():
                row.total, row.state, row.started_at = event.total, "starting", time.monotonic()
                return f"starts {event.total}"
            case events.MemberCreating():
                self.touched[event.member] = None
                return f"{event.member} starts"
            case events.MemberReady():
                row.ready.add(event.member)
                how = "is kept" if event.kept else f"is ready, {_format_seconds(event.duration_s)}"
                return f"{event.member} {how}"
            case events.MemberFailed():
                row.ready.discard(event.member)
                row.error = f"{event.member}: {event.error}"
                return f"{event.member} failed: {_first_line(event.error)}"
            case events.MemberDestroyed():
                row.ready.discard(event.member)
                self.touched[event.member] = None
                return f"{event.member} is removed: {event.why}"
            case events.PhaseReady():
                row.state, row.duration_s = "ready", event.duration_s
                return f"ready, {event.ready}/{event.total}, {_format_seconds(event.duration_s)}"
            case events.PhaseFailed():
                row.state, row.duration_s = event.state.replace("_", " "), event.duration_s
                row.error = row.error or event.error
                return f"{row.state}, {event.ready}/{event.total}: {_first_line(event.error)}"
        return type(event).__name__

    def stop(self) -> None:
        """Mark the phases that are not decided as stopped."""
        for row in self.rows.values():
            if row.state in ("waiting", "starting"):
                row.state, row.ready = "stopped", set()
                row.duration_s = None if row.started_at is None else time.monotonic() - row.started_at
        self.note = ""

    def draw(self) -> Group:
        """Draw the table. A narrow terminal cuts its right edge, so that a long error takes nothing from the columns
        before it. A thread draws, so rows may come meanwhile."""
        from rich.console import Group
        from rich.text import Text

        known = list(self.rows.items())
        rows = [[printable(cell) for cell in row.cells(name)] for name, row in known]
        widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
        lines = [Text("  ".join(map(str.ljust, _HEADER, widths)).rstrip(), "bold")]
        for (_, row), cells in zip(known, rows, strict=True):
            phase, state, *rest, error = map(str.ljust, cells, widths)
            styled = ((phase, ""), (state, _COLOURS.get(row.state, _WRONG)), *((cell, "") for cell in rest))
            lines.append(Text("  ").join(Text(*cell) for cell in (*styled, (error.rstrip(), _WRONG))))
        if self.note:
            lines.append(Text(self.note, "yellow"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


@contextmanager
def _shown(view: View, as_json: bool) -> Iterator[None]:
    """Show the table meanwhile and as it is at the end, but not with JSON."""
    if as_json or not _is_terminal():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    with Live(console=console, refresh_per_second=_PER_SECOND, get_renderable=view.draw):
        yield


def _is_terminal() -> bool:
    """Whether stderr is a terminal that can redraw a table."""
    return can_redraw() and variable("TERM") not in ("dumb", "unknown")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _format_seconds(seconds: float) -> str:
    """`0.3s`, `42.0s`, `3m05s`: tenths matter here, and hours are rare."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s"
