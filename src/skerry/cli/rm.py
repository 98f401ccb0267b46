"""`skerry rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import references
from skerry.cli.options import filter_options, make_filter
from skerry.cli.output import json_option, spinner

if TYPE_CHECKING:
    from skerry.cli.registry import Result
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Filter


@click.command()
@click.argument("sandboxes", nargs=-1, metavar="[SANDBOX...]", shell_complete=references)
@click.option("-f", "--force", is_flag=True, help="One that is not there is no error.")
@click.option("-v", "--volumes", is_flag=True, help="Remove their volumes too.")
@click.option("--all", "every", is_flag=True, help="All, or all that these options leave:")
@filter_options
@json_option
def command(sandboxes: tuple[str, ...], force: bool, volumes: bool, every: bool, as_json: bool, **options: Any) -> int:
    """End sandboxes and remove all of them.

    Names those that are gone on stdout. If any could not be removed, the others are, and the exit code is 125.
    """
    _refuse_what_is_unclear(sandboxes, every, options)
    wanted = make_filter(options)
    from skerry.cli.registry import tell_each, with_manager

    async def remove(manager: AsyncSandboxManager) -> list[Result]:
        async with spinner("removing"):
            if every:
                return await _remove_all(manager, wanted, volumes)
            return await _remove(manager, sandboxes, force, volumes)

    return tell_each(with_manager(remove), as_json)


async def _remove_all(manager: AsyncSandboxManager, wanted: Filter, volumes: bool) -> list[Result]:
    from skerry.cli.registry import Result

    outcomes = await manager.destroy_all(wanted, volumes=volumes)
    return [Result(outcome.id, error=outcome.error) for outcome in outcomes]


async def _remove(manager: AsyncSandboxManager, sandboxes: tuple[str, ...], force: bool, volumes: bool) -> list[Result]:
    from skerry.cli.registry import for_each
    from skerry.errors import NotFound

    results = await for_each(sandboxes, lambda each: manager.destroy(each, volumes=volumes))
    return [result for result in results if not (force and isinstance(result.error, NotFound))]


def _refuse_what_is_unclear(sandboxes: tuple[str, ...], every: bool, options: dict[str, Any]) -> None:
    ctx = click.get_current_context()
    if not sandboxes and not every:
        raise click.UsageError("name the sandboxes to remove, or use --all", ctx)
    if sandboxes and every:
        raise click.UsageError("--all and names exclude each other", ctx)
    if not every and any(options.values()):
        raise click.UsageError("--label, --project, --state and --provider need --all", ctx)
