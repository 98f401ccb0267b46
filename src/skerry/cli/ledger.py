"""`skerry ledger`: all that was done, in lines that nobody can change unseen."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from skerry.cli.options import all_of, load_config, references, refuse_if, words
from skerry.cli.output import (
    SHORT_ID,
    count_of,
    echo,
    json_option,
    print_json,
    print_json_line,
    printable,
    say,
    to_data,
)
from skerry.errors import InvalidSpec

if TYPE_CHECKING:
    from skerry.ledger.line import Line
    from skerry.ledger.reading import AsyncLedger, LineFilter

T = TypeVar("T")
_KINDS = (
    "create", "ready", "end", "destroy", "lost", "adopt", "acquire", "rename", "rebuild", "change", "pause", "resume",
    "stop", "start", "snapshot", "remove", "exec", "exit", "file", "port", "env", "lifetime", "rules", "connect",
    "close", "refuse", "resolve", "secret", "gate", "tenant", "token", "webhook",
    "begin", "rotate", "torn", "gap",
)  # fmt: skip
_TOOLS = ("cli", "api", "mcp", "gate", "forwarder")
_COLUMNS = ("seq", "time", "kind", "sandbox", "uid", "tool", "pid", "facts", "hash")
_BROKEN = 1


_HASH = re.compile(r"[0-9a-f]{64}")


_filter_options = all_of(
    click.option("--sandbox", metavar="SANDBOX", shell_complete=references, help="Of one, by its id or its name."),
    click.option(
        "--kind",
        "kinds",
        multiple=True,
        metavar="KIND",
        type=click.Choice(_KINDS),
        help="Of a kind; can be given again.",
    ),
    click.option("--since", metavar="TIME", help="From then on: 2026-01-31T12:00, or 1h for an hour ago."),
    click.option("--until", metavar="TIME", help="Up to then."),
    click.option("--tool", metavar="TOOL", shell_complete=words(*_TOOLS), help="Written by cli, api, mcp, gate, ..."),
    click.option("--name", metavar="HOST", help="Of connections to a host, e.g. pypi.org or *.org."),
)
"""Options that choose lines; they arrive as keywords for `_filter`."""


@click.group()
def ledger() -> None:
    """Show, verify and export all that was done, in lines that nobody can change unseen.

    Each line has the hash of the one before it. The files are in the folder `ledger` of the state folder.
    """


@ledger.command()
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last so many.")
@_filter_options
@json_option
def show(tail: int | None, as_json: bool, **options: Any) -> None:
    """Show lines, the oldest first; with --json, one object on each."""
    wanted = _filter(**options)

    async def work(ledger: AsyncLedger) -> bool:
        found = False
        async for line in ledger.show(wanted, tail=tail):
            _print(line, as_json)
            found = True
        return found

    if not _with_ledger(work) and not as_json:
        say("no line of the ledger fits")


@ledger.command()
@click.option("--after", type=click.IntRange(min=0), metavar="SEQ", help="Begin after the line of this number.")
@_filter_options
@json_option
def follow(after: int | None, as_json: bool, **options: Any) -> None:
    """Show lines as they are written, until Ctrl-C; with --json, one object on each."""
    wanted = _filter(**options)

    async def work(ledger: AsyncLedger) -> None:
        async for line in ledger.follow(wanted, after=after):
            _print(line, as_json)

    _with_ledger(work)


@ledger.command(epilog="Exit codes: 0 it is whole, 1 it is not, 125 it could not be read.")
@click.option("--head", metavar="HASH", help="A hash that `skerry ledger head` printed before: its line must be there.")
@json_option
def verify(head: str | None, as_json: bool) -> int:
    """Check every line of every file.

    Tells where a line was changed, removed, moved, copied or put in. Lines that were cut off at the very end leave no
    trace but in a hash that was kept elsewhere: give it as --head.
    """
    refuse_if(
        head is not None and not _HASH.fullmatch(head),
        "--head is no hash: give all 64 digits that `ledger head` printed",
    )
    done = _with_ledger(lambda ledger: ledger.verify(head))
    if as_json:
        print_json({"whole": done.is_whole, **to_data(done)})
        return 0 if done.is_whole else _BROKEN
    for problem in done.problems:
        say(f"{problem.file}:{problem.line}: {problem.what}")
    lines = f"{count_of(done.lines, 'line')} in {count_of(done.files, 'file')}, from {done.first} to {done.last}"
    torn = f", {done.torn} of them left unfinished by programs that died" if done.torn else ""
    problems = count_of(len(done.problems), "problem")
    state = "the ledger is whole" if done.is_whole else f"the ledger is NOT whole ({problems})"
    echo(f"{state}: {lines}{torn}", f"head {done.head}")
    return 0 if done.is_whole else _BROKEN


@ledger.command()
@json_option
def head(as_json: bool) -> None:
    """Print the hash of the last line, which stands for all before it.

    Keep it where whoever can write the ledger cannot, and give it to `skerry ledger verify --head` later.
    """
    found = _with_ledger(lambda ledger: ledger.head())
    if as_json:
        print_json({"head": found})
    else:
        echo(found)


@ledger.command()
@click.argument("target", metavar="[FILE]", default="-", type=click.Path(dir_okay=False))
@click.option(
    "--format", "format", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True, help="How."
)
@_filter_options
def export(target: str, format: str, **options: Any) -> None:
    """Write lines to a FILE, or to stdout, as JSON lines or as CSV."""
    wanted = _filter(**options)

    async def work(ledger: AsyncLedger) -> None:
        with click.open_file(target, "w", encoding="utf-8", atomic=target != "-") as file:
            write = _csv_writer(file) if format == "csv" else _json_writer(file)
            async for line in ledger.show(wanted):
                write(line)

    try:
        _with_ledger(work)
    except OSError as error:
        if error.filename is None:
            raise
        raise click.ClickException(f"{target}: {error.strerror}") from None


def _json_writer(file: IO[str]) -> Callable[[Line], object]:
    import msgspec

    encode = msgspec.json.Encoder().encode
    return lambda line: file.write(encode(line).decode() + "\n")


def _csv_writer(file: IO[str]) -> Callable[[Line], object]:
    import csv

    import msgspec

    writer = csv.writer(file)
    writer.writerow(_COLUMNS)

    def write(line: Line) -> None:
        who, facts = line.who, msgspec.json.encode(line.facts).decode()
        writer.writerow(
            (line.seq, _time(line), line.kind, line.sandbox or "", who.uid, who.tool, who.pid, facts, line.hash)
        )

    return write


def _with_ledger(work: Callable[[AsyncLedger], Any]) -> Any:
    """Open the ledger for one piece of work; the registry is not needed for it."""
    import asyncio

    from skerry.ledger.reading import AsyncLedger

    config = load_config()
    if config.url:
        from skerry.cli.registry import open_manager

        return asyncio.run(work(open_manager(config).ledger))
    if not config.ledger.enabled:
        say("the ledger is off (ledger.enabled): nothing new is written")
    return asyncio.run(work(AsyncLedger(config)))


def _filter(
    sandbox: str | None,
    kinds: tuple[str, ...],
    since: str | None,
    until: str | None,
    tool: str | None,
    name: str | None,
) -> LineFilter:
    from skerry.ledger.reading import LineFilter

    return LineFilter(
        sandbox=sandbox,
        kinds=frozenset(kinds),
        since=_moment(since, "--since"),
        until=_moment(until, "--until"),
        tool=tool,
        name=name,
    )


def _moment(text: str | None, flag: str) -> float | None:
    """Seconds since 1970 of a date, of a time of today's calendar, or of so long ago."""
    from skerry.units import parse_duration

    if text is None:
        return None
    try:
        return time.time() - parse_duration(text, flag)
    except InvalidSpec:
        pass
    try:
        return datetime.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        refuse_if(True, f"{flag} {text!r} is no time: write 2026-01-31T12:00, or 1h for an hour ago")
        return None


def _time(line: Line) -> str:
    return datetime.datetime.fromtimestamp(line.time).astimezone().isoformat(timespec="milliseconds")


def _print(line: Line, as_json: bool) -> None:
    if as_json:
        print_json_line(to_data(line))
        return
    import msgspec

    who = f"{line.who.tool} uid {line.who.uid} pid {line.who.pid}"
    texts = (
        f"{key}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
        for key, value in line.facts.items()
    )
    sandbox = (line.sandbox or "-")[:SHORT_ID]
    echo(printable(f"{line.seq:>6}  {_time(line)}  {sandbox:<{SHORT_ID}}  {line.kind:<9} {' '.join(texts)}  ({who})"))
