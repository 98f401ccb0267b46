"""One command in many members: best effort, bounded, one outcome for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from skerry.errors import NotFound, SkerryError, WrongState
from skerry.fleet.model import ALL, PHASE_LABEL, suggestion
from skerry.fleet.status import is_ready
from skerry.manager.manager import AsyncSandboxManager
from skerry.model import states
from skerry.model.records import Record
from skerry.model.results import ExecResult
from skerry.sandbox.processes import ExecOptions

_log = logging.getLogger("skerry.fleet")
OnOutput = Callable[[str, int, bytes], object]
"""Told the member, the descriptor (1 or 2) and a piece of output, as it comes."""


class MemberOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a command in one member: its result, or the error."""

    result: ExecResult | None = None
    error: SkerryError | None = None
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result.ok


def choose(records: Mapping[str, Record], target: str, phases: Iterable[str], fleet: str) -> dict[str, Record]:
    """The members of a target: `all`, a member, a phase, or a label `key=value`. Raises NotFound."""
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
    close = suggestion(target, [*sorted(known), *records])
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
    """Run a command in all of them, and wait for all; each has an outcome of its own."""
    slots = asyncio.Semaphore(at_once)
    outcomes: dict[str, MemberOutcome] = {}

    async def one(name: str, record: Record) -> None:
        async with slots:
            began = time.monotonic()
            own = options
            if on_output is not None:
                own = {**own, "on_stdout": partial(on_output, name, 1), "on_stderr": partial(on_output, name, 2)}
            try:
                result = await run(manager, record, command, own)
                outcomes[name] = MemberOutcome(result=result, duration_s=time.monotonic() - began)
            except SkerryError as error:
                outcomes[name] = MemberOutcome(error=error, duration_s=time.monotonic() - began)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for name, record in records.items():
            group.create_task(one(name, record))
    failed = sum(not outcome.ok for outcome in outcomes.values())
    _log.info("a command in %d members took %.3f s, %d failed", len(records), time.monotonic() - began, failed)
    return {name: outcomes[name] for name in records}


def refuse_unready(record: Record) -> None:
    """Raise WrongState for a member that no command may run in: its setup is not done, or it does not run."""
    if not is_ready(record):
        why = "it is being destroyed" if record.doomed else states.unusable(record.state)
        raise WrongState(f"{record.member_name} cannot be used: {'its setup is not done' if record.ephemeral else why}")


async def run(
    manager: AsyncSandboxManager, record: Record, command: Sequence[str] | str, options: ExecOptions
) -> ExecResult:
    """Run a command in one member. Raises WrongState if it cannot be used."""
    refuse_unready(record)
    result = await manager.handles.of(record).exec(command, **options)
    _log.debug("%s: a command ended with %d after %.3f s", record.member_name, result.exit_code, result.duration_s)
    return result
