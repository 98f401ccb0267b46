"""`fleet exec` and `fleet logs`: commands in many members at once, and the output of their background processes."""

from __future__ import annotations

import asyncio

from skerry.cli.errors import OURS, error_data
from skerry.cli.job import Job, result_data
from skerry.cli.logs import Lines, background_numbers, chunks_data, follow_output, process_data, read_kept, write_chunks
from skerry.cli.output import print_json_line, say
from skerry.cli.registry import for_each, print_failures
from skerry.errors import AgentUnreachable, CallTimeout, NotFound, SkerryError
from skerry.fleet.broadcast import choose, refuse_unready
from skerry.fleet.fleet import AsyncFleet
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Record
from skerry.sandbox.sandbox import AsyncSandbox

_REACH_S = 10.0
"""Time in which an agent must answer at all; the command itself may take as long as it likes."""


async def _members(fleet: AsyncFleet, target: str) -> dict[str, Record]:
    """Members of a target. Raises NotFound if there are none, but for a phase that has none."""
    records = await fleet.records()
    if not records:
        raise NotFound(f"fleet {fleet.name!r} has no members; `skerry fleet up` starts them")
    found = choose(records, target, [phase.name for phase in fleet.spec.phases] if fleet.spec else [], fleet.name)
    if not found and "=" in target:
        raise NotFound(f"fleet {fleet.name!r} has no member with the label {target!r}")
    return found


async def run_in_members(
    manager: AsyncSandboxManager, fleet: AsyncFleet, target: str, job: Job, max_parallel: int
) -> int:
    """Run a job in all of them, so many at once; give the highest exit code, 125 for a member that is not reached."""
    members = await _members(fleet, target)
    lines = Lines(list(members))

    async def attempt(name: str) -> int:
        try:
            refuse_unready(members[name])
            return await _run(await _open(manager, members[name]), name, job, lines)
        except SkerryError as error:
            if job.as_json:
                print_json_line({"member": name, "sandbox": members[name].id, "error": error_data(error)})
            else:
                say(f"{name}: {error}")
            return OURS

    return max((result.value for result in await for_each(list(members), attempt, max_parallel)), default=0)


async def _open(manager: AsyncSandboxManager, record: Record) -> AsyncSandbox:
    """Open a member whose agent answers. Raises CallTimeout or AgentUnreachable for one that does not."""
    try:
        async with asyncio.timeout(_REACH_S):
            sandbox = await manager.get(record.id)
            await sandbox.ping()
    except TimeoutError:
        raise CallTimeout(f"its agent did not answer within {_REACH_S:g} s") from None
    except OSError as error:  # we may have no more files to open
        raise AgentUnreachable(f"its agent cannot be reached: {error.strerror or error}") from error
    return sandbox


async def _run(sandbox: AsyncSandbox, name: str, job: Job, lines: Lines) -> int:
    if job.as_json and not job.background:
        assert job.argv is not None
        result = await sandbox.exec(job.argv, env=job.env, cwd=job.cwd, user=job.user, timeout_s=job.timeout_s)
        print_json_line({"member": name, **result_data(sandbox, result)})
        return result.exit_code
    own = lines.of(name)
    process = await job.start(sandbox)
    if job.background:
        if job.as_json:
            print_json_line({"member": name, "sandbox": sandbox.id, "process": process.number})
        else:
            await own.write(1, f"{process.number}\n".encode())
        return 0
    try:
        async for fd, chunk in process:
            await own.write(fd, chunk)
    finally:
        await own.end()
    result = await process.wait()
    if result.timed_out and (timeout_s := job.time_in(sandbox)) is not None:
        asked = "--timeout asks" if job.timeout_s is not None else "the sandbox's timeout says"
        say(f"{name}: the command was ended after {timeout_s:g} s, as {asked}")
    return result.exit_code


async def show_logs(manager: AsyncSandboxManager, fleet: AsyncFleet, target: str, follow: bool, as_json: bool) -> int:
    """Show the output until now, one process after the other, or `follow` all at once until each has ended.

    Print those that do not answer at the end, and give the exit code.
    """
    members = await _members(fleet, target)

    async def ask(member: str) -> tuple[AsyncSandbox, list[int]]:
        sandbox = await _open(manager, members[member])
        return sandbox, await background_numbers(sandbox)

    asked = await for_each(list(members), ask)
    sources: dict[str, tuple[str, AsyncSandbox, int]] = {}  # by the name before its lines
    for member, (sandbox, numbers) in ((each.reference, each.value) for each in asked if each.error is None):
        for number in numbers:
            sources[f"{member} {process_data(number)}" if len(numbers) > 1 else member] = (member, sandbox, number)
    lines = Lines(list(sources))
    if follow:
        said = await for_each(
            list(sources), lambda name: follow_output(*sources[name][1:], lines.of(name)), at_once=len(sources) or 1
        )
        return print_failures([*asked, *said])
    said = await for_each(list(sources), lambda name: read_kept(*sources[name][1:]))
    for name, chunks in ((each.reference, each.value) for each in said if each.error is None):
        member, _, number = sources[name]
        if as_json:
            print_json_line({"member": member, "process": process_data(number), **chunks_data(chunks)})
        else:
            await write_chunks(lines.of(name), chunks)
    return print_failures([*asked, *said])
