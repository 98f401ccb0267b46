"""One command in many members: best effort, bounded, one outcome for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from skerry import lifecycle
from skerry.errors import NotFound, SkerryError, WrongState
from skerry.fleet.events import log
from skerry.fleet.model import ALL, PHASE_LABEL, meant
from skerry.fleet.roster import handle_of
from skerry.fleet.status import is_ready
from skerry.manager import AsyncSandboxManager
from skerry.processes import ExecOptions
from skerry.records import Record
from skerry.results import ExecResult

OnOutput = Callable[[str, int, bytes], object]
"""Told the member, the descriptor (1 or 2) and a piece of output, as it comes."""


class MemberOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a command in one member: its result, or why there is none."""

    result: ExecResult | None = None
    error: SkerryError | None = None
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result.ok


def choose(records: Mapping[str, Record], target: str, phases: Iterable[str], fleet: str) -> dict[str, Record]:
    """The members that a target means: `all`, a member, a phase, or those with the label `key=value`."""
    if target == ALL:
        return dict(records)
    if target in records:
        return {target: records[target]}
    key, is_label, value = target.partition("=")
    if is_label:
        return {name: record for name, record in records.items() if record.spec.labels.get(key) == value}
    known = {record.spec.labels[PHASE_LABEL] for record in records.values()} | set(phases)
    if target in known:
        return {name: record for name, record in records.items() if record.spec.labels[PHASE_LABEL] == target}
    close = meant(target, [*sorted(known), *records])
    raise NotFound(f"fleet {fleet!r} has no member or phase {target!r}{close}")


async def broadcast(
    manager: AsyncSandboxManager,
    records: Mapping[str, Record],
    command: Sequence[str] | str,
    options: ExecOptions,
    *,
    at_once: int,
    on_output: OnOutput | None = None,
) -> dict[str, MemberOutcome]:
    """Run it in all of them, and wait for all; a member that fails fails for itself."""
    slots = asyncio.Semaphore(at_once)
    outcomes: dict[str, MemberOutcome] = {}

    async def one(name: str, record: Record) -> None:
        async with slots:
            began = time.monotonic()
            try:
                result = await run(manager, record, command, _heard(name, options, on_output))
                outcome = MemberOutcome(result=result, duration_s=time.monotonic() - began)
            except SkerryError as error:
                outcome = MemberOutcome(error=error, duration_s=time.monotonic() - began)
            outcomes[name] = outcome

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for name, record in records.items():
            group.create_task(one(name, record))
    failed = sum(not outcome.ok for outcome in outcomes.values())
    log.info("a command in %d members took %.3f s, %d failed", len(records), time.monotonic() - began, failed)
    return {name: outcomes[name] for name in records}


async def run(
    manager: AsyncSandboxManager, record: Record, command: Sequence[str] | str, options: ExecOptions
) -> ExecResult:
    """Run it in one member, over the stream that is open, or a new one."""
    if not is_ready(record):
        why = "it is being destroyed" if record.doomed else lifecycle.unusable(record.state)
        raise WrongState(f"{record.name} cannot be used: {'its setup is not done' if record.ephemeral else why}")
    result = await handle_of(manager, record).exec(command, **options)
    log.debug("%s: a command ended with %d after %.3f s", record.name, result.exit_code, result.duration_s)
    return result


def _heard(name: str, options: ExecOptions, on_output: OnOutput | None) -> ExecOptions:
    if on_output is None:
        return options
    return {**options, "on_stdout": partial(on_output, name, 1), "on_stderr": partial(on_output, name, 2)}
