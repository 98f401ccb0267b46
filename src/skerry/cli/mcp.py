"""`skerry mcp`: a server of the Model Context Protocol on our standard streams."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import click

from skerry.cli.options import duration, make_spec, spec_options
from skerry.cli.registry import refuse_server
from skerry.cli.terminal import read_chunk, run_until_signal, write_all
from skerry.units import parse_size


@click.command()
@spec_options
@click.option("--pool", type=click.IntRange(min=1), metavar="N", help="Keep so many sandboxes warm for new ones.")
@click.option("--max-timeout", default="1h", metavar="TIME", show_default=True, help="The most for one command.")
@click.option("--max-output", default="64K", metavar="SIZE", show_default=True, help="The most of one output or file.")
def mcp(pool: int | None, max_timeout: str, max_output: str, **options: Any) -> int:
    """Serve MCP on stdin and stdout, for an agent that uses sandboxes as tools.

    The options are what its sandboxes are made from. They end with the server unless the agent asks to keep them, and
    it sees those of one project only.
    """
    import msgspec

    from skerry.manager.manager import AsyncSandboxManager
    from skerry.pool.pool import AsyncSandboxPool

    try:
        from skerry.surfaces.mcp.caller import CallLimits
        from skerry.surfaces.mcp.server import serve
    except ModuleNotFoundError as error:
        fix = "pip install 'skerry[mcp]', or ./skerry in a checkout"
        raise click.ClickException(f"the package {error.name!r} is missing: {fix}") from None
    config, spec = make_spec(options)
    refuse_server(config, "`skerry mcp`")
    config = msgspec.structs.replace(config, tool="mcp")
    limits = CallLimits(
        max_timeout_s=duration(max_timeout, "--max-timeout") or 0, output_bytes=parse_size(max_output, "--max-output")
    )
    incoming, output = _take_over(0, os.O_RDONLY), _Output(_take_over(1, os.O_WRONLY))

    async def work() -> None:
        async with AsyncExitStack() as stack:
            manager = await stack.enter_async_context(AsyncSandboxManager(config))
            warm = None if pool is None else AsyncSandboxPool(manager, spec, size=pool)
            if warm is not None:
                await stack.enter_async_context(warm)
            await serve(manager, spec, limits, _lines(incoming), output, warm)

    return run_until_signal(work())


def _take_over(fd: int, mode: int) -> int:
    """Move a standard stream to another number, so that nothing but the protocol passes there."""
    ours = os.dup(fd)
    nothing = os.open(os.devnull, mode)
    os.dup2(nothing, fd)
    os.close(nothing)
    return ours


async def _lines(fd: int) -> AsyncIterator[str]:
    """Yield the lines of a stream."""
    pieces: list[bytes] = []
    while chunk := await read_chunk(fd):
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line]).decode(errors="replace")
            pieces.clear()
        pieces.append(rest)


class _Output:
    """Stream that writes at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def write(self, text: str) -> None:
        await write_all(self._fd, text.encode(errors="replace"))

    async def flush(self) -> None:
        return
