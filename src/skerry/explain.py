"""When a sandbox will end and why, or why it did, in words."""

from __future__ import annotations

import time

import msgspec

from skerry import owners
from skerry.errors import SkerryError
from skerry.lifecycle import State
from skerry.records import Cause, Record
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """When a sandbox will end or why it did, in words."""

    id: SandboxId
    state: State
    cause: Cause | None
    detail: str
    reachable: bool
    ends_at: float | None
    idle_s: float | None
    running: int
    """Processes that were started in it and run: while there are any, it is not idle."""
    why: list[str]


async def explain(record: Record, sandbox: AsyncSandbox) -> Explanation:
    running, reachable = 0, False
    if record.state is State.READY:
        try:
            running = sum(each.running for each in await sandbox.processes.list())
            reachable = True
        except SkerryError:
            reachable = False
    return Explanation(
        id=record.id,
        state=record.state,
        cause=record.cause,
        detail=record.detail,
        reachable=reachable,
        ends_at=record.ends_at if record.is_live else None,
        idle_s=record.spec.idle_s or None,
        running=running,
        why=_reasons(record, running, reachable),
    )


def _reasons(record: Record, running: int, reachable: bool) -> list[str]:
    if not record.is_live:
        return [f"it ended: {record.cause or 'destroyed'}"]
    reasons = []
    if record.state is State.LOST:
        reasons.append(f"it is lost: {record.cause}; it is adopted if its box comes back")
    if record.doomed:
        reasons.append("it is being destroyed")
    if record.state is State.READY and not reachable:
        reasons.append("its agent does not answer; reconcile will tell what became of it")
    if record.ends_at is not None:
        left = max(0.0, record.ends_at - time.time())
        reasons.append(f"its lifetime ends in {left:.0f} s")
    if record.spec.idle_s and running:
        reasons.append(f"it is not idle: {running} of its processes run")
    elif record.spec.idle_s:
        reasons.append(f"it ends after {record.spec.idle_s:g} s without a call or a running process")
    if record.ephemeral:
        who = f"process {record.owner.pid}"
        gone = owners.is_alive(record.owner) is False
        reasons.append(f"it ends with {who}" if not gone else f"{who} is gone: reconcile will end it")
    return reasons or ["nothing ends it but you"]
