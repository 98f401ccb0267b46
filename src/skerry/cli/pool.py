"""`skerry pool`: sandboxes that are ready before they are asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import duration, make_spec, spec_options
from skerry.cli.output import format_span, json_option, print_json_line, print_table, warn_of_network

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.pool import AsyncSandboxPool, PoolStats
    from skerry.spec import Spec

_HEADER = ("READY", "SIZE", "BOOTING", "CLAIMED", "DISCARDED", "FAILED", "OLDEST", "LAST ERROR")
_SHOW_S = 0.25
_HOME = "\x1b[H\x1b[J"


@click.group()
def command() -> None:
    """Keep sandboxes warm, so that `run --pool` and `create --pool` need not boot one."""


@command.command()
@click.option("--size", type=click.IntRange(min=1), default=4, show_default=True, help="How many to keep ready.")
@click.option("--max-boots", type=click.IntRange(min=1), default=2, show_default=True, help="How many boot at once.")
@click.option("--max-age", default="1h", metavar="TIME", show_default=True, help="When a waiting one is replaced.")
@spec_options
@json_option
def run(size: int, max_boots: int, max_age: str, as_json: bool, **options: Any) -> int:
    """Keep sandboxes ready until Ctrl-C, and show how many there are.

    `skerry run --pool` with the same options takes one of them, from any shell. What is not taken goes at the end.
    With --json, one object a line whenever something changes.
    """
    import asyncio

    config, spec = make_spec(options)
    warn_of_network(spec.network)
    max_age_s = duration(max_age, "--max-age") or 0
    return asyncio.run(_run(config, spec, size, max_boots, max_age_s, as_json))


async def _run(config: Config, spec: Spec, size: int, max_boots: int, max_age_s: float, as_json: bool) -> int:
    from skerry.cli.foreground import until_signal
    from skerry.manager import AsyncSandboxManager
    from skerry.pool import AsyncSandboxPool

    async def work() -> None:
        async with (
            AsyncSandboxManager(config) as manager,
            AsyncSandboxPool(manager, spec, size=size, max_boots=max_boots, max_age_s=max_age_s) as pool,
        ):
            await _show(pool, as_json)

    return await until_signal(work())


async def _show(pool: AsyncSandboxPool, as_json: bool) -> None:
    """On a terminal as it is now; elsewhere every change of it."""
    import asyncio

    redraw = not as_json and sys.stdout is not None and sys.stdout.isatty()
    shown = None
    while True:
        stats = pool.stats()
        counts = (stats.ready, stats.booting, stats.claimed, stats.discards, stats.failures)
        if redraw:
            click.echo(_HOME, nl=False)
        if redraw or counts != shown:
            _print(stats, as_json)
        shown = counts
        await asyncio.sleep(_SHOW_S)


def _print(stats: PoolStats, as_json: bool) -> None:
    import msgspec

    if as_json:
        print_json_line(msgspec.to_builtins(stats))
        return
    numbers = (stats.ready, stats.size, stats.booting, stats.claimed, stats.discards, stats.failures)
    print_table(_HEADER, [(*(str(number) for number in numbers), format_span(stats.age_max_s), stats.last_error)])
