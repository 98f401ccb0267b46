"""A model of programs that share a registry and a host, with a crash or a failure at any call they make.

The suite runs a small profile; `pytest tests/manager/test_model.py --hypothesis-profile soak --timeout 0` a large one.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from skerry.clock import Moment
from skerry.errors import ProviderError, SkerryError
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Owner
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.providers.base import BoxState
from skerry.providers.mock import Host, Mock
from skerry.store import Store

from .fuse import Crash, Fuse, Strike, fused_provider, fused_store
from .world import ENDED, config_of

LIMIT = 6
SUITE_EXAMPLES = 300
STUCK_S = 3.0
LATE_S = 0.004
"""Long enough for others to do something meanwhile."""
HELD = {BoxState.RUNNING: State.READY, BoxState.PAUSED: State.PAUSED, BoxState.STOPPED: State.STOPPED}

strikes = st.none() | st.builds(Strike, st.integers(0, 8), st.booleans(), st.sampled_from([True, True, False]))
programs = st.integers(0, 1)
picks = st.integers(0, 9)
kinds = st.fixed_dictionaries(
    {},
    optional={
        "ephemeral": st.just(True),
        "name": st.just("n"),
        "key": st.just("k"),
        "lifetime": st.just(50),
        "labels": st.just({"boots": "slowly"}),
    },
)
acting: ContextVar[Owner] = ContextVar("acting")
"""Which program it is that does something right now."""
Operation = Callable[["Model", "Program", int, dict[str, Any]], Awaitable[None]]


class Program:
    """A process that uses a manager; it may die at any call."""

    def __init__(self, model: Model, number: int) -> None:
        self.owner = Owner("host/boot", number, number)
        self.fuse = Fuse(on_death=lambda: model.alive.discard(self.owner))
        model.alive.add(self.owner)
        self.manager = AsyncSandboxManager(
            model.config,
            store=fused_store(model.store, self.fuse),
            providers={"mock": fused_provider(model.mock, self.fuse)},
        )


class Model(RuleBasedStateMachine):
    """`want` says for each sandbox that a create has returned: live, gone, or (after a cut) either."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.config = config_of(Path(self.folder.name), max_sandboxes=LIMIT)
        self.runner = asyncio.Runner()
        self.patch = pytest.MonkeyPatch()
        self.alive: set[Owner] = set()
        self.numbers = itertools.count(1)
        self.ahead = 0.0
        self.boot = 1
        self.answers = True
        self.answers_late = False
        self.want: dict[SandboxId, str] = {}
        self.ephemeral: dict[SandboxId, Owner] = {}
        self.ends_at: dict[SandboxId, float] = {}
        self.broken: set[SandboxId] = set()
        self.returned: set[SandboxId] = set()
        self.remade: set[SandboxId] = set()

    @initialize()
    def begin(self) -> None:
        self.patch.setattr(identity, "is_alive", lambda owner: owner in self.alive)
        self.patch.setattr(identity, "this_process", acting.get)
        self.patch.setattr("skerry.manager.repair._FIRST_CALL_S", 3600.0)  # what waits for real time is never the same
        self.patch.setattr("skerry.sandbox.connection._LOOK_S", 0.05)
        self.patch.setattr("skerry.manager.destroy.GRACE_S", 0.05)
        self.patch.setattr("skerry.manager.verbs._STOP_S", 0.05)
        self.mock = Mock(host=Host())
        self.mock.discover = self._discover  # type: ignore[method-assign]
        self.mock.create = self._create  # type: ignore[method-assign]
        self.run(self._open())

    async def _discover(self) -> Any:
        if not self.answers:
            raise ProviderError("the provider is down")
        boxes = await Mock.discover(self.mock)
        if self.answers_late:
            await asyncio.sleep(LATE_S)
        return boxes

    async def _create(self, id: SandboxId, spec: Spec) -> None:
        if spec.labels.get("boots"):
            await asyncio.sleep(LATE_S)
        await Mock.create(self.mock, id, spec)
        if spec.labels.get("boots"):
            await asyncio.sleep(LATE_S)

    async def _open(self) -> None:
        self.store = await Store.open(self.config.database, now=self.moment)
        self.programs = [await self._new_program(), await self._new_program()]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def now(self) -> float:
        return time.time() + self.ahead

    def moment(self) -> Moment:
        return Moment("host", f"boot {self.boot}", self.now())

    async def _new_program(self) -> Program:
        program = Program(self, next(self.numbers))
        acting.set(program.owner)
        await program.manager.__aenter__()
        return program

    # what a program does

    async def create(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if "key" in options:
            # the same key always means the same spec; and who asks by it waits for a provider that is away
            options = {"key": options["key"]} if self.answers else {}
        sandbox = await program.manager.create(**options)
        self.want.setdefault(sandbox.id, "live")
        self.returned.add(sandbox.id)
        if options.get("ephemeral"):
            self.ephemeral[sandbox.id] = program.owner
        if options.get("lifetime"):
            self.ends_at[sandbox.id] = self.now() + 50

    async def destroy(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if records := await self.store.list():  # also what another is making
            id = records[pick % len(records)].id
            self.want.setdefault(id, "either")
            self._unsure(id)
            await program.manager.destroy(id)
            self.want[id] = "gone"

    async def destroy_all(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        for id in self.want:
            self._unsure(id)
        try:
            for outcome in await program.manager.destroy_all():
                self.want[outcome.id] = "either" if outcome.error else "gone"
        finally:
            for id in self.want:
                self._unsure(id)

    async def keep_destroying(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        for _ in range(4):
            await self.destroy_all(program, pick, options)
            await asyncio.sleep(LATE_S / 8)

    async def pause(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if (id := self._pick(pick)) is not None:
            await program.manager.pause(id)

    async def stop(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if (id := self._pick(pick)) is not None:
            await program.manager.stop(id)

    async def go_on(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if (id := self._pick(pick)) is not None:
            paused = (await program.manager.record(id)).state is State.PAUSED
            await (program.manager.resume(id) if paused else program.manager.start(id))

    async def restore(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if (id := self._pick(pick)) is not None:
            self.remade.add(id)
            self._unsure(id)  # one that was begun and came to no end is lost
            if f"of-{id}" not in self.mock.host.snapshots:
                await program.manager.snapshot(id, f"of-{id}")
            await program.manager.restore(id, f"of-{id}")

    async def fork(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        if (id := self._pick(pick)) is not None:
            sandbox = await program.manager.fork(id)
            self.want.setdefault(sandbox.id, "live")
            self.returned.add(sandbox.id)
            if sandbox.spec.lifetime_s:
                self.ends_at[sandbox.id] = self.now() + 50

    async def use(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        box = self.mock.host.boxes.get(id) if (id := self._pick(pick)) is not None else None
        if box is not None and box.state is BoxState.RUNNING:
            await program.manager.execute(box.id, ["echo", "x"])

    async def reconcile(self, program: Program, pick: int, options: dict[str, Any]) -> None:
        await program.manager.reconcile()

    def _pick(self, pick: int) -> SandboxId | None:
        known = [id for id, want in self.want.items() if want != "gone"]
        return known[pick % len(known)] if known else None

    def _unsure(self, id: SandboxId) -> None:
        if self.want[id] != "gone":
            self.want[id] = "either"

    changes = st.sampled_from(
        [create, create, create, destroy, destroy_all, pause, stop, go_on, reconcile, restore, fork]
    )

    @rule(who=programs, what=st.just(use) | changes, pick=picks, options=kinds, strike=strikes)
    def one_acts(self, who: int, what: Operation, pick: int, options: dict[str, Any], strike: Strike | None) -> None:
        self.run(self._attempt([(who, what, pick, options)], [(who, strike)]))

    @rule(
        deeds=st.lists(st.tuples(programs, changes, picks, kinds), min_size=2, max_size=4),
        first=strikes,
        second=strikes,
        late=st.booleans(),
    )
    def several_act_at_once(
        self,
        deeds: list[tuple[int, Operation, int, dict[str, Any]]],
        first: Strike | None,
        second: Strike | None,
        late: bool,
    ) -> None:
        self.answers_late = late
        self.run(self._attempt(deeds, [(0, first), (1, second)]))
        self.answers_late = False

    @rule(strike=strikes)
    def one_is_destroyed_while_it_is_made(self, strike: Strike | None) -> None:
        slow = (0, Model.create, 0, {"labels": {"boots": "slowly"}})
        self.run(self._attempt([slow, (1, Model.keep_destroying, 0, {})], [(0, strike)]))

    async def _attempt(
        self, deeds: list[tuple[int, Operation, int, dict[str, Any]]], strikes: list[tuple[int, Strike | None]]
    ) -> None:
        async def act(who: int, what: Operation, pick: int, options: dict[str, Any]) -> None:
            acting.set(self.programs[who].owner)
            await what(self, self.programs[who], pick, options)

        for who, strike in strikes:
            self.programs[who].fuse.arm(strike)
        async with asyncio.timeout(STUCK_S):
            results = await asyncio.gather(
                *(act(*deed) for deed in deeds),
                return_exceptions=True,
            )
        for result in results:
            if result is not None and not isinstance(result, SkerryError | Crash):
                raise result
        for who, program in enumerate(self.programs):
            program.fuse.arm(None)
            if program.fuse.is_dead:
                self._bury(program)
                self.programs[who] = await self._new_program()

    def _bury(self, program: Program) -> None:
        program.fuse.is_dead = True
        self.alive.discard(program.owner)
        for id, owner in self.ephemeral.items():
            if owner == program.owner:
                self.want[id] = "gone"

    # what befalls the host

    @rule(pick=picks, how=st.sampled_from(["dead_box", "lost_box"]))
    def a_box_breaks(self, pick: int, how: str) -> None:
        ids = list(self.mock.host.boxes)
        if ids:
            id = ids[pick % len(ids)]
            self.run(self._break(id, how))

    async def _break(self, id: SandboxId, how: str) -> None:
        getattr(self.mock.faults, how)(id)
        self.want[id] = "gone"
        self.broken.add(id)

    @rule(pick=picks, verb=st.sampled_from(["pause", "resume", "stop", "start"]))
    def somebody_acts_by_hand(self, pick: int, verb: str) -> None:
        ids = [id for id, box in self.mock.host.boxes.items() if box.state is not BoxState.DEAD]
        if ids:
            self.run(self._by_hand(ids[pick % len(ids)], verb))

    async def _by_hand(self, id: SandboxId, verb: str) -> None:
        try:
            await getattr(self.mock, verb)(id)
        except SkerryError:
            return

    @rule()
    def the_host_restarts(self) -> None:
        self.run(self._restart())

    async def _restart(self) -> None:
        self.boot += 1
        for id in list(self.mock.host.boxes):
            await self._break(id, "dead_box")
        await self._all_die()

    @rule(seconds=st.sampled_from([10, 60]))
    def time_passes(self, seconds: float) -> None:
        self.ahead += seconds
        self.run(self.mock.pass_time(seconds))
        for id, end in self.ends_at.items():
            if self.want[id] != "gone" and end <= self.now() + 1:
                self.want[id] = "either"  # a box that is paused or stopped does not end by itself

    @rule()
    def the_provider_goes_away(self) -> None:
        self.answers = False

    @rule()
    def the_provider_comes_back(self) -> None:
        self.answers = True

    @rule()
    def nothing_is_done_while_the_provider_is_away(self) -> None:
        self.answers = False
        before = self.run(self.store.list(ENDED))
        assert self.run(self.programs[0].manager.reconcile()) == []
        assert self.run(self.store.list(ENDED)) == before

    # what must hold

    @invariant()
    def ids_names_keys_and_limits_hold(self) -> None:
        if not hasattr(self, "programs"):
            return
        records = self.run(self.store.list(ENDED))
        live = [record for record in records if record.is_live]
        assert len({record.id for record in records}) == len(records)
        assert len(live) <= LIMIT
        for taken in ([r.name for r in live if r.name], [r.key for r in live if r.key]):
            assert len(taken) == len(set(taken))
        for record in records:
            assert record.cause is not None or record.state not in (State.DESTROYED, State.LOST), record

    @invariant()
    def causes_are_true(self) -> None:
        if not hasattr(self, "programs"):
            return
        for record in self.run(self.store.list(ENDED)):
            by_itself = record.cause in (Cause.BOX_DIED, Cause.HOST_RESTARTED) or record.state is State.LOST
            assert not by_itself or record.id in self.broken | self.remade, f"nothing befell it: {record}"
            if record.cause is Cause.CREATION_FAILED and record.id not in self.remade:
                assert record.id not in self.returned, f"it was made: {record}"
            if record.cause is Cause.OWNER_DIED:
                assert record.ephemeral
                assert record.owner not in self.alive
            if record.cause is Cause.LIFETIME:
                assert record.spec.lifetime_s
            if record.cause is Cause.USER:
                assert self.want.get(record.id) != "live", f"nobody asked for its end: {record}"

    @rule()
    def all_die_and_the_next_one_reconciles(self) -> None:
        self.run(self._settle())

    def teardown(self) -> None:
        try:
            if hasattr(self, "programs"):
                self.run(self._settle())
        finally:
            if hasattr(self, "store"):
                self.run(self.store.aclose())
            self.runner.close()
            self.patch.undo()
            self.folder.cleanup()

    async def _all_die(self) -> None:
        for program in self.programs:
            self._bury(program)
        self.programs = [await self._new_program(), await self._new_program()]

    async def _settle(self) -> None:
        self.answers = True
        await self._all_die()
        manager = self.programs[0].manager
        acting.set(self.programs[0].owner)
        await manager.reconcile()
        assert await manager.reconcile() == [], "nothing is left to do"
        records = {record.id: record for record in await self.store.list(ENDED)}
        boxes = self.mock.host.boxes
        held = {id: record.state for id, record in records.items() if record.state in HELD.values()}
        assert held == {id: HELD[box.state] for id, box in boxes.items()}, "the registry is what the host holds"
        for record in records.values():
            assert record.state in (State.LOST, State.DESTROYED) or record.id in held, record
            assert not record.doomed or record.state is State.DESTROYED, record
        for name in self.mock.host.snapshots:
            fork = SandboxId(name.removeprefix("tmp-"))
            is_needed = fork in records and records[fork].is_live  # also of one that is lost: it may be made anew
            assert fork == name or is_needed, f"left by a fork: {name}"
        for id, want in self.want.items():
            if want != "either":
                assert (id in boxes) is (want == "live"), f"{id} should be {want}: {records[id]}"
        for id, state in held.items():
            if state is State.READY:
                await manager.execute(id, ["echo", "still here"])


Model.TestCase.settings = settings(
    max_examples=max(SUITE_EXAMPLES, settings().max_examples),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
test_no_crash_loses_leaks_or_doubles_a_sandbox = pytest.mark.timeout(0)(Model.TestCase)
