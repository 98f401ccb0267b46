"""`skerry logs`: what background processes said, as far as their sandbox keeps it, and what the box itself said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import references
from skerry.cli.output import json_option, output_data, print_json
from skerry.cli.pipes import write_all

if TYPE_CHECKING:
    from skerry.sandbox import AsyncSandbox


@click.command()
@click.argument("sandbox", metavar="SANDBOX", shell_complete=references)
@click.argument("number", metavar="[PROCESS]", type=int, required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until they end.")
@click.option("--box", "of_box", is_flag=True, help="What the box itself said, such as its agent's last words.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last lines; needs --box.")
@json_option
def command(sandbox: str, number: int | None, follow: bool, of_box: bool, tail: int | None, as_json: bool) -> None:
    """Show the output of background processes, or of the box itself.

    The last 1 MiB of each is kept. Without a PROCESS it is that of all, and each line bears the number if there are
    several.
    """
    ctx = click.get_current_context()
    if follow and as_json:
        raise click.UsageError("--json and -f exclude each other", ctx)
    if of_box and number is not None:
        raise click.UsageError("--box and a PROCESS exclude each other", ctx)
    if tail is not None and not of_box:
        raise click.UsageError("--tail needs --box", ctx)
    from skerry.cli.registry import with_manager, with_sandbox

    if of_box:
        said = with_manager(lambda manager: _of_box(manager.logs(sandbox, follow=follow, tail=tail), as_json))
        if as_json:
            print_json(output_data("log", said))
        return
    if as_json:
        print_json(with_sandbox(sandbox, lambda opened: _collect(opened, number)))
    else:
        with_sandbox(sandbox, lambda opened: _show(opened, number, follow))


async def _of_box(log: AsyncIterator[bytes], keep: bool) -> bytes:
    said = b""
    async for chunk in log:
        if keep:
            said += chunk
        else:
            await write_all(1, chunk)
    return said


async def _collect(sandbox: AsyncSandbox, number: int | None) -> list[dict[str, Any]]:
    found = []
    for each in await _numbers(sandbox, number):
        kept = await _kept(sandbox, each)
        stdout, stderr = (b"".join(chunk for fd, chunk in kept if fd == which) for which in (1, 2))
        found.append({"process": each, **output_data("stdout", stdout), **output_data("stderr", stderr)})
    return found


async def _show(sandbox: AsyncSandbox, number: int | None, follow: bool) -> None:
    numbers = await _numbers(sandbox, number)
    writers = [_Writer(f"{each} | ".encode() if len(numbers) > 1 else b"") for each in numbers]
    if follow:
        async with asyncio.TaskGroup() as group:
            for each, writer in zip(numbers, writers, strict=True):
                group.create_task(_follow(sandbox, each, writer))
    else:
        for each, writer in zip(numbers, writers, strict=True):
            for fd, chunk in await _kept(sandbox, each):
                await writer.write(fd, chunk)
            await writer.end()


async def _numbers(sandbox: AsyncSandbox, number: int | None) -> list[int]:
    if number is not None:
        return [number]
    return [each.process for each in await sandbox.processes.list() if each.background]


async def _follow(sandbox: AsyncSandbox, number: int, writer: _Writer) -> None:
    async for fd, chunk in await sandbox.processes.attach(number):
        await writer.write(fd, chunk)
    await writer.end()


async def _kept(sandbox: AsyncSandbox, number: int) -> Sequence[tuple[int, bytes]]:
    """What a process said until now: all of it comes before the answer to a ping that is sent after. Then it is taken
    without waiting, and the first wait, which would be for what is still to come, is over at once."""
    chunks: list[tuple[int, bytes]] = []
    async with await sandbox.processes.attach(number) as process:
        await process.write(b"")  # attaches
        await sandbox.ping()
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                async for fd, chunk in process:
                    chunks.append((fd, chunk))
    return chunks


class _Writer:
    """Our two outputs, line by line behind a prefix, or just as it comes without one."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = {1: b"", 2: b""}

    async def write(self, fd: int, chunk: bytes) -> None:
        if self._prefix:
            *lines, self._rest[fd] = (self._rest[fd] + chunk).split(b"\n")
            chunk = b"".join(self._prefix + line + b"\n" for line in lines)
        await write_all(fd, chunk)

    async def end(self) -> None:
        for fd, rest in self._rest.items():
            if rest:
                await write_all(fd, self._prefix + rest + b"\n")
