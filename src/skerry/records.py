"""What the store knows of a sandbox, and what happened to it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from skerry.lifecycle import State
from skerry.spec import SandboxId, Spec

ENDED = frozenset({State.DESTROYED})
"""States that no longer count: no box is left, or will be."""
TEMPORARY = "tmp-"
"""How the names of snapshots begin that nobody asked for."""
_LEAST_S = 0.1


class Cause(StrEnum):
    """Why a sandbox ended; each has one."""

    USER = "user"
    LIFETIME = "lifetime"
    IDLE = "idle"
    OUT_OF_MEMORY = "out_of_memory"
    AGENT_LOST = "agent_lost"
    BOX_DIED = "box_died"
    HOST_RESTARTED = "host_restarted"
    CREATION_FAILED = "creation_failed"
    OWNER_DIED = "owner_died"
    """It was to live as long as the program that made it, and that is gone."""


class Owner(msgspec.Struct, frozen=True):
    """The process that makes or uses a sandbox, so that another can tell whether it still lives."""

    host: str
    """The machine, its boot and the process namespace: after a restart every owner on it is dead."""
    pid: int
    started: int
    """The process's start time in clock ticks: pids are used again."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as the store holds it."""

    id: SandboxId
    spec: Spec
    state: State
    version: int
    """Grows with every change; a change names the version it was made from."""
    created_at: float
    updated_at: float
    owner: Owner
    ephemeral: bool = False
    """It ends with its owner."""
    doomed: bool = False
    """Somebody decided to destroy it; until that is done it is only that."""
    volumes: bool = False
    """Its volumes go with it when it is destroyed."""
    remaker: Owner | None = None
    """Who makes its box anew under the same id, or began to and did not come to an end."""
    cause: Cause | None = None
    detail: str = ""
    """What is known of a failure, such as the tail of the box's log."""
    key: str | None = None
    """The idempotency key that it was asked for with."""
    cid: int | None = None
    """Its number on the vsock bus; never given twice."""
    enforced: dict[str, Any] = {}
    boot_id: str = ""
    """The host's boot in which it was made."""

    @property
    def name(self) -> str | None:
        return self.spec.name

    @property
    def is_live(self) -> bool:
        return self.state not in ENDED

    @property
    def ends_at(self) -> float | None:
        """When its lifetime is over, if it has one."""
        return self.created_at + self.spec.lifetime_s if self.spec.lifetime_s else None

    def spec_from(self, now: float, env: Mapping[str, str] | None) -> Spec:
        """What a box is told that starts, or is made, once more: the time it has left, and an environment, of which
        the registry keeps only the names."""
        left = None if self.ends_at is None else max(self.ends_at - now, _LEAST_S)
        return msgspec.structs.replace(self.spec, env=dict(env or {}), lifetime_s=left or self.spec.lifetime_s)


def temporary_snapshot(id: SandboxId) -> str:
    """The snapshot that a fork is made from, by the fork's own id."""
    return f"{TEMPORARY}{id}"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened; `seq` is its place in the one order of all events of an installation."""

    seq: int
    time: float
    sandbox: SandboxId
    kind: str
    """created, ready, paused, stopped, error, lost, destroyed, doomed, adopted, acquired, lifetime, remaking,
    creating (once more)"""
    state: State
    cause: Cause | None = None
    data: dict[str, Any] = {}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which sandboxes are meant; every field that is given must fit."""

    states: frozenset[State] = frozenset()
    project: str | None = None
    provider: str | None = None
    labels: dict[str, str] = {}
    name: str | None = None
    include_ended: bool = False

    def fits(self, record: Record) -> bool:
        spec = record.spec
        return (
            (self.include_ended or record.is_live or record.state in self.states)
            and (not self.states or record.state in self.states)
            and self.project in (None, spec.project)
            and self.provider in (None, spec.provider)
            and self.name in (None, spec.name)
            and all(spec.labels.get(key) == value for key, value in self.labels.items())
        )
