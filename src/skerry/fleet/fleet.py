"""A fleet: many sandboxes in phases, started, seen, commanded and ended as one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self, Unpack

from skerry import config
from skerry.aio import run_to_end
from skerry.errors import AgentUnreachable, CallInterrupted, CallTimeout, NotFound, ProviderError, WrongState
from skerry.fleet.broadcast import MemberOutcome, OnOutput, broadcast, choose, run
from skerry.fleet.events import MemberDestroyed, Notifier, OnEvent, Report
from skerry.fleet.load import load
from skerry.fleet.members import Members, destroy_many, is_in_work
from skerry.fleet.model import ALL, PHASE_LABEL, FleetSpec, OnFailure, Phase, suggestion
from skerry.fleet.plan import Plan, diff, ends
from skerry.fleet.status import UNREACHABLE, MemberStatus, Roster, StatusReader, by_phase, is_ready
from skerry.fleet.up import Start
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Record
from skerry.model.results import ExecResult
from skerry.model.spec import SandboxId
from skerry.sandbox.processes import ExecOptions
from skerry.sandbox.sandbox import AsyncSandbox

_ROUNDS = 20  # how often those are looked for that another program made while we destroyed the others


def load_fleet(path: Path | str, text: str | None = None) -> FleetSpec:
    """Load the fleet of a file, or of a text as if it were in that file; the configuration's provider is the default.
    Raises InvalidFleet."""
    settings = config.load()
    return load(path, text, provider=settings.provider, sets=settings.network.sets)


class AsyncFleet:
    """Many sandboxes under one name, in phases that wait for each other.

        fleet = AsyncFleet(manager, load_fleet("fleet.yaml"))
        report = await fleet.up()
        outcomes = await fleet.exec("workers", ["make", "test"])
        gone = await fleet.down()

    The registry is the only memory: any program that knows the name of a fleet can see, command and end it, and one
    that has its file can change it. Nothing ends with this object.
    """

    def __new__(cls, manager: AsyncSandboxManager, *_: object) -> Self:
        """One of a server has another class, which its manager knows."""
        return object.__new__(manager.fleet_type or cls)

    def __init__(self, manager: AsyncSandboxManager, spec: FleetSpec) -> None:
        self._bind(manager, spec.name, spec.project, spec)

    @classmethod
    async def open(cls, manager: AsyncSandboxManager, name: str, project: str | None = None) -> Self:
        """A fleet by its name alone: it can be seen, commanded and ended; to start some of it takes its file."""
        self = cls.__new__(cls, manager)
        self._bind(manager, name, project, None)
        await self._roster.records()
        return self

    def _bind(self, manager: AsyncSandboxManager, name: str, project: str | None, spec: FleetSpec | None) -> None:
        self.name = name
        self.spec = spec
        self._manager = manager
        self._roster = Roster(manager, name, project)
        self._status = StatusReader(manager)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._starts: set[Start] = set()

    async def records(self) -> Mapping[str, Record]:
        """Records of its live members, by their names."""
        return await self._roster.records()

    # starting

    async def plan(self) -> Plan:
        """What `up` would do, by what the registry knows now."""
        return diff(self._spec(), await self._roster.members())

    async def up(self, *, on_event: OnEvent | None = None) -> Report:
        """Make the fleet what its spec says: start what is missing in the order of dependencies, replace what changed
        or does not answer, remove what is gone. What is as it should be is not touched, so it can be asked again at any
        time, also after a crash in the middle."""
        spec = self._spec()
        return await self._start(spec, spec.phases, on_event, is_whole=True)

    async def start_all_phases(self, *, on_event: OnEvent | None = None) -> Report:
        """The same as `up`."""
        return await self.up(on_event=on_event)

    async def start_phase(self, phase: str, *, on_event: OnEvent | None = None) -> Report:
        """Start one phase. Raises WrongState if a phase that it waits for is not ready."""
        spec = self._spec()
        await self._refuse_unready(spec, spec.phase(phase), set())
        return await self._start(spec, [spec.phase(phase)], on_event)

    async def scale(
        self, phases: Mapping[str, int] | None = None, /, *, on_event: OnEvent | None = None, **counts: int
    ) -> Report:
        """Have so many members in these phases: the missing are made, those with the highest indexes go. `phases` is
        for names that are no words of Python."""
        counts = {**(phases or {}), **counts}
        spec = self._spec().scaled(counts)
        scaled = [phase for phase in spec.phases if phase.name in counts]
        for phase in scaled:
            await self._refuse_unready(spec, phase, set(counts))
        self.spec = spec
        return await self._start(spec, scaled, on_event)

    async def _start(
        self, spec: FleetSpec, phases: Sequence[Phase], on_event: OnEvent | None, *, is_whole: bool = False
    ) -> Report:
        start = Start(Members(self._manager, spec), phases, self._roster, self._locks, Notifier(self.name, on_event))
        self._starts.add(start)
        try:
            return await start.run(is_whole=is_whole)
        finally:
            self._starts.discard(start)

    async def _refuse_unready(self, spec: FleetSpec, phase: Phase, started: set[str]) -> None:
        records = await self._roster.records()
        for needed in (spec.phase(name) for name in phase.wait_for if name not in started):
            ready = sum(map(is_ready, by_phase(records, needed.name)))
            least = min(needed.count, 1) if needed.on_failure is OnFailure.CONTINUE else needed.count
            if ready < least:
                how = f"{ready} of its {needed.count} members are ready"
                raise WrongState(f"phase {phase.name!r} waits for {needed.name!r}, and {how}: start that first")

    def _spec(self) -> FleetSpec:
        if self.spec is None:
            raise WrongState(f"fleet {self.name!r} was opened by its name: to change it, its file is needed")
        return self.spec

    # seeing

    async def status(self, *, timeout_s: float = 2.0) -> dict[str, MemberStatus]:
        """How each member is, by name. Every agent is asked at once; one that does not answer within `timeout_s` is
        told as unreachable, and holds up nobody else. Changes nothing."""
        return await self._status.read((await self._roster.records()).values(), timeout_s)

    async def get_container_status(self, name: str, *, timeout_s: float = 2.0) -> MemberStatus:
        """How one member is. Raises NotFound if there is none of that name."""
        return (await self._status.read([await self._record(name)], timeout_s))[name]

    async def member(self, name: str) -> AsyncSandbox:
        """A member as a sandbox. Raises NotFound."""
        return self._manager.handles.of(await self._record(name))

    async def _record(self, name: str) -> Record:
        records = await self._roster.records()
        if name not in records:
            raise NotFound(f"fleet {self.name!r} has no member {name!r}{suggestion(name, records)}")
        return records[name]

    # commanding

    async def exec(
        self,
        target: str,
        command: Sequence[str] | str,
        *,
        at_once: int = 128,
        on_output: OnOutput | None = None,
        **options: Unpack[ExecOptions],
    ) -> dict[str, MemberOutcome]:
        """Run a command in `all`, a member, a phase, or those with a label (`key=value`): in parallel, best effort, one
        outcome by the name of each. `on_output` is told member, descriptor and bytes as they come."""
        phases = () if self.spec is None else (phase.name for phase in self.spec.phases)
        chosen = choose(await self._roster.records(), target, phases, self.name)
        return await broadcast(self._manager, chosen, command, options, at_once=at_once, on_output=on_output)

    async def exec_on_agent(
        self, name: str, command: Sequence[str] | str, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command in one member. Raises NotFound, or AgentUnreachable if nothing answers."""
        try:
            return await run(self._manager, await self._record(name), command, options)
        except (AgentUnreachable, CallInterrupted, CallTimeout) as error:
            raise AgentUnreachable(f"{name}: {UNREACHABLE}: {error}") from error

    async def exec_on_all(
        self, command: Sequence[str] | str, **options: Unpack[ExecOptions]
    ) -> dict[str, MemberOutcome]:
        """Run a command in every member."""
        return await self.exec(ALL, command, **options)

    async def exec_on_phase(
        self, phase: str, command: Sequence[str] | str, **options: Unpack[ExecOptions]
    ) -> dict[str, MemberOutcome]:
        """Run a command in every member of a phase."""
        return await self.exec(phase, command, **options)

    # ending

    async def down(
        self, *, volumes: bool = False, grace_s: float | None = None, on_event: OnEvent | None = None
    ) -> Sequence[str]:
        """End every member, also those in the making; a start that runs is given up first. The names of those that were
        there. Quiet if there are none; if some could not be destroyed, all others are, and it raises.

        Phases end in the reverse order of their start; without the file that is told by when they began. Processes get
        SIGTERM and `grace_s` to end, 2 s if nothing is said; then, or at once if that is 0, they are killed."""
        return await self._end(None, volumes, grace_s, on_event)

    async def stop_all(
        self, *, volumes: bool = False, grace_s: float | None = None, on_event: OnEvent | None = None
    ) -> Sequence[str]:
        """The same as `down`."""
        return await self._end(None, volumes, grace_s, on_event)

    async def stop_phase(
        self, phase: str, *, volumes: bool = False, grace_s: float | None = None, on_event: OnEvent | None = None
    ) -> Sequence[str]:
        """End every member of a phase, as `down` does for all. Phases that wait for it stay as they are."""
        if not by_phase(await self._roster.records(), phase) and self.spec is not None:
            self.spec.phase(phase)
        return await self._end({phase}, volumes, grace_s, on_event)

    async def _end(
        self, phases: set[str] | None, volumes: bool, grace_s: float | None, on_event: OnEvent | None
    ) -> Sequence[str]:
        for start in self._starts:
            start.stop(phases)
        ended = phases
        if ended is None:
            ended = {record.spec.labels[PHASE_LABEL] for record in (await self._roster.records()).values()}
            ended |= {phase.name for phase in (self.spec.phases if self.spec is not None else ())}
        async with AsyncExitStack() as stack:
            for name in sorted(ended):
                await stack.enter_async_context(self._locks[name])
            return await self._destroy_all(phases, volumes, grace_s, Notifier(self.name, on_event))

    async def _destroy_all(
        self, phases: set[str] | None, volumes: bool, grace_s: float | None, notifier: Notifier
    ) -> Sequence[str]:
        gone: dict[str, None] = {}
        for _ in range(_ROUNDS):
            records = await self._roster.records()
            left = {n: r for n, r in records.items() if phases is None or r.spec.labels[PHASE_LABEL] in phases}
            if not left:
                return list(gone)
            failed: dict[str, str] = {}
            for wave in ends(self.spec, _began(left.values())):
                members = {name: record for name, record in left.items() if record.spec.labels[PHASE_LABEL] in wave}
                failed |= await run_to_end(self._destroy(members, volumes, grace_s))
                for name, record in members.items():
                    if name not in failed:
                        gone[name] = None
                        phase = record.spec.labels[PHASE_LABEL]
                        notifier.notify(MemberDestroyed(phase=phase, member=name, why="it was stopped"))
            if failed:
                name, why = next(iter(failed.items()))
                rest = f"{len(failed)} of {len(failed) + len(gone)} members could not be destroyed; ask again"
                raise ProviderError(f"{rest}. {name}: {why}")
        raise WrongState(f"fleet {self.name!r} is started all the time by others; end them, and ask again")

    async def _destroy(self, members: Mapping[str, Record], volumes: bool, grace_s: float | None) -> dict[str, str]:
        """Ask the processes of all members to end at one moment, then remove the members; why some could not be. Who
        still makes a member is not to take the end of its processes for a failure: of such a one they are not asked."""

        async def destroy(id: SandboxId) -> None:
            await self._manager.destroy(id, volumes=volumes, grace_s=0)

        handles = self._manager.handles
        whole = [record for record in members.values() if not is_in_work(record, self._manager.store.now())]
        await asyncio.gather(*(handles.terminate(record, grace_s) for record in whole))
        return await destroy_many({name: record.id for name, record in members.items()}, destroy)


def _began(records: Iterable[Record]) -> dict[str, float]:
    """When each phase had the first of these members."""
    began: dict[str, float] = {}
    for record in records:
        phase = record.spec.labels[PHASE_LABEL]
        began[phase] = min(record.created_at, began.get(phase, record.created_at))
    return began
