"""A fleet as data: phases of sandboxes that are alike, and the phases each waits for. Frozen, and valid once it exists.

The registry is the only truth about what there is: a member is a sandbox whose labels name its fleet, phase and index.
"""

from __future__ import annotations

import difflib
import graphlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import StrEnum
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from skerry.errors import InvalidFleet, InvalidSpec, NotFound, Problem
from skerry.model.records import ASIDE as ASIDE
from skerry.model.records import ASIDE_LABEL as ASIDE_LABEL
from skerry.model.records import FLEET_LABEL as FLEET_LABEL
from skerry.model.records import INDEX_LABEL as INDEX_LABEL
from skerry.model.records import PHASE_LABEL as PHASE_LABEL
from skerry.model.records import SETUP_LABEL as SETUP_LABEL
from skerry.model.records import member_sandbox, member_stem
from skerry.model.spec import Port, Spec

VERSION_LABEL = "skerry.version"
PENDING = "pending"
"""Value of the label `skerry.setup` until files, setup commands and health check are done; then it goes."""

ALL = "all"  # the target that means every member, so no phase can have this name
MAX_PER_PHASE = 100
MAX_PARALLEL = 16
VARIABLES = ("SKERRY_FLEET", "SKERRY_PHASE", "SKERRY_INDEX", "SKERRY_COUNT", "SKERRY_PEERS")
"""Variables in the environment of every member."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MOST_PER_PHASE = 1000  # their names fit into SKERRY_PEERS
_MAX_CIRCLES = 20  # more to mend than anyone reads at once
_MAX_PHASES = 500
_LONGEST_S = 7 * 86400.0

Waits = Mapping[str, Set[str]]  # for each phase, the phases that it waits for
Command = str | tuple[str, ...]  # a line for the box's shell, or a program and its arguments


class OnFailure(StrEnum):
    FAIL_FAST = "fail-fast"
    """A member that fails takes the phase's new members with it, and what waits for the phase does not start."""
    CONTINUE = "continue"
    """What came up stays, and what waits for the phase starts if there is at least one."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file that each member begins with."""

    path: str
    content: bytes
    mode: int | None = None

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise InvalidSpec(f"files: {self.path!r} is not a path", field="files")
        if self.mode is not None and not 0 <= self.mode <= 0o7777:
            raise InvalidSpec(f"files: {self.mode:o} is not a mode; 0 to 7777 in octal", field="files")


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True):
    """A command that must end with 0 before a member counts as ready."""

    command: Command
    interval_s: float = 1.0
    """From the end of one try to the next."""
    timeout_s: float = 30.0
    """For one try."""
    retries: int = 30
    """So many failures in a row, after `start_period_s`, fail the member."""
    start_period_s: float = 0.0
    """Failures in this time after the setup do not count."""

    def __post_init__(self) -> None:
        _check_command(self.command, "healthcheck")
        _check_seconds(self.interval_s, "interval", "healthcheck", least=0.01)
        _check_seconds(self.timeout_s, "timeout", "healthcheck", least=0.01)
        _check_seconds(self.start_period_s, "start_period", "healthcheck", least=0)
        if not 1 <= self.retries <= 10_000:
            raise InvalidSpec(f"healthcheck: retries {self.retries} is out of range; 1 to 10000", field="healthcheck")


class Phase(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Members that are alike and start together."""

    name: str
    count: int = 1
    spec: Spec = Spec()
    """Spec of each member, but for its name and the labels and variables that are a member's own."""
    wait_for: tuple[str, ...] = ()
    """Phases that must be ready before this one starts."""
    on_failure: OnFailure = OnFailure.FAIL_FAST
    timeout_s: float | None = None
    """For the whole phase to be ready, from its start."""
    max_parallel: int | None = None
    """How many of its members may be in the making at once; none is the fleet's bound alone."""
    setup: tuple[Command, ...] = ()
    """Commands for each member, one after the other, once its files are there."""
    files: tuple[File, ...] = ()
    healthcheck: Healthcheck | None = None
    inherited: tuple[str, ...] = ()
    """Variables that come from the caller's environment: their values change no version, and are written nowhere."""

    def __post_init__(self) -> None:
        if self.name == ALL:
            raise InvalidSpec(f"name: {ALL!r} means every member; choose another", field="name")
        _check_name("name", self.name, 48)  # `agent-`, the phase, `-` and an index fit into 63
        _check_number("count", self.count, least=0)
        _check_timeout(self.timeout_s)
        _check_number("max_parallel", self.max_parallel)
        for command in self.setup:
            _check_command(command, "setup")
        if ours := sorted(key for key in self.spec.labels if key.startswith("skerry.")):
            raise InvalidSpec(f"labels: {ours[0]!r} is ours: labels that begin with 'skerry.' are", field="labels")
        if ours := sorted(set(VARIABLES) & {*self.spec.env, *self.inherited}):
            raise InvalidSpec(f"env: {ours[0]} is set for each member; choose another name", field="env")
        msgspec.structs.replace(self.spec, env=self._env("x" * 63, self.count))  # raises if it is too much
        self._check_ports()

    def member_name(self, index: int) -> str:
        return f"{member_stem(self.name)}{index:03d}"

    def sandbox_name(self, fleet: str, index: int) -> str:
        """The name of a member's sandbox, which no other in the project has."""
        return member_sandbox(self.spec.project, fleet, self.name, index)

    def indexes(self) -> range:
        return range(1, self.count + 1)

    def members(self) -> tuple[str, ...]:
        """The names of all its members."""
        return self._members

    def member_spec(self, fleet: str, index: int) -> Spec:
        """Spec of a member, with the label of one whose setup is still to be done."""
        labels = {FLEET_LABEL: fleet, PHASE_LABEL: self.name, INDEX_LABEL: str(index)}
        labels |= {VERSION_LABEL: self.version(), SETUP_LABEL: PENDING}
        name, env, ports = self.sandbox_name(fleet, index), self._env(fleet, index), self._ports(index)
        return msgspec.structs.replace(self.spec, name=name, env=env, ports=ports, labels=self.spec.labels | labels)

    def _ports(self, index: int) -> tuple[Port, ...]:
        """Ports of a member: those of this host that are given are the first member's, and the next has the next."""
        return tuple(
            each if each.local is None else Port(port=each.port, local=each.local + index - 1)
            for each in self.spec.ports
        )

    def _check_ports(self) -> None:
        given = sorted(each.local for each in self.spec.ports if each.local is not None)
        for at, then in pairwise([*given, 65536]):
            if at + self.count > then:
                reason = f"{self.count} members would take {at} to {at + self.count - 1} of this host, and reach {then}"
                raise InvalidSpec(f"ports: {reason}; give another, or none and each has one chosen", field="ports")

    def _env(self, fleet: str, index: int) -> dict[str, str]:
        values = (fleet, self.name, str(index), str(self.count), ",".join(self._members))
        return self.spec.env | dict(zip(VARIABLES, values, strict=True))

    @cached_property
    def _members(self) -> tuple[str, ...]:
        return tuple(self.member_name(index) for index in self.indexes())

    def version(self) -> str:
        """Version that two phases share if their members are alike, however many there are and whenever they start."""
        return self._version

    @cached_property
    def _version(self) -> str:
        env = {name: value for name, value in self.spec.env.items() if name not in self.inherited}
        spec = msgspec.structs.replace(self.spec, env=env, name=None)
        made_from = (spec, sorted(self.inherited), self.setup, self.files, self.healthcheck)
        return hashlib.sha256(msgspec.json.encode(made_from, order="deterministic")).hexdigest()[:16]


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole fleet. Every phase's spec is of the fleet's project, which other fleets may be of as well."""

    name: str
    phases: tuple[Phase, ...]
    """In the order of the file."""
    project: str = ""
    """The fleet's name, unless another is given."""
    timeout_s: float | None = None
    """For all of `up`."""
    max_parallel: int = MAX_PARALLEL
    """How many members of all phases may be in the making at once."""
    max_per_phase: int = MAX_PER_PHASE

    def __post_init__(self) -> None:
        project = self.project or self.name
        _check_name("name", self.name, 63)
        _check_name("project", project, 63)
        _check_timeout(self.timeout_s)
        _check_number("max_parallel", self.max_parallel)
        _check_number("max_per_phase", self.max_per_phase)
        if len(self.phases) > _MAX_PHASES:
            raise InvalidSpec(f"phases: {len(self.phases)} phases; at most {_MAX_PHASES}", field="phases")
        if found := list(faults(self.phases, self.max_per_phase)):
            raise InvalidFleet(Problem(0, 0, f"phase {fault.phase!r}: {fault.message}") for fault in found)
        msgspec.structs.force_setattr(self, "project", project)
        replace = msgspec.structs.replace
        phases = tuple(replace(phase, spec=replace(phase.spec, project=project)) for phase in self.phases)
        msgspec.structs.force_setattr(self, "phases", phases)

    def phase(self, name: str) -> Phase:
        known = {phase.name: phase for phase in self.phases}
        if name not in known:
            raise NotFound(f"fleet {self.name!r} has no phase {name!r}{suggestion(name, known)}")
        return known[name]

    def scaled(self, counts: Mapping[str, int]) -> FleetSpec:
        """The fleet with other counts for some phases."""
        for name in counts:
            self.phase(name)
        phases = (msgspec.structs.replace(each, count=counts.get(each.name, each.count)) for each in self.phases)
        return msgspec.structs.replace(self, phases=tuple(phases))


class Fault(NamedTuple):
    """Mistake between phases that are right each for itself; `item` is the entry of the field that is meant."""

    position: int
    phase: str
    field: str
    item: int | None
    message: str


def faults(phases: Iterable[Phase], max_per_phase: int) -> Iterator[Fault]:
    """Names taken twice, counts over the bound, dependencies that are not there, on oneself, or in a circle; members to
    be reached that there are not."""
    phases = tuple(phases)
    known = [phase.name for phase in phases]
    for at, phase in enumerate(phases):
        if phase.name in known[:at]:
            yield Fault(at, phase.name, "name", None, "there is a phase of this name already")
        if phase.count > max_per_phase:
            text = f"count {phase.count} is more than max_per_phase, which is {max_per_phase}"
            yield Fault(at, phase.name, "count", None, text)
        yield from _wrong_waits(at, phase, known)
        yield from _wrong_reach(at, phase, phases)
    yield from _circles(phases)


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, if there is something close; else a list of all."""
    known = [each for each in known if each != wrong]
    if close := difflib.get_close_matches(wrong, known, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}" if known else ""


def _wrong_waits(at: int, phase: Phase, known: list[str]) -> Iterator[Fault]:
    for item, name in enumerate(phase.wait_for):
        if name == phase.name:
            yield Fault(at, phase.name, "wait_for", item, "wait_for names the phase itself, so it would never start")
        elif name not in known:
            close = suggestion(name, [each for each in known if each != phase.name])
            text = f"wait_for names {name!r}, and there is no such phase{close}"
            yield Fault(at, phase.name, "wait_for", item, text)
        elif name in phase.wait_for[:item]:
            yield Fault(at, phase.name, "wait_for", item, f"wait_for names {name!r} twice")


def _wrong_reach(at: int, phase: Phase, phases: tuple[Phase, ...]) -> Iterator[Fault]:
    if not phase.spec.reach:
        return
    from skerry.model.rules import Reach  # most fleets have no rules, and are read without them

    known = [each.name for each in phases]
    for item, text in enumerate(phase.spec.reach):
        member = Reach.parse(text).member
        if member not in known and not any(member in each.members() for each in phases):
            told = f"reach names {member!r}, and there is no such phase or member{suggestion(member, known)}"
            yield Fault(at, phase.name, "reach", item, told)


def _circles(phases: tuple[Phase, ...]) -> Iterator[Fault]:
    known = {phases[at].name: at for at in reversed(range(len(phases)))}  # of two of one name the first
    waits = {name: set(phases[known[name]].wait_for) & known.keys() - {name} for name in reversed(known)}
    for circle in islice(cycles(waits), _MAX_CIRCLES):
        at = known[circle[0]]
        item = phases[at].wait_for.index(circle[1])
        text = f"wait_for goes in a circle, so none of them would start: {' -> '.join(circle)}"
        yield Fault(at, circle[0], "wait_for", item, text)


def cycles(waits: Waits) -> Iterator[tuple[str, ...]]:
    """Circles, each as `a, b, ..., a` where a waits for b; when one edge of each is cut there is none left."""
    left = {name: set(others) for name, others in waits.items()}
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
        except graphlib.CycleError as error:
            ring = list(reversed(error.args[1]))[:-1]
            start = ring.index(next(name for name in waits if name in ring))  # the one that stands first in the file
            circle = (*ring[start:], *ring[:start], ring[start])
            yield circle
            left[circle[0]].discard(circle[1])
        else:
            return


def _check_timeout(value: float | None) -> None:
    if value is not None:
        _check_seconds(value, "timeout", "timeout", least=0.001)


def _check_seconds(value: float, what: str, field: str, *, least: float) -> None:
    if not (math.isfinite(value) and least <= value <= _LONGEST_S):
        told = what if what == field else f"{field}: {what}"
        raise InvalidSpec(f"{told}: {value:g} s is out of range; {least:g} s to {_LONGEST_S:.0f} s", field=field)


def _check_number(field: str, value: int | None, least: int = 1) -> None:
    if value is not None and not least <= value <= _MOST_PER_PHASE:
        raise InvalidSpec(f"{field}: {value} is out of range; {least} to {_MOST_PER_PHASE}", field=field)


def _check_name(field: str, value: str, longest: int) -> None:
    if len(value) > longest or not _NAME.fullmatch(value):
        rule = f"lower-case letters, digits, '.', '_' or '-', at most {longest}"
        raise InvalidSpec(f"{field}: {value!r} must be {rule}", field=field)


def _check_command(command: Command, field: str) -> None:
    words = (command,) if isinstance(command, str) else command
    if not words or not words[0].strip() or any("\0" in word for word in words):
        raise InvalidSpec(f"{field}: {command!r} is not a command", field=field)
