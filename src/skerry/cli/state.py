"""`skerry start`, `stop`, `pause`, `unpause`, `wait`, `rm`, `prune` and `reconcile`: states of sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli import options
from skerry.cli.errors import TIMED_OUT
from skerry.cli.options import (
    duration,
    env_option,
    environment,
    filter_options,
    grace_option,
    make_filter,
    sandboxes_argument,
)
from skerry.cli.output import SHORT_ID, count_of, json_option, print_list, print_one, say
from skerry.cli.registry import Result, change_each, for_each, print_failures, print_results, record_data, with_manager
from skerry.errors import NotFound, SkerryError

if TYPE_CHECKING:
    from skerry.manager.decide import Verdict
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Record

_VERDICTS = ("ID", "PROVIDER", "ACTION", "WHY")


@click.command()
@sandboxes_argument
@env_option
@json_option
def start(sandboxes: tuple[str, ...], env: tuple[str, ...], as_json: bool) -> int:
    """Start sandboxes that were stopped.

    Their files are as they were. The environment that they were made with is gone, unless it is given again.
    """
    given = environment(env)
    return change_each(sandboxes, as_json, "starting", lambda manager, each: manager.start(each, given), repair=True)


@click.command()
@sandboxes_argument
@grace_option
@json_option
def stop(sandboxes: tuple[str, ...], grace: str | None, as_json: bool) -> int:
    """Stop sandboxes.

    Their files stay, their processes end: by themselves within --grace (5s), or by force. Not every provider can.
    """
    grace_s = duration(grace, "--grace")
    return change_each(sandboxes, as_json, "stopping", lambda manager, each: manager.stop(each, grace_s), repair=True)


@click.command()
@sandboxes_argument
@click.option("--save", is_flag=True, help="Save their memory in files; until unpause they take none, and no process.")
@json_option
def pause(sandboxes: tuple[str, ...], save: bool, as_json: bool) -> int:
    """Pause sandboxes.

    Their processes stand still until unpause. Not every provider can.
    """
    return change_each(sandboxes, as_json, "pausing", lambda manager, each: manager.pause(each, save=save), repair=True)


@click.command()
@sandboxes_argument
@json_option
def unpause(sandboxes: tuple[str, ...], as_json: bool) -> int:
    """Let sandboxes go on that are paused or asleep.

    Their processes go on where they stood.
    """
    return change_each(
        sandboxes, as_json, "letting them go on", lambda manager, each: manager.resume(each), repair=True
    )


@click.command()
@sandboxes_argument
@click.option("--timeout", metavar="TIME", help="Give up after this, with exit code 124.")
@json_option
def wait(sandboxes: tuple[str, ...], timeout: str | None, as_json: bool) -> int:
    """Wait until sandboxes have ended.

    Prints why each ended, in the order they were named.
    """
    limit_s = duration(timeout, "--timeout")

    async def wait_for_all(manager: AsyncSandboxManager) -> list[Result]:
        async def wait_for_one(reference: str) -> Record:
            record = await manager.record(reference)  # a name ends with its sandbox, an id does not
            return await manager.wait(record.id)

        async with asyncio.timeout(limit_s):
            return await for_each(sandboxes, wait_for_one)

    try:
        results = with_manager(wait_for_all)
    except TimeoutError:
        say(f"not all have ended within {limit_s:g} s, as --timeout asks")
        return TIMED_OUT
    ended = [result.value for result in results if result.error is None]
    print_one(as_json, [record_data(each) for each in ended], *(each.cause or each.state for each in ended))
    return print_failures(results)


@click.command()
@click.argument("sandboxes", nargs=-1, metavar="[SANDBOX...]", shell_complete=options.references)
@click.option("-f", "--force", is_flag=True, help="One that is not there is no error.")
@click.option("-v", "--volumes", is_flag=True, help="Remove their volumes too.")
@grace_option
@click.option("--all", "every", is_flag=True, help="All, or all that these options leave:")
@filter_options
@json_option
def rm(
    sandboxes: tuple[str, ...],
    force: bool,
    volumes: bool,
    grace: str | None,
    every: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """End sandboxes and remove all of them.

    Their processes end by themselves within --grace (2s), or by force. Names those that are gone on stdout. If any
    could not be removed, the others are, and the exit code is 125.
    """
    options.refuse_if(not sandboxes and not every, "name the sandboxes to remove, or use --all")
    options.refuse_if(sandboxes and every, "--all and names exclude each other")
    options.refuse_if(not every and any(filters.values()), "--label, --project, --state and --provider need --all")
    wanted, grace_s = make_filter(filters), duration(grace, "--grace")

    async def remove(manager: AsyncSandboxManager) -> list[Result]:
        if every:
            outcomes = await manager.destroy_all(wanted, volumes=volumes, grace_s=grace_s)
            return [Result(outcome.id, error=outcome.error) for outcome in outcomes]
        results = await for_each(sandboxes, lambda each: manager.destroy(each, volumes=volumes, grace_s=grace_s))
        return [result for result in results if not (force and isinstance(result.error, NotFound))]

    return print_results(with_manager(remove, doing="removing"), as_json)


@click.command()
@click.option("--older", default="0s", metavar="TIME", help="Only what ended longer ago than this, e.g. 7d.")
@json_option
def prune(older: str, as_json: bool) -> None:
    """Forget the sandboxes that have ended.

    Only their records and events go; no sandbox that lives is touched.
    """
    older_s = duration(older, "--older") or 0.0
    count = with_manager(lambda manager: manager.prune(older_s=older_s), repair=True)
    print_one(as_json, {"removed": count}, f"{count_of(count, 'record')} removed")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("--rebuild", is_flag=True, help="Make anew what runs on an older image than its name means now.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@json_option
def reconcile(dry_run: bool, rebuild: bool, quiet: bool, as_json: bool) -> None:
    """Compare the registry with the host and repair the difference.

    What a crash left is finished, taken up again or removed (volumes are kept); one line tells each. What runs on an
    outdated image is told, and left as it is without --rebuild, which keeps its volumes and nothing else.
    """

    async def compare(manager: AsyncSandboxManager) -> Sequence[Verdict]:
        verdicts = await manager.reconcile(dry_run=dry_run, rebuild=rebuild)
        if not quiet:
            await _warn_of_silent_providers(manager)
        return verdicts

    print_list(
        with_manager(compare, doing="comparing"),
        _VERDICTS,
        lambda verdict: (verdict.id[:SHORT_ID], verdict.provider, verdict.action, verdict.why),
        as_json=as_json,
        quiet=quiet,
    )


async def _warn_of_silent_providers(manager: AsyncSandboxManager) -> None:
    """Name the providers that do not answer: nothing of theirs was repaired."""
    for name in sorted({record.spec.provider for record in await manager.list()}):
        try:
            await manager.provider(name).check()
        except SkerryError as error:
            say(f"{error}. Its sandboxes were left as they are")
