"""Random sequences of operations, held against a plain model, on every database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from skerry.errors import Conflict, LimitReached, WrongState
from skerry.model.records import Filter, Owner, Record
from skerry.model.spec import Spec, new_id
from skerry.model.states import TRANSITIONS, State
from skerry.store import Store

T = TypeVar("T")
OWNER = Owner("host", 1, 1)
NAMES = st.sampled_from([None, "x", "y"])
LIMIT = 4


class Model(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.runner = asyncio.Runner()
        self.store = self.run(Store.open(url))
        self.records: list[Record] = []
        self.asked: dict[str, Spec] = {}
        self.booting: set[str] = set()
        self.events: list[tuple[str, str]] = []
        self.forgotten = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def live(self) -> list[Record]:
        return [record for record in self.records if record.is_live]

    @rule(name=NAMES, key=NAMES, project=st.sampled_from(["p", "q"]))
    def reserve(self, name: str | None, key: str | None, project: str) -> None:
        spec, id = Spec(name=name, project=project), new_id()
        rivals = [record for record in self.live() if record.spec.project == project]
        same_key = [record for record in rivals if key is not None and record.key == key]
        call = self.store.reserve(id, spec, owner=OWNER, boot_id="", key=key, max_sandboxes=LIMIT)
        if same_key and self.asked[same_key[0].id] == spec:
            assert self.run(call) == (same_key[0], False)
        elif same_key or any(name is not None and record.name == name for record in rivals):
            with pytest.raises(Conflict):
                self.run(call)
        elif len(self.live()) >= LIMIT:
            with pytest.raises(LimitReached):
                self.run(call)
        else:
            record, is_new = self.run(call)
            assert (is_new, record.id, record.spec) == (True, id, spec)
            self.asked[id] = spec
            self.records.append(record)
            self.events.append((id, "created"))

    @precondition(lambda self: self.records)
    @rule(at=st.integers(0, 99), to=st.sampled_from(State), stale=st.booleans())
    def move(self, at: int, to: State, stale: bool) -> None:
        record = self.records[at % len(self.records)]
        given = msgspec.structs.replace(record, version=record.version - 1) if stale else record
        allowed = to is record.state or to in TRANSITIONS[record.state]
        if stale or not allowed:
            with pytest.raises(Conflict if stale else WrongState):
                self.run(self.store.change(given, to=to))
        else:
            self.remember(record, self.run(self.store.change(given, to=to)), to.value)
            if to is not State.CREATING:
                self.booting.discard(record.id)

    @precondition(lambda self: self.live())
    @rule(at=st.integers(0, 99), name=NAMES)
    def rename(self, at: int, name: str | None) -> None:
        record = self.live()[at % len(self.live())]
        spec = msgspec.structs.replace(record.spec, name=name)
        rivals = [r for r in self.live() if r.id != record.id and r.spec.project == spec.project]
        call = self.store.change(record, spec=spec, kind="renamed")
        if name is not None and any(rival.name == name for rival in rivals):
            with pytest.raises(Conflict):
                self.run(call)
        else:
            self.remember(record, self.run(call), "renamed")

    @precondition(lambda self: any(record.state is State.CREATING for record in self.records))
    @rule(at=st.integers(0, 99))
    def boot(self, at: int) -> None:
        creating = [record for record in self.records if record.state is State.CREATING]
        id = creating[at % len(creating)].id
        has_slot = self.run(self.store.boot_slot(id, max_boots=2, owner_alive=lambda owner: True))
        assert has_slot == (len(self.booting - {id}) < 2)
        if has_slot:
            self.booting.add(id)

    @rule()
    def prune(self) -> None:
        ended = [record for record in self.records if not record.is_live]
        assert self.run(self.store.prune(before=time.time() + 1)) == len(ended)
        self.records = self.live()
        self.forgotten = len(self.events)

    @rule()
    def reopen(self) -> None:
        self.run(self.store.aclose())
        self.store = self.run(Store.open(self.url))

    @invariant()
    def the_store_knows_what_the_model_knows(self) -> None:
        assert self.run(self.store.list(Filter(include_ended=True))) == self.records
        assert self.run(self.store.list()) == self.live()
        events = self.run(self.store.events())
        assert [(event.sandbox, event.kind) for event in events] == self.events[self.forgotten :]
        assert [event.seq for event in events] == list(range(self.forgotten + 1, len(self.events) + 1))
        assert self.run(self.store.last_event()) == len(self.events)

    def remember(self, old: Record, new: Record, kind: str) -> None:
        assert new.version == old.version + 1
        self.records[self.records.index(old)] = new
        self.events.append((new.id, kind))

    def teardown(self) -> None:
        self.run(self.store.aclose())
        self.runner.close()


def test_random_operations_agree_with_the_model(new_url: Callable[[], str]) -> None:
    class OnThisDatabase(Model):
        def __init__(self) -> None:
            super().__init__(new_url())

    run_state_machine_as_test(
        OnThisDatabase,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
