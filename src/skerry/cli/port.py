"""`skerry port`: ports of a sandbox on this machine's loopback."""

from __future__ import annotations

from collections.abc import Sequence

import click

from skerry.cli.completion import references
from skerry.cli.output import echo, json_option, print_json_line


@click.command(epilog="Exit code 130 after Ctrl-C, as with any program that it ends.")
@json_option
@click.argument("reference", metavar="SANDBOX", shell_complete=references)
@click.argument("ports", nargs=-1, required=True, metavar="[LOCAL:]PORT...")
def command(reference: str, ports: tuple[str, ...], as_json: bool) -> int:
    """Open ports of a sandbox on this machine, until Ctrl-C.

    Prints each address; it is any free one unless LOCAL says which. The sandbox needs no network for it. With --json,
    one object a line.
    """
    wanted = [_parse(text) for text in ports]
    import asyncio

    from skerry.cli.foreground import until_signal

    return asyncio.run(until_signal(_serve(reference, wanted, as_json)))


async def _serve(reference: str, ports: Sequence[tuple[int, int]], as_json: bool) -> None:
    import asyncio

    from skerry.cli.registry import open_sandbox

    async with open_sandbox(reference) as sandbox:
        await sandbox.ping()
        opened = [(port, await sandbox.expose(port, local)) for local, port in ports]
        for port, address in opened:
            if as_json:
                print_json_line({"port": port, "address": address})
            else:
                echo(f"{address} -> {port}")
        await asyncio.Event().wait()


def _parse(text: str) -> tuple[int, int]:
    """The port here, 0 for any, and the one in the sandbox."""
    local, _, port = text.rpartition(":")
    if port.isdecimal() and (local.isdecimal() or not local):
        return int(local or 0), int(port)
    raise click.UsageError(f"{text!r} is not [LOCAL:]PORT", click.get_current_context())
