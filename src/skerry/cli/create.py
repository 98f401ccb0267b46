"""`skerry create`."""

from __future__ import annotations

from typing import Any

import click

from skerry.cli.options import make_spec, spec_options
from skerry.cli.output import echo, json_option, print_json, spinner, warn_of_network


@click.command()
@spec_options
@click.option("--key", metavar="KEY", help="The same create with the same key again gives the same sandbox.")
@click.option("--pool", is_flag=True, help="Take a warm sandbox of `skerry pool run`, if there is one.")
@json_option
def command(key: str | None, pool: bool, as_json: bool, **options: Any) -> None:
    """Make a sandbox that lives until it is removed or its time is over.

    Prints its id.
    """
    if key is not None and pool:
        raise click.UsageError("--key is for a new sandbox, --pool for one that is there already")
    config, spec = make_spec(options)
    import asyncio

    from skerry.cli.registry import record_data
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Record
    from skerry.warm import claim_or_create

    async def create() -> Record:
        async with AsyncSandboxManager(config) as manager, spinner("starting a sandbox"):
            sandbox = await (claim_or_create(manager, spec) if pool else manager.create(spec, key=key))
            return await manager.record(sandbox.id)

    warn_of_network(spec.network)
    record = asyncio.run(create())
    if as_json:
        print_json(record_data(record))
    else:
        echo(record.id)
