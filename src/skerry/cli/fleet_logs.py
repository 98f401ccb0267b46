"""What the background processes of many members have said, and go on to say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from skerry.cli.fleet_exec import reach
from skerry.cli.fleet_lines import Lines
from skerry.cli.logs import _kept, _numbers
from skerry.cli.output import output_data, print_json_line
from skerry.cli.registry import Result, for_each, tell_failures
from skerry.errors import SkerryError
from skerry.manager import AsyncSandboxManager
from skerry.records import Record
from skerry.sandbox import AsyncSandbox


class _Source(NamedTuple):
    """A process, and how its lines begin: with the member's name, and the number if it has several."""

    name: str
    member: str
    sandbox: AsyncSandbox
    number: int


async def show_logs(manager: AsyncSandboxManager, members: Mapping[str, Record], *, follow: bool, as_json: bool) -> int:
    """Show all of it; a member that does not answer is told at the end, and keeps nobody else from speaking."""
    asked = await for_each(list(members), lambda name: _sources(manager, name, members[name]))
    sources = [source for result in asked if result.error is None for source in result.value]
    said = await (_follow(sources) if follow else _show(sources, as_json))
    return tell_failures([*asked, *said])


async def _sources(manager: AsyncSandboxManager, member: str, record: Record) -> list[_Source]:
    sandbox = await reach(manager, record)
    numbers = await _numbers(sandbox, None)
    return [
        _Source(f"{member} {number}" if len(numbers) > 1 else member, member, sandbox, number) for number in numbers
    ]


async def _show(sources: Sequence[_Source], as_json: bool) -> list[Result]:
    """What was said until now, one process after the other."""
    by_name = {source.name: source for source in sources}
    results = await for_each(list(by_name), lambda name: _kept(by_name[name].sandbox, by_name[name].number))
    lines = Lines(list(by_name))
    for source, result in zip(sources, results, strict=True):
        if result.error is not None:
            continue
        if as_json:
            print_json_line({"member": source.member, "process": source.number, **dict(_outputs(result.value))})
        else:
            own = lines.of(source.name)
            for fd, chunk in result.value:
                await own.write(fd, chunk)
            await own.end()
    return results


def _outputs(chunks: Sequence[tuple[int, bytes]]) -> Iterator[tuple[str, str]]:
    for number, name in ((1, "stdout"), (2, "stderr")):
        yield from output_data(name, b"".join(chunk for fd, chunk in chunks if fd == number)).items()


async def _follow(sources: Sequence[_Source]) -> list[Result]:
    """All at once, until each has ended."""
    lines = Lines([source.name for source in sources])

    async def follow(source: _Source) -> Result:
        own = lines.of(source.name)
        try:
            async for fd, chunk in await source.sandbox.processes.attach(source.number):
                await own.write(fd, chunk)
        except SkerryError as error:
            return Result(source.name, error=error)
        finally:
            await own.end()
        return Result(source.name)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(source)) for source in sources]
    return [task.result() for task in tasks]
