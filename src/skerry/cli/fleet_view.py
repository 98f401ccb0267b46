"""How far a fleet has come: a table that lives on a terminal, a line for each event elsewhere, both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from skerry.cli.output import printable
from skerry.config import variable
from skerry.fleet.events import (
    FleetEvent,
    MemberCreating,
    MemberDestroyed,
    MemberFailed,
    MemberReady,
    PhaseFailed,
    PhaseReady,
    PhaseStarted,
)

if TYPE_CHECKING:
    from rich.console import Group

    from skerry.fleet.model import Phase

_HEADER = ("PHASE", "STATE", "READY", "TIME", "LAST ERROR")
_COLOURS = {
    "waiting": "dim",
    "starting": "cyan",
    "ready": "green",
    "partial": "yellow",
    "skipped": "yellow",
    "stopped": "yellow",
    "gone": "",
}
_WRONG = "red"
_PER_SECOND = 8
_CLOCK = time.monotonic


class Row:
    """What is known of one phase."""

    def __init__(self, total: int, state: str) -> None:
        self.total = total
        self.state = state
        self.ready: set[str] = set()
        self.started_at: float | None = None
        self.duration_s: float | None = None
        self.error = ""

    def cells(self, name: str) -> Sequence[str]:
        return (name, self.state, f"{len(self.ready)}/{self.total}", self._time(), first_line(self.error))

    def _time(self) -> str:
        if self.duration_s is not None:
            return format_seconds(self.duration_s)
        return "" if self.started_at is None else format_seconds(_CLOCK() - self.started_at)


class View:
    """Follows the events of a fleet; a phase is in the table from the start, also one whose turn never comes."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self.rows = {phase.name: Row(phase.count, "waiting") for phase in phases}
        self.touched: dict[str, None] = {}
        """Members that were begun or removed, in the order of that."""
        self.note = ""
        """A word to the user below the table."""

    def __call__(self, event: FleetEvent) -> None:
        row = self.rows.setdefault(event.phase, Row(0, "gone"))  # of a phase that was taken out of the file
        match event:
            case PhaseStarted():
                row.total, row.state, row.started_at = event.total, "starting", _CLOCK()
            case MemberCreating():
                self.touched[event.member] = None
            case MemberReady():
                row.ready.add(event.member)
            case MemberFailed():
                row.ready.discard(event.member)
                row.error = f"{event.member}: {event.error}"
            case MemberDestroyed():
                row.ready.discard(event.member)
                self.touched[event.member] = None
            case PhaseReady():
                row.state, row.duration_s = "ready", event.duration_s
            case PhaseFailed():
                row.state, row.duration_s = event.state.replace("_", " "), event.duration_s
                row.error = row.error or event.error
            case _:
                pass

    def stop(self) -> None:
        """Nothing more happens to phases that are not decided yet."""
        for row in self.rows.values():
            if row.state in ("waiting", "starting"):
                row.state, row.ready = "stopped", set()
                row.duration_s = None if row.started_at is None else _CLOCK() - row.started_at
        self.note = ""

    def draw(self) -> Group:
        """The table as it is now. Where the terminal is narrow its right edge is cut, so that an error that is long
        takes nothing from the columns before it. A thread draws, so rows may come meanwhile."""
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
def shown(view: View, as_json: bool) -> Iterator[None]:
    """Show it meanwhile, and at the end once more as it then is. With JSON nobody looks."""
    if as_json or not is_terminal():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    with Live(console=console, refresh_per_second=_PER_SECOND, get_renderable=view.draw):
        yield


def is_terminal() -> bool:
    """Whether it is one on which a table can live."""
    return sys.stderr is not None and sys.stderr.isatty() and variable("TERM") not in ("dumb", "unknown")


def print_event(event: FleetEvent) -> None:
    """One line; a reader that has gone is no error."""
    with suppress(OSError):
        click.echo(printable(f"{event.phase}: {_words(event)}"), err=True)


def _words(event: FleetEvent) -> str:
    match event:
        case PhaseStarted():
            return f"starts {event.total}"
        case MemberCreating():
            return f"{event.member} starts"
        case MemberReady():
            return f"{event.member} " + ("is kept" if event.kept else f"is ready, {format_seconds(event.duration_s)}")
        case MemberFailed():
            return f"{event.member} failed: {first_line(event.error)}"
        case MemberDestroyed():
            return f"{event.member} is removed: {event.why}"
        case PhaseReady():
            return f"ready, {event.ready}/{event.total}, {format_seconds(event.duration_s)}"
        case PhaseFailed():
            state = event.state.replace("_", " ")
            return f"{state}, {event.ready}/{event.total}: {first_line(event.error)}"
        case _:
            return type(event).__name__


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def format_seconds(seconds: float) -> str:
    """`0.3s`, `42.0s`, `3m05s`: tenths matter here, and hours are rare."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s"
