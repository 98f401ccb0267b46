"""`skerry wait`."""

from __future__ import annotations

import click

from skerry.cli.completion import references
from skerry.cli.errors import TIMED_OUT
from skerry.cli.options import duration
from skerry.cli.output import echo, json_option, print_json, say


@click.command()
@click.argument("sandboxes", nargs=-1, required=True, metavar="SANDBOX...", shell_complete=references)
@click.option("--timeout", metavar="TIME", help="Give up after this, with exit code 124.")
@json_option
def command(sandboxes: tuple[str, ...], timeout: str | None, as_json: bool) -> int:
    """Wait until sandboxes have ended.

    Prints why each ended, in the order they were named.
    """
    import asyncio

    from skerry.cli.registry import Result, for_each, record_data, tell_failures, with_manager
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record

    limit_s = duration(timeout, "--timeout")

    async def wait(manager: AsyncSandboxManager) -> list[Result]:
        async def wait_for_one(reference: str) -> Record:
            record = await manager.record(reference)  # a name ends with its sandbox, an id does not
            return await manager.wait(record.id)

        async with asyncio.timeout(limit_s):
            return await for_each(sandboxes, wait_for_one)

    try:
        results = with_manager(wait)
    except TimeoutError:
        say(f"not all have ended within {limit_s:g} s, as --timeout asks")
        return TIMED_OUT
    ended = [result.value for result in results if result.error is None]
    if as_json:
        print_json([record_data(record) for record in ended])
    else:
        for record in ended:
            echo(record.cause or record.state)
    return tell_failures(results)
