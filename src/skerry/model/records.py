"""Records of the registry: sandboxes, why they ended, who makes them, and events."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from skerry import clock
from skerry.clock import End, Moment
from skerry.errors import InvalidSpec
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State

FLEET_LABEL = "skerry.fleet"
PHASE_LABEL = "skerry.phase"
INDEX_LABEL = "skerry.index"
ASIDE_LABEL = "skerry.aside"
"""Label of a member of a fleet whose successor is in the making."""
ASIDE = ".old"
"""End of its name until then; 63 letters are enough for both."""
SETUP_LABEL = "skerry.setup"
"""Label of a member of a fleet whose files and setup are still to be done: its command waits for that."""
TEMPORARY = "tmp-"
"""Prefix of the names of snapshots that nobody asked for."""
_OF_PROJECT = ".."
"""Between a project and the name of a snapshot that is only its own."""
_HASHED = "sha-"
_LONGEST_PROJECT = 31
_LONGEST_NAME = 63
_LONGEST_STEM = _LONGEST_NAME - len(ASIDE) - len("1000")
_LEAST_S = 0.1


class Cause(StrEnum):
    """Cause of the end of a sandbox; each has one."""

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
    """Both by the wall clock, which is for people alone."""
    owner: Owner
    written: Moment | None = None
    """Moment of its last change, by the clock that ages are counted by."""
    end: End | None = None
    """End of its lifetime, by the same."""
    ephemeral: bool = False
    """It ends with its owner."""
    doomed: bool = False
    """Somebody decided to destroy it; until that is done it is only that."""
    volumes: bool = False
    """Its volumes go with it when it is destroyed."""
    remaker: Owner | None = None
    """Process that rebuilds its box under the same id, or began to and did not come to an end."""
    cause: Cause | None = None
    detail: str = ""
    """Details of a failure, such as the tail of the box's log."""
    key: str | None = None
    """The idempotency key that it was asked for with."""
    cid: int | None = None
    """Its number on the vsock bus, if its box is a machine: no other sandbox has it or had it before. None without a
    registry, and for what an older version made."""
    enforced: dict[str, Any] = {}
    boot_id: str = ""
    """The host's boot in which it was made."""
    memory: int = 0
    """The most memory of its host that its box may take; 0 for one on a host that nobody here looks at."""

    @property
    def name(self) -> str | None:
        return self.spec.name

    @property
    def member_name(self) -> str | None:
        """Its name within its fleet, which other fleets of the project may have too; outside of a fleet its name."""
        labels = self.spec.labels
        if not {FLEET_LABEL, PHASE_LABEL, INDEX_LABEL} <= labels.keys() or not labels[INDEX_LABEL].isdecimal():
            return self.spec.name
        name = f"{member_stem(labels[PHASE_LABEL])}{int(labels[INDEX_LABEL]):03d}"
        return f"{name}{ASIDE}" if ASIDE_LABEL in labels else name

    @property
    def is_live(self) -> bool:
        return self.state is not State.DESTROYED

    @property
    def is_being_set_up(self) -> bool:
        """Whether it is a member of a fleet whose setup is still to be done."""
        return SETUP_LABEL in self.spec.labels

    @property
    def ends_at(self) -> float | None:
        """End of its lifetime, if it has one: for people, by the wall clock as it is set now."""
        if not self.spec.lifetime_s:
            return None
        left_s = self.left_s(clock.now())
        return self.created_at + self.spec.lifetime_s if left_s is None else time.time() + left_s

    def left_s(self, now: Moment) -> float | None:
        """Rest of its lifetime in seconds, below zero when it is over; None if it has none, or its machine is another.
        A registry that is older than the clock has noted no end: then all of it is left."""
        if not self.spec.lifetime_s:
            return None
        return self.spec.lifetime_s if self.end is None else self.end.left_at(now)

    def is_over(self, now: Moment, late_s: float = 0.0) -> bool:
        """Whether its lifetime has been over for so long, as far as can be known here."""
        left_s = self.left_s(now)
        return left_s is not None and left_s <= -late_s

    def age_s(self, now: Moment) -> float | None:
        """Seconds since its last change; None if nobody here can tell."""
        return None if self.written is None else self.written.age_s(now)

    def spec_from(self, now: Moment, env: Mapping[str, str] | None) -> Spec:
        """The spec for a box that starts or is made once more: the time it has left, and `env`, which nobody kept."""
        left_s = self.left_s(now)
        left_s = self.spec.lifetime_s if left_s is None else max(left_s, _LEAST_S)
        return msgspec.structs.replace(self.spec, env=dict(env or {}), lifetime_s=left_s)


def member_stem(phase: str) -> str:
    """Beginning of the names of the members of a phase, before their numbers."""
    return f"agent-{phase}-"


def member_sandbox(project: str, fleet: str, phase: str, index: int) -> str:
    """The name of the sandbox that a member is: that of the member, and in a project that is not the fleet's own the
    fleet's before it, since there may be others."""
    stem = member_stem(phase)
    if project != fleet:
        stem = f"{fleet}-{stem}"
        if len(stem) > _LONGEST_STEM:
            stem = f"{stem[: _LONGEST_STEM - 14]}-{hashlib.sha256(stem.encode()).hexdigest()[:12]}-"
    return f"{stem}{index:03d}"


def temporary_snapshot(id: SandboxId) -> str:
    """The snapshot that a fork is made from, by the fork's own id."""
    return f"{TEMPORARY}{id}"


def kept_snapshot(project: str | None, name: str) -> str:
    """The name under which a provider keeps a snapshot that only one project is to see; without a project the name
    itself. Raises InvalidSpec for a name that is another project's, or would be too long."""
    if project is None:
        return name
    prefix = _snapshot_prefix(project)
    own = name.removeprefix(prefix)
    if _OF_PROJECT in own or own.startswith("."):
        raise InvalidSpec(f"snapshot: {name!r}: a name has no two dots in a row", field="snapshot")
    if len(prefix) + len(own) > _LONGEST_NAME:
        raise InvalidSpec(f"snapshot: a name has at most {_LONGEST_NAME - len(prefix)} letters here", field="snapshot")
    return prefix + own


def shown_snapshot(project: str | None, kept: str) -> str | None:
    """The name that a project has for a snapshot that is kept under that one; None if it is none of its own."""
    if project is None:
        return kept
    head, dots, name = kept.rpartition(_OF_PROJECT)
    return name if head + dots == _snapshot_prefix(project) else None


def _snapshot_prefix(project: str) -> str:
    """Beginning of the names of a project's snapshots. One that is long, or could be taken for something else, is told
    by a digest: all of a name has to fit into 63 letters."""
    is_plain = len(project) <= _LONGEST_PROJECT and not project.startswith((TEMPORARY, _HASHED))
    return f"{project if is_plain else _HASHED + hashlib.sha256(project.encode()).hexdigest()[:24]}{_OF_PROJECT}"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened; `seq` is its place in the one order of all events of an installation."""

    seq: int
    time: float
    sandbox: SandboxId
    kind: str
    """created, ready, paused, stopped, lost, destroyed, doomed, adopted, acquired, renamed, lifetime, rules,
    remaking, creating (once more)"""
    state: State
    cause: Cause | None = None
    data: dict[str, Any] = {}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of sandboxes; every field that is given must fit."""

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
