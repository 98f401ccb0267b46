"""One command in many members at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from skerry.cli.errors import OURS
from skerry.cli.fleet_lines import Lines
from skerry.cli.output import output_data, print_json_line, say
from skerry.cli.registry import error_data
from skerry.cli.running import Job
from skerry.errors import AgentUnreachable, CallTimeout, SkerryError
from skerry.manager import AsyncSandboxManager
from skerry.records import Record
from skerry.sandbox import AsyncSandbox

_REACH_S = 10.0
"""How long an agent may take to answer at all; the command itself may take as long as it likes."""


async def run_on(manager: AsyncSandboxManager, members: Mapping[str, Record], job: Job, max_parallel: int) -> int:
    """Run it in all of them, so many at once; the highest exit code, where a member that is not reached has 125."""
    room = asyncio.Semaphore(max_parallel)
    lines = Lines(list(members))

    async def attempt(name: str, record: Record) -> int:
        async with room:
            try:
                return await _run(await reach(manager, record), name, job, lines)
            except SkerryError as error:
                if job.as_json:
                    print_json_line({"member": name, "sandbox": record.id, "error": error_data(error)})
                else:
                    say(f"{name}: {error}")
                return OURS

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(name, record)) for name, record in members.items()]
    return max((task.result() for task in tasks), default=0)


async def reach(manager: AsyncSandboxManager, record: Record) -> AsyncSandbox:
    """A member whose agent answers; one that is frozen does not hold up the others."""
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
    if job.background:
        return await _start(sandbox, name, job, lines)
    return await (_collect(sandbox, name, job) if job.as_json else _stream(sandbox, name, job, lines))


async def _stream(sandbox: AsyncSandbox, name: str, job: Job, lines: Lines) -> int:
    own = lines.of(name)
    process = await job.start(sandbox)
    try:
        async for fd, chunk in process:
            await own.write(fd, chunk)
    finally:
        await own.end()
    result = await process.wait()
    if result.timed_out:
        say(f"{name}: the command was ended after {job.timeout_s:g} s, as --timeout asks")
    return result.exit_code


async def _collect(sandbox: AsyncSandbox, name: str, job: Job) -> int:
    assert job.argv is not None
    result = await sandbox.exec(job.argv, env=job.env, cwd=job.cwd, user=job.user, timeout_s=job.timeout_s)
    print_json_line(
        {
            "member": name,
            "sandbox": sandbox.id,
            "exit_code": result.exit_code,
            **output_data("stdout", result.stdout),
            **output_data("stderr", result.stderr),
            "truncated": result.truncated,
            "timed_out": result.timed_out,
            "signal": result.signal,
            "duration_s": result.duration_s,
        }
    )
    return result.exit_code


async def _start(sandbox: AsyncSandbox, name: str, job: Job, lines: Lines) -> int:
    number = (await job.start(sandbox)).number
    if job.as_json:
        print_json_line({"member": name, "sandbox": sandbox.id, "process": number})
    else:
        await lines.of(name).write(1, f"{number}\n".encode())
    return 0
