"""`skerry inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import references
from skerry.cli.output import print_json

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager

_DEADLINE_S = 5.0


@click.command()
@click.argument("sandboxes", nargs=-1, required=True, metavar="SANDBOX...", shell_complete=references)
def command(sandboxes: tuple[str, ...]) -> int:
    """Show all that is known of sandboxes, as JSON.

    A list with one object for each: its record, how its limits are held, and what it uses now, if its agent answers.
    """
    from skerry.cli.registry import for_each, tell_failures, with_manager

    results = with_manager(lambda manager: for_each(sandboxes, lambda each: _look(manager, each)))
    print_json([result.value for result in results if result.error is None])
    return tell_failures(results)


async def _look(manager: AsyncSandboxManager, reference: str) -> dict[str, Any]:
    import asyncio

    import msgspec

    from skerry.cli.registry import record_data
    from skerry.errors import SkerryError

    record = await manager.record(reference)
    live: dict[str, Any] = {"reachable": False, "metrics": None}
    if record.is_live:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                metrics = await (await manager.get(record.id)).metrics()
            live = {"reachable": True, "metrics": msgspec.to_builtins(metrics)}
        except SkerryError as error:
            live["unreachable_because"] = str(error)
        except TimeoutError:
            live["unreachable_because"] = f"it did not answer within {_DEADLINE_S:g} s"
    return record_data(record) | live
