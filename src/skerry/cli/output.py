"""How the command line speaks: data on stdout, talk on stderr, colours and motion only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import click

_SPINNER_AFTER_S = 1.0


def say(message: str) -> None:
    """One line of talk, on stderr; a terminal that has gone is no error."""
    prefix = click.style("skerry:", fg="yellow", bold=True)
    with suppress(OSError):
        click.echo(f"{prefix} {message}", err=True, color=_colour())


def echo(line: str) -> None:
    """One line of data for people, on stdout."""
    click.echo(line, color=_colour())


def print_json(value: Any) -> None:
    """One JSON object on stdout, on lines of its own."""
    import json

    click.echo(json.dumps(value, indent=2, ensure_ascii=False).encode(errors="replace"))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, so that nothing is cut off in a pipe."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for number, row in enumerate((header, *rows)):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        echo(click.style(line, bold=True) if number == 0 else line)


@asynccontextmanager
async def spinner(text: str) -> AsyncIterator[None]:
    """Show that something goes on, on a terminal, if it takes more than a moment."""
    import asyncio

    if not sys.stderr or not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_spin(text))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _spin(text: str) -> None:
    import asyncio

    await asyncio.sleep(_SPINNER_AFTER_S)
    from rich.console import Console

    with Console(stderr=True).status(text):
        await asyncio.Event().wait()


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, which also makes an error a JSON object."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_remember, help="One JSON object on stdout."
    )(function)


def _remember(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    if value and not ctx.resilient_parsing:
        ctx.obj.append(True)
    return value


def _colour() -> bool | None:
    """Never with NO_COLOR; otherwise as the terminal is."""
    from skerry.config import variable

    return False if variable("NO_COLOR") else None
