"""The way of a command to the registry: open it, do one thing with each sandbox that is named, tell what failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import msgspec

from skerry.cli.errors import OURS
from skerry.cli.output import echo, print_json, say, spinner
from skerry.config import load
from skerry.errors import SkerryError
from skerry.manager import AsyncSandboxManager
from skerry.records import Record
from skerry.sandbox import AsyncSandbox

T = TypeVar("T")

_AT_ONCE = 32


class Result(NamedTuple):
    """What came of one reference among several."""

    reference: str
    value: Any = None
    error: SkerryError | None = None

    def as_data(self) -> dict[str, Any]:
        if self.error is None:
            return {"reference": self.reference, "ok": True}
        return {"reference": self.reference, "ok": False, "error": error_data(self.error)}


def with_manager(
    work: Callable[[AsyncSandboxManager], Awaitable[T]], *, repair: bool = False, doing: str | None = None
) -> T:
    """Open the registry for one piece of work. With `repair`, what a crash left is put right first.

    `doing` is shown meanwhile, if it takes more than a moment.
    """

    async def main() -> T:
        async with (
            spinner(doing) if doing else nullcontext(),
            AsyncSandboxManager(load(), reconcile=repair) as manager,
        ):
            return await work(manager)

    return asyncio.run(main())


def with_sandbox(reference: str, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
    """Do something with one sandbox."""

    async def main() -> T:
        async with open_sandbox(reference) as sandbox:
            return await work(sandbox)

    return asyncio.run(main())


@asynccontextmanager
async def open_sandbox(reference: str) -> AsyncIterator[AsyncSandbox]:
    """A sandbox by its id, the beginning of it, or its name; it lives on after."""
    async with AsyncSandboxManager(load(), reconcile=False) as manager:
        yield await manager.get(reference)


async def for_each(references: Sequence[str], act: Callable[[str], Awaitable[Any]]) -> list[Result]:
    """Do it with all of them, several at once; one that fails does not keep the others from it."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def attempt(reference: str) -> Result:
        async with room:
            try:
                return Result(reference, await act(reference))
            except SkerryError as error:
                return Result(reference, error=error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(reference)) for reference in references]
    return [task.result() for task in tasks]


def change_each(
    references: Sequence[str], as_json: bool, doing: str, act: Callable[[AsyncSandboxManager, str], Awaitable[None]]
) -> int:
    """Change the state of each; those that it worked for are named on stdout."""

    async def work(manager: AsyncSandboxManager) -> list[Result]:
        return await for_each(references, lambda each: act(manager, each))

    return tell_each(with_manager(work, repair=True, doing=doing), as_json)


def tell_each(results: Sequence[Result], as_json: bool) -> int:
    """Name what worked, say what failed, and give the exit code."""
    if as_json:
        print_json([result.as_data() for result in results])
        return OURS if any(result.error for result in results) else 0
    for result in results:
        if result.error is None:
            echo(result.reference)
    return tell_failures(results)


def tell_failures(results: Sequence[Result]) -> int:
    """Say what failed, on stderr, and give the exit code."""
    failed = [result for result in results if result.error is not None]
    for result in failed:
        say(f"{result.reference}: {result.error}")
    return OURS if failed else 0


def error_data(error: SkerryError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "retryable": error.retryable}


def record_data(record: Record) -> dict[str, Any]:
    """A record as JSON has it."""
    data: dict[str, Any] = msgspec.to_builtins(record)
    return {
        "id": data.pop("id"),
        "name": record.name,
        "state": data.pop("state"),
        "provider": record.spec.provider,
        "project": record.spec.project,
        "labels": record.spec.labels,
        "ends_at": record.ends_at if record.is_live else None,
        **data,
    }
