"""Access of commands to the registry: open it, act on each sandbox that is named, print what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from skerry.cli.errors import OURS, error_data
from skerry.cli.options import load_config
from skerry.cli.output import echo, print_json, print_one, say, spinner, to_data
from skerry.errors import SkerryError, WrongState

T = TypeVar("T")

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Record
    from skerry.model.spec import Spec
    from skerry.sandbox.sandbox import AsyncSandbox

    Work = Callable[[AsyncSandboxManager], Awaitable[T]]
    Change = Callable[[AsyncSandboxManager, str], Awaitable[None]]

_log = logging.getLogger("skerry.cli")
_AT_ONCE = 32


class Result(NamedTuple):
    """Outcome for one reference among several."""

    reference: str
    value: Any = None
    error: SkerryError | None = None

    def as_data(self) -> dict[str, Any]:
        failure = {} if self.error is None else {"error": error_data(self.error)}
        return {"reference": self.reference, "ok": self.error is None, **failure}


def open_manager(config: Config, *, repair: bool = False) -> AsyncSandboxManager:
    """The manager of all commands, to be entered: that of the server which the settings name, or one of this machine,
    which may `repair` first what a crash left."""
    if config.url:
        from skerry.remote.manager import AsyncRemoteManager

        return AsyncRemoteManager(config.url, config.token or None, ca=config.ca or None, config=config)
    from skerry.manager.manager import AsyncSandboxManager

    return AsyncSandboxManager(config, reconcile=repair)


def refuse_server(config: Config, what: str) -> None:
    """Raise WrongState for what is done on the machine of the sandboxes, if that is a server elsewhere."""
    if config.url:
        raise WrongState(f"{what} works on the machine that has the sandboxes, and {config.url} has them: run it there")


def with_manager(work: Work[T], *, config: Config | None = None, repair: bool = False, doing: str = "") -> T:
    """Open the registry for one piece of work, and show what we are `doing`; `repair` what a crash left first."""

    async def main() -> T:
        async with (
            spinner(doing) if doing else nullcontext(),
            open_manager(config or load_config(), repair=repair) as manager,
        ):
            return await work(manager)

    return asyncio.run(main())


def with_sandbox(reference: str, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
    """Open one sandbox for one piece of work."""

    async def main() -> T:
        async with open_sandbox(reference) as sandbox:
            return await work(sandbox)

    return asyncio.run(main())


@asynccontextmanager
async def open_sandbox(reference: str) -> AsyncIterator[AsyncSandbox]:
    """Open a sandbox by its id, the beginning of it, or its name; it lives on after. Raises NotFound."""
    async with open_manager(load_config()) as manager:
        sandbox = await manager.get(reference)
        _log.info("sandbox %s is opened as %s", sandbox.id, reference)
        yield sandbox


async def create_sandbox(
    manager: AsyncSandboxManager, spec: Spec, *, key: str | None = None, ephemeral: bool = False, pool: bool = False
) -> AsyncSandbox:
    """Create a sandbox, or with `pool` claim a warm one, behind a spinner."""
    async with spinner("starting a sandbox"):
        if pool:
            refuse_server(manager.config, "--pool")
            from skerry.pool.claim import claim_or_create

            sandbox = await claim_or_create(manager, spec, ephemeral=ephemeral)
        else:
            sandbox = await manager.create(spec, key=key, ephemeral=ephemeral)
    _log.info("sandbox %s is created by %s", sandbox.id, spec.provider)
    return sandbox


def print_made(
    make: Work[AsyncSandbox], as_json: bool, *, config: Config | None = None, doing: str = "", name: str | None = None
) -> None:
    """Make a sandbox and print its record, or its name, which is its id unless it is known by another."""

    async def main(manager: AsyncSandboxManager) -> Record:
        return await manager.record((await make(manager)).id)

    record = with_manager(main, config=config, repair=True, doing=doing)
    print_one(as_json, record_data(record), name or record.id)


async def for_each(
    references: Sequence[str], act: Callable[[str], Awaitable[Any]], at_once: int = _AT_ONCE
) -> list[Result]:
    """Act on all of them, several at once; one that fails does not keep the others from it."""
    room = asyncio.Semaphore(at_once)

    async def attempt(reference: str) -> Result:
        async with room:
            try:
                return Result(reference, await act(reference))
            except SkerryError as error:
                return Result(reference, error=error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(reference)) for reference in references]
    return [task.result() for task in tasks]


async def list_each(
    manager: AsyncSandboxManager,
    capability: str,
    provider: str | None,
    listed: Callable[[str], Awaitable[Sequence[T]]],
    order: Callable[[T], Any],
) -> tuple[list[T], list[Result]]:
    """What `listed` tells of the provider that is named, or of each that has a capability, in order; and those that
    failed, which hide nothing of the others."""
    names = [provider] if provider else await manager.providers_with(capability)
    results = await for_each(names, listed)
    found = [each for result in results if result.error is None for each in result.value]
    return sorted(found, key=order), [result for result in results if result.error is not None]


def print_listed(
    listed: tuple[Sequence[T], Sequence[Result]], as_json: bool, show: Callable[[Sequence[T]], None]
) -> int:
    """Print what providers have, `show` it to people, say which of them failed, and give the exit code."""
    found, failed = listed
    if as_json:
        failures = [{"provider": each.reference, "error": error_data(each.error)} for each in failed if each.error]
        print_json([*to_data(list(found)), *failures])
        return OURS if failed else 0
    show(found)
    return print_failures(failed)


def change_each(references: Sequence[str], as_json: bool, doing: str, act: Change, *, repair: bool = False) -> int:
    """Change or remove each, print the results and give the exit code."""
    results = with_manager(
        lambda manager: for_each(references, lambda each: act(manager, each)), repair=repair, doing=doing
    )
    return print_results(results, as_json)


def print_results(results: Sequence[Result], as_json: bool) -> int:
    """Print what worked on stdout and what failed on stderr, and give the exit code."""
    if as_json:
        print_json([result.as_data() for result in results])
        return OURS if any(result.error for result in results) else 0
    echo(*(result.reference for result in results if result.error is None))
    return print_failures(results)


def print_failures(results: Sequence[Result]) -> int:
    """Print what failed on stderr, and give the exit code."""
    failed = [result for result in results if result.error is not None]
    for result in failed:
        say(f"{result.reference}: {result.error}")
    return OURS if failed else 0


def record_data(record: Record) -> dict[str, Any]:
    """Record of a sandbox, for JSON."""
    data: dict[str, Any] = to_data(record)
    return {
        "id": data.pop("id"),
        "name": record.name,
        "state": data.pop("state"),
        "provider": record.spec.provider,
        "project": record.spec.project,
        "labels": record.spec.labels,
        "addresses": {str(port.port): port.address for port in record.spec.ports},
        "ends_at": record.ends_at if record.is_live else None,
        **data,
    }
