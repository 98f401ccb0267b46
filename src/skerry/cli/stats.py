"""`skerry stats`: what sandboxes use, now and on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import references
from skerry.cli.output import SHORT_ID, format_span, json_option, print_json_line, print_table

if TYPE_CHECKING:
    from skerry.cli.registry import Result
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record
    from skerry.results import Metrics

_HEADER = ("ID", "NAME", "CPU", "MEMORY", "DISK", "PROCESSES", "UPTIME")
_EVERY_S = 1.0
_DEADLINE_S = 5.0
_HOME = "\x1b[H\x1b[J"


@click.command()
@click.argument("sandboxes", nargs=-1, metavar="[SANDBOX...]", shell_complete=references)
@click.option("--no-stream", is_flag=True, help="Once, instead of every second.")
@json_option
def command(sandboxes: tuple[str, ...], no_stream: bool, as_json: bool) -> int:
    """Show what sandboxes use, live.

    Without a SANDBOX, all that are ready. With --json, one line for each sandbox and second.
    """
    from skerry.cli.registry import with_manager

    return with_manager(lambda manager: _watch(manager, sandboxes, no_stream, as_json))


async def _watch(manager: AsyncSandboxManager, sandboxes: Sequence[str], once: bool, as_json: bool) -> int:
    import asyncio

    from skerry.cli.registry import for_each, tell_failures
    from skerry.lifecycle import State
    from skerry.records import Filter

    redraw = not once and not as_json and sys.stdout is not None and sys.stdout.isatty()
    while True:
        every = sandboxes or [record.id for record in await manager.list(Filter(states=frozenset({State.READY})))]
        results = await for_each(every, lambda each: _measure(manager, each))
        if redraw:
            click.echo(_HOME, nl=False)
        _print(results, as_json)
        if once or (sandboxes and all(result.error is not None for result in results)):
            return tell_failures(results)
        await asyncio.sleep(_EVERY_S)


async def _measure(manager: AsyncSandboxManager, reference: str) -> tuple[Record, Metrics]:
    import asyncio

    from skerry.errors import CallTimeout

    record = await manager.record(reference)
    sandbox = await manager.get(record.id)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return record, await sandbox.metrics()
    except TimeoutError:
        raise CallTimeout(f"it did not answer within {_DEADLINE_S:g} s") from None


def _print(results: Sequence[Result], as_json: bool) -> None:
    """A sandbox that does not answer hides neither itself nor the others."""
    if as_json:
        for result in results:
            print_json_line(_data(result))
    else:
        print_table(_HEADER, [_row(result) for result in results])


def _data(result: Result) -> dict[str, Any]:
    import msgspec

    from skerry.cli.registry import error_data

    if result.error is not None:
        return {"reference": result.reference, "error": error_data(result.error)}
    record, metrics = result.value
    return {"id": record.id, "name": record.name, **msgspec.to_builtins(metrics)}


def _row(result: Result) -> tuple[str, ...]:
    from skerry.units import format_size

    if result.error is not None:
        return (result.reference[:SHORT_ID], "", "-", "-", "-", "-", str(result.error))
    record, metrics = result.value
    limit = f" / {format_size(record.spec.memory)}" if record.spec.memory else ""
    return (
        record.id[:SHORT_ID],
        record.name or "",
        f"{metrics.cpu_percent:.1f}%",
        format_size(metrics.memory_bytes) + limit,
        format_size(metrics.disk.used),
        str(metrics.processes),
        format_span(metrics.uptime_s),
    )
