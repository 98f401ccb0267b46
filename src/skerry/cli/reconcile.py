"""`skerry reconcile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from skerry.cli.output import SHORT_ID, json_option, print_json, print_table, say

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager
    from skerry.reconcile import Verdict


@click.command()
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("--rebuild", is_flag=True, help="Make anew what runs on an older image than its name means now.")
@json_option
def command(dry_run: bool, rebuild: bool, as_json: bool) -> None:
    """Compare the registry with the host and repair the difference.

    What a crash left is finished, taken up again or removed (volumes are kept); one line tells each. What runs on an
    outdated image is told, and left as it is without --rebuild, which keeps its volumes and nothing else.
    """
    import msgspec

    from skerry.cli.registry import with_manager

    async def work(manager: AsyncSandboxManager) -> Sequence[Verdict]:
        verdicts = await manager.reconcile(dry_run=dry_run, rebuild=rebuild)
        await _tell_silent(manager)
        return verdicts

    verdicts = with_manager(work, doing="comparing")
    if as_json:
        print_json(msgspec.to_builtins(verdicts))
    else:
        rows = [(verdict.id[:SHORT_ID], verdict.provider, verdict.action, verdict.why) for verdict in verdicts]
        print_table(("ID", "PROVIDER", "ACTION", "WHY"), rows)


async def _tell_silent(manager: AsyncSandboxManager) -> None:
    """Of whom nothing is known nothing is repaired, and that is not the same as nothing to repair."""
    from skerry.errors import SkerryError

    for name in sorted({record.spec.provider for record in await manager.list()}):
        try:
            await manager.provider(name).check()
        except SkerryError as error:
            say(f"{error}. Its sandboxes were left as they are")
