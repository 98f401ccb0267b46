"""`skerry pool`: sandboxes that wait ready for `run` and `create`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from skerry.cli import output
from skerry.cli.options import duration, make_spec, spec_options
from skerry.cli.output import json_option
from skerry.cli.registry import refuse_server
from skerry.cli.terminal import run_until_signal

if TYPE_CHECKING:
    from skerry.pool.pool import AsyncSandboxPool

_HEADER = ("READY", "SIZE", "BOOTING", "CLAIMED", "DISCARDED", "FAILED", "OLDEST", "LAST ERROR")
_SHOW_S = 0.25


@click.group()
def pool() -> None:
    """Keep sandboxes warm, so that `run --pool` and `create --pool` need not boot one."""


@pool.command()
@click.option("--size", type=click.IntRange(min=1), default=4, show_default=True, help="How many to keep ready.")
@click.option("--max-boots", type=click.IntRange(min=1), default=2, show_default=True, help="How many boot at once.")
@click.option("--max-age", default="1h", metavar="TIME", show_default=True, help="When a waiting one is replaced.")
@click.option(
    "--interpreter", "interpreters", multiple=True, metavar="LANGUAGE", help="Have one ready in each, e.g. python."
)
@spec_options
@json_option
def run(size: int, max_boots: int, max_age: str, interpreters: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Keep sandboxes ready until Ctrl-C, and show how many there are.

    `skerry run --pool` with the same options takes one of them, from any shell. What is not taken goes at the end.
    With --json, one object a line whenever something changes.
    """
    config, spec = make_spec(options)
    refuse_server(config, "`skerry pool run`")
    max_age_s = duration(max_age, "--max-age") or 0
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.pool.pool import AsyncSandboxPool

    async def work() -> None:
        async with (
            AsyncSandboxManager(config) as manager,
            AsyncSandboxPool(
                manager, spec, size=size, max_boots=max_boots, max_age_s=max_age_s, interpreters=interpreters
            ) as opened,
        ):
            await _show(opened, as_json)

    return run_until_signal(work())


async def _show(pool: AsyncSandboxPool, as_json: bool) -> None:
    """Redraw the table on a terminal; elsewhere print every change of it."""
    shown = None
    while True:
        stats = pool.stats()
        counts = (stats.ready, stats.booting, stats.claimed, stats.discards, stats.failures)
        redraw = not as_json and output.clear_screen()
        if as_json and counts != shown:
            output.print_json_line(output.to_data(stats))
        elif redraw or counts != shown:
            numbers = (stats.ready, stats.size, *counts[1:])
            output.print_table(_HEADER, [(*map(str, numbers), output.format_span(stats.age_max_s), stats.last_error)])
        shown = counts
        await asyncio.sleep(_SHOW_S)
