"""How the command line speaks: data on stdout, talk on stderr, colours and motion only on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import click

SHORT_ID = 12
"""So much of an id is shown to people."""
_SPINNER_AFTER_S = 1.0
_OBEYED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""What JSON need not escape and terminals obey all the same: U+009B begins a command as ESC and [ do."""


def say(message: str) -> None:
    """One line of talk, on stderr; a terminal that has gone is no error."""
    prefix = click.style("skerry:", fg="yellow", bold=True)
    text = "\n".join(printable(line) for line in message.split("\n"))
    with suppress(OSError):
        click.echo(f"{prefix} {text}", err=True, color=_colour())


def warn_of_network(mode: str) -> None:
    if mode == "host":
        say("warning: --network host shares this machine's network with the sandbox, its local services included")


def echo(line: str) -> None:
    """One line of data for people, on stdout."""
    click.echo(line, color=_colour())


def print_json(value: Any) -> None:
    """One JSON object on stdout, on lines of its own."""
    import json

    click.echo(_harmless(json.dumps(value, indent=2, ensure_ascii=False)))


def output_data(name: str, data: bytes) -> dict[str, str]:
    """A program's output for JSON: text as it is; what is not UTF-8 with replacements, and exactly beside it."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        import base64

        return {name: data.decode(errors="replace"), f"{name}_base64": base64.b64encode(data).decode()}


def print_json_line(value: Any) -> None:
    """One JSON object on one line, at once: somebody may be following."""
    import json

    click.echo(_harmless(json.dumps(value, ensure_ascii=False)))


def _harmless(text: str) -> bytes:
    return text.translate(_OBEYED).encode(errors="replace")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell: whole in a pipe, and cut where a terminal ends."""
    lines = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    columns = _terminal_width()
    for number, row in enumerate(lines):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()[:columns]
        echo(click.style(line, bold=True) if number == 0 else line)


def printable(text: str) -> str:
    """Text that does nothing to a terminal but stand there, whoever wrote it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def format_span(seconds: float) -> str:
    """A span of time for people: `12s`, `3m`, `2h`, `5d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _terminal_width() -> int | None:
    if not sys.stdout or not sys.stdout.isatty():
        return None
    return os.get_terminal_size(sys.stdout.fileno()).columns or None


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
