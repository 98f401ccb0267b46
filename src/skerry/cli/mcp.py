"""`skerry mcp`: the tools of the Model Context Protocol, for a program that talks to us on our standard streams."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import duration, make_spec, spec_options
from skerry.cli.output import warn_of_network

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.spec import Spec
    from skerry.surfaces.mcp import Limits


@click.command()
@spec_options
@click.option("--max-timeout", default="1h", metavar="TIME", show_default=True, help="The most for one command.")
@click.option("--max-output", default="64K", metavar="SIZE", show_default=True, help="The most of one output or file.")
def command(max_timeout: str, max_output: str, **options: Any) -> int:
    """Serve MCP on stdin and stdout, for an agent that uses sandboxes as tools.

    The options are what its sandboxes are made from. They end with the server unless the agent asks to keep them, and
    it sees those of one project only.
    """
    import asyncio

    from skerry.units import parse_size

    try:
        from skerry.surfaces.mcp import Limits
    except ModuleNotFoundError as error:
        fix = "pip install 'skerry[mcp]', or scripts/bootstrap in a checkout"
        raise click.ClickException(f"the package {error.name!r} is missing: {fix}") from None
    config, spec = make_spec(options)
    warn_of_network(spec.network)
    limits = Limits(
        max_timeout_s=duration(max_timeout, "--max-timeout") or 0, output_bytes=parse_size(max_output, "--max-output")
    )
    return asyncio.run(_serve(config, spec, limits))


async def _serve(config: Config, spec: Spec, limits: Limits) -> int:
    from skerry.cli.foreground import until_signal
    from skerry.manager import AsyncSandboxManager
    from skerry.surfaces.mcp import serve

    incoming, output = _take_over(0, os.O_RDONLY), _Output(_take_over(1, os.O_WRONLY))

    async def work() -> None:
        async with AsyncSandboxManager(config) as manager:
            await serve(manager, spec, limits, _lines(incoming), output)

    return await until_signal(work())


def _take_over(fd: int, mode: int) -> int:
    """A standard stream under another number, which nobody else has, so that nothing but the protocol passes there."""
    ours = os.dup(fd)
    nothing = os.open(os.devnull, mode)
    os.dup2(nothing, fd)
    os.close(nothing)
    return ours


async def _lines(fd: int) -> AsyncIterator[str]:
    """What comes in, line by line."""
    from skerry.cli.pipes import read_chunk

    pieces: list[bytes] = []
    while chunk := await read_chunk(fd):
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line]).decode(errors="replace")
            pieces.clear()
        pieces.append(rest)


class _Output:
    """What goes out, at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def write(self, text: str) -> None:
        from skerry.cli.pipes import write_all

        await write_all(self._fd, text.encode(errors="replace"))

    async def flush(self) -> None:
        return
