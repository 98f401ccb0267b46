"""How far something long has come: a bar on a terminal, lines elsewhere, both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from skerry.cli.output import printable

if TYPE_CHECKING:
    from skerry.providers.base import OnProgress, Progress

_BYTES = 1 << 16
"""Totals from here on are bytes; nothing has so many steps."""


@contextmanager
def shown(title: str, as_json: bool) -> Iterator[OnProgress]:
    """Show what is told meanwhile. With JSON nobody looks, so nothing is."""
    if as_json:
        yield lambda _: None
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bar(title) as on_progress:
            yield on_progress
    else:
        yield _Lines()


class _Lines:
    """One line for each thing that is said, but not for each of the bytes."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, progress: Progress) -> None:
        if progress.message and progress.message != self._last:
            self._last = progress.message
            with suppress(OSError):
                click.echo(printable(progress.message), err=True)


@contextmanager
def _bar(title: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from skerry.units import format_size

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    console = Console(stderr=True, highlight=False)
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(escape(title), total=None, count="")

        def on_progress(progress: Progress) -> None:
            done, total = progress.done, progress.total
            in_bytes = total is None or total >= _BYTES
            if done is None:
                count = ""
            elif in_bytes:
                count = "/".join(format_size(each) for each in (done, total) if each is not None)
            else:
                count = f"{done}/{total}"
            bar.update(task, completed=done or 0, total=total, count=count)
            if not in_bytes:  # what a build prints stays to be read
                console.print(printable(progress.message), markup=False)

        yield on_progress
