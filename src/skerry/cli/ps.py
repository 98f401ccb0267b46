"""`skerry ps`, `inspect`, `explain`, `events` and `stats`: sandboxes, seen from outside."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from skerry.cli import output
from skerry.cli.errors import error_data
from skerry.cli.options import filter_options, make_filter, references, sandbox_argument, sandboxes_argument
from skerry.cli.output import (
    SHORT_ID,
    age,
    format_span,
    json_option,
    print_json,
    print_json_line,
    print_list,
    printable,
    to_data,
)
from skerry.cli.registry import Result, for_each, print_failures, record_data, with_manager
from skerry.errors import CallTimeout, NotPermitted, SkerryError
from skerry.units import format_size

if TYPE_CHECKING:
    from skerry.manager.admission import HostRoom
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.records import Event, Record
    from skerry.model.results import Metrics, ServiceStatus

_RECORDS = ("ID", "NAME", "PROVIDER", "STATE", "AGE", "ENDS", "LABELS")
_STATS = ("ID", "NAME", "CPU", "MEMORY", "DISK", "PROCESSES", "UPTIME")
_STATS_EVERY_S = 1.0
_METRICS_TIMEOUT_S = 5.0
_SERVICE_TIMEOUT_S = 3.0


@click.command()
@click.option("-a", "--all", "ended", is_flag=True, help="Those too that have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@filter_options
@json_option
def ps(ended: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """List the sandboxes.

    Their hosts are asked how they are. Where a provider does not answer, its sandboxes are listed as they were last
    known, and a line on stderr says so.
    """
    wanted = make_filter(options, include_ended=ended)

    async def look(
        manager: AsyncSandboxManager,
    ) -> tuple[list[Record], dict[str, ServiceStatus | None], Sequence[str]]:
        import msgspec

        silent = await manager.refresh(msgspec.structs.replace(wanted, states=frozenset(), include_ended=False))
        records = await manager.list(wanted)
        return records, {} if quiet else await _services(manager, records), silent

    records, services, silent = with_manager(look, repair=True, doing="looking at the sandboxes")
    for name in silent:
        output.say(f"{name} does not answer: its sandboxes are shown as they were last known")
    if as_json:
        print_json([record_data(record) | {"service": to_data(services.get(record.id))} for record in records])
        return
    has_services = any(record.spec.command or record.spec.ports for record in records)
    has_rules = any(record.spec.network == "rules" for record in records)
    header = (*_RECORDS, *(("SERVICE", "ADDRESSES") if has_services else ()), *(("REACHES",) if has_rules else ()))

    def row(record: Record) -> tuple[str, ...]:
        more = (_service_word(record, services.get(record.id)), _addresses(record)) if has_services else ()
        return (*_record_row(record), *more, *((_reaches(record),) if has_rules else ()))

    print_list(records, header, row, as_json=False, quiet=quiet)


async def _services(manager: AsyncSandboxManager, records: Sequence[Record]) -> dict[str, ServiceStatus | None]:
    """State of the services that should run; None where the agent does not answer in time."""
    from skerry.model.states import State

    asked = [record.id for record in records if record.spec.command is not None and record.state is State.READY]
    results = await for_each(asked, lambda id: service_status(manager, id))
    return {result.reference: result.value for result in results}


async def service_status(manager: AsyncSandboxManager, id: str) -> ServiceStatus | None:
    """State of the service of one sandbox. Raises CallTimeout."""
    try:
        async with asyncio.timeout(_SERVICE_TIMEOUT_S):
            return await manager.handles.of(await manager.record(id)).service.status()
    except TimeoutError:
        raise CallTimeout(f"it did not answer within {_SERVICE_TIMEOUT_S:g} s") from None


def _service_word(record: Record, status: ServiceStatus | None) -> str:
    if record.spec.command is None or not record.is_live:
        return ""
    if status is None:
        return "-"
    restarts = f", {status.restarts} restarts" if status.restarts else ""
    return f"{'healthy' if status.healthy else status.state}{restarts}"


def _addresses(record: Record) -> str:
    return ",".join(f"{port.address}->{port.port}" for port in record.spec.ports if port.address)


def _reaches(record: Record) -> str:
    """What its rules let a sandbox reach; what they deny with a minus."""
    spec = record.spec
    hosts = [host for secret in spec.secrets.values() for host in secret.hosts]
    return ",".join(dict.fromkeys([*spec.allow, *hosts, *spec.reach, *(f"-{rule}" for rule in spec.deny)]))


def _record_row(record: Record) -> tuple[str, ...]:
    lifetime = [f"in {format_span(record.ends_at - time.time())}"] if record.ends_at else []
    idle = [f"idle {format_span(record.spec.idle_s)}"] if record.spec.idle_s else []
    idle += [f"sleeps {format_span(record.spec.sleep_after_s)}"] if record.spec.sleep_after_s else []
    owner = [f"with {record.owner.pid}"] if record.ephemeral else []
    return (
        record.id[:SHORT_ID],
        record.name or "",
        record.spec.provider,
        f"{record.state} ({record.cause})" if record.cause else record.state,
        age(record.created_at),
        (", ".join(lifetime + idle + owner) or "never") if record.is_live else "",
        ",".join(f"{key}={value}" for key, value in record.spec.labels.items()),
    )


@click.command()
@sandboxes_argument
def inspect(sandboxes: tuple[str, ...]) -> int:
    """Show all that is known of sandboxes, as JSON.

    A list with one object for each: its record, how its limits are held, and what it uses now and how its service is,
    if its agent answers.
    """
    results = with_manager(lambda manager: for_each(sandboxes, lambda each: _inspect(manager, each)))
    print_json([result.value for result in results if result.error is None])
    return print_failures(results)


async def _inspect(manager: AsyncSandboxManager, reference: str) -> dict[str, Any]:
    record = await manager.look_after(reference)
    live: dict[str, Any] = {"reachable": False, "metrics": None, "service": None}
    if record.is_live:
        try:
            live |= {"reachable": True, "metrics": to_data(await _metrics(manager, record))}
            if record.spec.command is not None:
                live["service"] = to_data(await service_status(manager, record.id))
        except SkerryError as error:
            live["unreachable_because"] = str(error)
    return record_data(record) | live


async def _metrics(manager: AsyncSandboxManager, record: Record) -> Metrics:
    """Usage of a sandbox. Raises CallTimeout if its agent does not answer."""
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            return await (await manager.get(record.id)).metrics()
    except TimeoutError:
        raise CallTimeout(f"it did not answer within {_METRICS_TIMEOUT_S:g} s") from None


@click.command()
@sandbox_argument
@json_option
def explain(sandbox: str, as_json: bool) -> None:
    """Tell when a sandbox will end and why, or why it did."""
    told = with_manager(lambda manager: manager.explain(sandbox))
    lines = [f"sandbox {told.id} is {told.state}"]
    if told.ends_at is not None:
        end = datetime.datetime.fromtimestamp(told.ends_at).astimezone()
        lines.append(f"it ends at {end.isoformat(sep=' ', timespec='seconds')} at the latest")
    detail = (f"  {printable(line)}" for line in told.detail.splitlines())
    output.print_one(as_json, told, *lines, *map(printable, told.why), *detail)


@click.command()
@click.option("--since", type=int, default=0, metavar="SEQ", help="Only what came after the event of this number.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@json_option
def events(since: int, follow: bool, as_json: bool) -> None:
    """Tell what happened to all sandboxes.

    One line for each event, the oldest first; with --json, one object on each. Every event has a number in one order:
    who comes back with the last one by --since has missed none.
    """

    async def show(manager: AsyncSandboxManager) -> None:
        async for event in manager.events(after=since, follow=follow):
            if as_json:
                print_json_line(to_data(event))
            else:
                output.echo(_event_line(event))

    with_manager(show)


def _event_line(event: Event) -> str:
    time = datetime.datetime.fromtimestamp(event.time).astimezone().isoformat(timespec="milliseconds")
    rest = [event.cause or "", *(f"{key}={value}" for key, value in event.data.items())]
    return printable(f"{event.seq:>6}  {time}  {event.sandbox[:SHORT_ID]}  {event.kind:<10} {' '.join(rest)}").rstrip()


@click.command()
@click.argument("sandboxes", nargs=-1, metavar="[SANDBOX...]", shell_complete=references)
@click.option("--no-stream", is_flag=True, help="Once, instead of every second.")
@json_option
def stats(sandboxes: tuple[str, ...], no_stream: bool, as_json: bool) -> int:
    """Show what sandboxes use, live.

    Without a SANDBOX, all that are ready, and what the host has left for more. With --json, one line for each sandbox
    and second, and one for the host.
    """
    return with_manager(lambda manager: _show_stats(manager, sandboxes, no_stream, as_json))


async def _show_stats(manager: AsyncSandboxManager, sandboxes: Sequence[str], once: bool, as_json: bool) -> int:
    """Print usage every second; a sandbox that does not answer hides neither itself nor the others."""
    from skerry.model.records import Filter
    from skerry.model.states import State

    async def measure(reference: str) -> tuple[Record, Metrics]:
        record = await manager.record(reference)
        return record, await _metrics(manager, record)

    while True:
        every = sandboxes or [record.id for record in await manager.list(Filter(states=frozenset({State.READY})))]
        results = await for_each(every, measure)
        room = None if sandboxes else await _room(manager)
        if as_json:
            for result in results:
                print_json_line(_stats_data(result))
            if room is not None:
                print_json_line({"host": to_data(room)})
        else:
            if not once:
                output.clear_screen()
            output.print_table(_STATS, [_stats_row(result) for result in results])
            if room is not None:
                output.echo(f"host  {room.short or room}")
        if once or (sandboxes and all(result.error is not None for result in results)):
            return print_failures(results)
        await asyncio.sleep(_STATS_EVERY_S)


async def _room(manager: AsyncSandboxManager) -> HostRoom | None:
    """What the host has left; None for a tenant of a server."""
    try:
        return await manager.handles.room()
    except NotPermitted:
        return None


def _stats_data(result: Result) -> dict[str, Any]:
    if result.error is not None:
        return {"reference": result.reference, "error": error_data(result.error)}
    record, metrics = result.value
    return {"id": record.id, "name": record.name, **to_data(metrics)}


def _stats_row(result: Result) -> tuple[str, ...]:
    if result.error is not None:
        return (result.reference[:SHORT_ID], "", "-", "-", "-", "-", str(result.error))
    record, metrics = result.value
    limit = f" / {format_size(record.spec.memory)}" if record.spec.memory else ""
    return (
        record.id[:SHORT_ID],
        record.name or "",
        f"{metrics.cpu_percent:.1f}%",
        format_size(metrics.memory_bytes) + limit,
        format_size(metrics.disk.used),
        str(metrics.processes),
        format_span(metrics.uptime_s),
    )
