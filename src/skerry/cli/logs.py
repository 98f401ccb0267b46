"""`skerry logs`: output of services, background processes and boxes, and lines that bear the name of their source."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import refuse_if, sandbox_argument
from skerry.cli.output import json_option, output_data, print_json, printable, printable_line
from skerry.cli.registry import with_manager, with_sandbox
from skerry.cli.terminal import write_all
from skerry.config import variable

if TYPE_CHECKING:
    from skerry.sandbox.sandbox import AsyncSandbox

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_COLOUR_CODE = re.compile(rb"(\x1b\[[0-9;]{0,20}m)")
_RESET = b"\x1b[0m"
_LONGEST = 1 << 16
"""Longer lines are written in pieces, each behind the name, so that nobody fills our memory."""


SERVICE = 0
"""Number that stands for the service of a sandbox, which processes come and go for."""


@click.command()
@sandbox_argument
@click.argument("number", metavar="[PROCESS]", type=int, required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until they end.")
@click.option("--box", "of_box", is_flag=True, help="What the box itself said, such as its agent's last words.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last lines; needs --box.")
@json_option
def logs(sandbox: str, number: int | None, follow: bool, of_box: bool, tail: int | None, as_json: bool) -> None:
    """Show the output of the service, of background processes, or of the box itself.

    The last 1 MiB of each is kept, of a service over its restarts. Without a PROCESS it is that of all, and each line
    bears the number if there are several.
    """
    refuse_if(follow and as_json, "--json and -f exclude each other")
    refuse_if(of_box and number is not None, "--box and a PROCESS exclude each other")
    refuse_if(tail is not None and not of_box, "--tail needs --box")
    if of_box:
        said = with_manager(lambda manager: _read_box(manager.logs(sandbox, follow=follow, tail=tail), as_json))
        if as_json:
            print_json(output_data("log", said))
    elif as_json:
        print_json(with_sandbox(sandbox, lambda opened: _collect(opened, number)))
    else:
        with_sandbox(sandbox, lambda opened: _show(opened, number, follow))


async def _read_box(log: AsyncIterator[bytes], keep: bool) -> bytes:
    said = b""
    async for chunk in log:
        if keep:
            said += chunk
        else:
            await write_all(1, chunk)
    return said


async def _collect(sandbox: AsyncSandbox, number: int | None) -> list[dict[str, Any]]:
    numbers = await background_numbers(sandbox, number)
    return [{"process": process_data(each), **chunks_data(await read_kept(sandbox, each))} for each in numbers]


async def _show(sandbox: AsyncSandbox, number: int | None, follow: bool) -> None:
    numbers = await background_numbers(sandbox, number)
    lines = Lines([str(process_data(each)) for each in numbers])
    writers = [lines.of(str(process_data(each))) if len(numbers) > 1 else _Unchanged(lines, {}) for each in numbers]
    if follow:
        async with asyncio.TaskGroup() as group:
            for each, writer in zip(numbers, writers, strict=True):
                group.create_task(follow_output(sandbox, each, writer))
    else:
        for each, writer in zip(numbers, writers, strict=True):
            await write_chunks(writer, await read_kept(sandbox, each))


async def write_chunks(writer: SourceLines, chunks: Sequence[tuple[int, bytes]]) -> None:
    """Write output that was read before, to its end."""
    for fd, chunk in chunks:
        await writer.write(fd, chunk)
    await writer.end()


async def background_numbers(sandbox: AsyncSandbox, number: int | None = None) -> list[int]:
    """Numbers of the service, if there is one, and of the background processes; or the one that was named."""
    if number is not None:
        return [number]
    service = await sandbox.service.status() if sandbox.spec.command is not None else None
    others = [each.process for each in await sandbox.processes.list() if each.background]
    return others if service is None else [SERVICE, *(each for each in others if each != service.process)]


def process_data(number: int) -> int | str:
    """Number of a process, or `service`."""
    return number or "service"


async def follow_output(sandbox: AsyncSandbox, number: int, writer: SourceLines) -> None:
    """Write the output of a process until it ends, or of the service until it is not started again."""
    output = await sandbox.processes.attach(number) if number else sandbox.service.logs(follow=True)
    try:
        async for fd, chunk in output:
            await writer.write(fd, chunk)
    finally:
        await writer.end()


async def read_kept(sandbox: AsyncSandbox, number: int) -> Sequence[tuple[int, bytes]]:
    """Output of a process until now.

    All of it comes before the answer to a ping that is sent after. Then it is taken without waiting, and the first
    wait, which would be for what is still to come, is over at once.
    """
    if not number:
        return [chunk async for chunk in sandbox.service.logs()]
    chunks: list[tuple[int, bytes]] = []
    async with await sandbox.processes.attach(number) as process:
        await process.write(b"")  # attaches
        await sandbox.ping()
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                async for fd, chunk in process:
                    chunks.append((fd, chunk))
    return chunks


def chunks_data(chunks: Sequence[tuple[int, bytes]]) -> dict[str, str]:
    """Output of a process, for JSON."""
    stdout, stderr = (b"".join(chunk for fd, chunk in chunks if fd == which) for which in (1, 2))
    return {**output_data("stdout", stdout), **output_data("stderr", stderr)}


class Lines:
    """Stdout and stderr shared by several sources: each line whole, behind its source's name, none like another's."""

    def __init__(self, names: Sequence[str]) -> None:
        self._lock = asyncio.Lock()
        self._names = list(names)
        self._width = max((len(name) for name in names), default=0)
        self._coloured = {fd: os.isatty(fd) and not variable("NO_COLOR") for fd in (1, 2)}

    def of(self, name: str) -> SourceLines:
        """Lines of the source of this name."""
        colour = _COLOURS[self._names.index(name) % len(_COLOURS)]
        plain = f"{printable(name).ljust(self._width)} | "
        styled = click.style(plain, fg=colour)
        prefixes = {fd: (styled if coloured else plain).encode() for fd, coloured in self._coloured.items()}
        return SourceLines(self, prefixes)

    async def write(self, fd: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        async with self._lock:
            shown = _with_colours if self._coloured[fd] else printable_line
            await write_all(fd, b"".join(prefix + shown(line) + b"\n" for line in lines))


class SourceLines:
    """Lines of one source; the last one is held until it ends."""

    def __init__(self, lines: Lines, prefixes: dict[int, bytes]) -> None:
        self._lines = lines
        self._prefixes = prefixes
        self._rest = {1: b"", 2: b""}

    async def write(self, fd: int, chunk: bytes) -> None:
        *lines, rest = (self._rest[fd] + chunk).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        if lines:
            await self._lines.write(fd, self._prefixes[fd], lines)

    async def end(self) -> None:
        for fd, rest in self._rest.items():
            if rest:
                await self._lines.write(fd, self._prefixes[fd], [rest])
                self._rest[fd] = b""


class _Unchanged(SourceLines):
    """Output of a single process, in every byte as it is."""

    async def write(self, fd: int, chunk: bytes) -> None:
        await write_all(fd, chunk)


def _with_colours(line: bytes) -> bytes:
    """Escape a line but for its colours, as they move nothing, and reset them at its end."""
    parts = _COLOUR_CODE.split(line)
    text = b"".join(part if index % 2 else printable_line(part) for index, part in enumerate(parts))
    return text + _RESET if len(parts) > 1 else text
