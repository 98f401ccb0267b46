"""`skerry ps`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import filter_options, make_filter
from skerry.cli.output import SHORT_ID, echo, format_span, json_option, print_json, print_table

if TYPE_CHECKING:
    from skerry.records import Record

_HEADER = ("ID", "NAME", "PROVIDER", "STATE", "AGE", "ENDS", "LABELS")


@click.command()
@click.option("-a", "--all", "ended", is_flag=True, help="Those too that have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@filter_options
@json_option
def command(ended: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """List the sandboxes."""
    wanted = make_filter(options, include_ended=ended)
    from skerry.cli.registry import record_data, with_manager

    records = with_manager(lambda manager: manager.list(wanted), repair=True, doing="looking at the sandboxes")
    if as_json:
        print_json([record_data(record) for record in records])
    elif quiet:
        for record in records:
            echo(record.id)
    else:
        now = time.time()
        print_table(_HEADER, [_row(record, now) for record in records])


def _row(record: Record, now: float) -> tuple[str, ...]:
    return (
        record.id[:SHORT_ID],
        record.name or "",
        record.spec.provider,
        f"{record.state} ({record.cause})" if record.cause else record.state,
        format_span(now - record.created_at),
        _end(record, now),
        ",".join(f"{key}={value}" for key, value in record.spec.labels.items()),
    )


def _end(record: Record, now: float) -> str:
    if not record.is_live:
        return ""
    lifetime = [f"in {format_span(record.ends_at - now)}"] if record.ends_at else []
    idle = [f"idle {format_span(record.spec.idle_s)}"] if record.spec.idle_s else []
    owner = [f"with {record.owner.pid}"] if record.ephemeral else []
    return ", ".join(lifetime + idle + owner) or "never"
