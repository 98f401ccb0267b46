"""Output of the command line: data on stdout, talk on stderr, colours and motion only on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import click

from skerry.errors import printable as printable

if TYPE_CHECKING:
    from skerry.providers.base import OnProgress, Progress

T = TypeVar("T")

SHORT_ID = 12
"""Characters of an id that people see."""
_SPINNER_AFTER_S = 1.0
_CONTROLS = {
    code: f"\\u{code:04x}"
    for code in (*range(0x7F, 0xA0), *range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that JSON need not escape and terminals obey all the same: U+009B begins a command as ESC and [ do, others
turn the direction of the text after them."""
_PIECE = 1 << 16
_BYTES = 1 << 16
"""Totals from here on are bytes; nothing has so many steps."""


def say(message: str) -> None:
    """Print one line of talk on stderr; indent further ones, so that they cannot be taken for others of ours."""
    prefix = click.style("skerry:", fg="yellow", bold=True)
    first, *more = (printable(line) for line in message.split("\n"))
    text = "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in more)])
    with suppress(OSError):  # a terminal that has gone
        click.echo(f"{prefix} {text}", err=True, color=_colour())


def echo(*lines: str) -> None:
    """Print lines of data for people, on stdout."""
    for line in lines:
        click.echo(line, color=_colour())


def print_json(value: Any) -> None:
    """Print one JSON object on stdout, indented."""
    _print(_json(value, "\n"))


def output_data(name: str, data: bytes) -> dict[str, str]:
    """Output of a program for JSON: as text, and in base64 too if it is not UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        import base64

        return {name: data.decode(errors="replace"), f"{name}_base64": base64.b64encode(data).decode()}


def print_json_line(value: Any) -> None:
    """Print one JSON object on one line, at once: somebody may be following."""
    _print(_json(value, ""))


def _json(value: Any, line: str) -> Iterator[str]:
    """Yield JSON piece by piece, since the output of a box may be long, and escaped six times as long.

    `line` is the beginning of a line; empty puts all on one.
    """
    import json

    if isinstance(value, str) and len(value) > _PIECE:
        yield '"'
        for at in range(0, len(value), _PIECE):
            yield json.dumps(value[at : at + _PIECE], ensure_ascii=False)[1:-1]
        yield '"'
    elif value and isinstance(value, dict | list | tuple):
        inner = line and f"{line}  "
        begin, end = "{}" if isinstance(value, dict) else "[]"
        for each in value:
            yield begin + inner
            begin = "," if line else ", "
            if isinstance(value, dict):
                yield f"{json.dumps(str(each), ensure_ascii=False)}: "
            yield from _json(value[each] if isinstance(value, dict) else each, inner)
        yield line + end
    else:
        yield json.dumps(value, ensure_ascii=False)


def _print(pieces: Iterator[str]) -> None:
    held = ""
    for piece in pieces:
        held += piece
        if len(held) > _PIECE:
            click.echo(held.translate(_CONTROLS).encode(errors="replace"), nl=False)
            held = ""
    click.echo(held.translate(_CONTROLS).encode(errors="replace"))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell: whole in a pipe, and cut at the edge of a terminal."""
    lines = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    columns = os.get_terminal_size(sys.stdout.fileno()).columns or None if _is_screen() else None
    for number, row in enumerate(lines):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()[:columns]
        echo(click.style(line, bold=True) if number == 0 else line)


def print_one(as_json: bool, value: Any, *lines: str) -> None:
    """Print one result: the value as JSON, or the lines."""
    if as_json:
        print_json(to_data(value))
    else:
        echo(*lines)


def print_list(
    items: Sequence[T],
    header: Sequence[str],
    row: Callable[[T], Sequence[str]],
    *,
    as_json: bool,
    quiet: bool = False,
    name: Callable[[T], str] = attrgetter("id"),
) -> None:
    """Print results as a JSON list, only by name, or as a table."""
    if as_json:
        print_json(to_data(items))
    elif quiet:
        echo(*map(name, items))
    else:
        print_table(header, [row(each) for each in items])


def to_data(value: Any) -> Any:
    """Plain values of structs, for JSON."""
    import msgspec

    return msgspec.to_builtins(value)


def printable_line(line: bytes) -> bytes:
    """Escape a line of a program's output, to stand behind the name of its source. Tabs stay."""
    text = line.removesuffix(b"\r").decode(errors="replace")
    return "\t".join(map(printable, text.split("\t"))).encode()


def format_span(seconds: float) -> str:
    """Span of time for people: `12s`, `3m`, `2h`, `5d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def count_of(count: int, what: str) -> str:
    """A number of things in words: 1 line, 2 lines."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def age(since: float) -> str:
    """Span from a time until now, for people."""
    return format_span(time.time() - since)


def _is_screen() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def clear_screen() -> bool:
    """Clear the terminal for what is drawn again and again; False if stdout is none."""
    if _is_screen():
        click.echo("\x1b[H\x1b[J", nl=False)
    return _is_screen()


def can_redraw() -> bool:
    """Whether stderr is a terminal for spinners and bars, and no log is written to it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    from skerry.log import is_on

    return not is_on()


@asynccontextmanager
async def spinner(text: str) -> AsyncIterator[None]:
    """Show a spinner on a terminal, if it takes more than a moment."""
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
    if not can_redraw():
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        await asyncio.Event().wait()


@contextmanager
def show_progress(title: str, as_json: bool) -> Iterator[OnProgress]:
    """Show progress on stderr: a bar on a terminal, a line for each new message elsewhere, nothing with JSON."""
    last = ""

    def print_line(progress: Progress) -> None:
        nonlocal last
        if progress.message and progress.message != last:
            last = progress.message
            with suppress(OSError):
                click.echo(_progress_line(progress), err=True)

    if as_json:
        yield lambda _: None
    elif can_redraw():
        with _bar(title) as on_progress:
            yield on_progress
    else:
        yield print_line


def _progress_line(progress: Progress) -> str:
    """Message as a line that cannot be taken for one of ours: it holds what a build prints."""
    text = printable(progress.message)
    return f"  {text}" if text.startswith("skerry:") else text


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
                console.print(_progress_line(progress), markup=False)

        yield on_progress


def _remember(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    if value and not ctx.resilient_parsing:
        ctx.obj.append(True)
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember, help="One JSON object on stdout."
)
"""`--json`, which also makes an error a JSON object."""


def _colour() -> bool | None:
    from skerry.config import variable

    return False if variable("NO_COLOR") else None
