"""`decide`: every combination of registry and host that matters, and what holds for all of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.clock import End, Moment
from skerry.manager.decide import FOLLOWED, INSTANCE_LABEL, Action, Now, Verdict, cause_of_end, decide, leftovers
from skerry.model.records import Cause, Owner, Record
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import TRANSITIONS, State
from skerry.providers.base import BoxState, BoxStatus, Snapshot

ALIVE, DEAD, FAR = Owner("here", 1, 1), Owner("here", 2, 2), Owner("elsewhere", 3, 3)
HERE = Moment("here", "this boot", 10_000.0)
NOW = Now(
    moment=HERE,
    instance="ours",
    is_alive=lambda owner: {ALIVE: True, DEAD: False}.get(owner),
)
BOXES = {state.value: BoxStatus(state=state, labels={INSTANCE_LABEL: "ours"}) for state in BoxState}


def record(
    state: State = State.READY,
    *,
    spec: dict[str, Any] | None = None,
    age_s: float = 100.0,
    early_s: float = 0.0,
    where: Moment = HERE,
    **fields: Any,
) -> Record:
    """One that was made and last changed so long ago."""
    asked = Spec.parse({"provider": "mock", **(spec or {})})
    made = msgspec.structs.replace(where, at=where.at - age_s)
    end = End(made, asked.lifetime_s, early_s) if asked.lifetime_s else None
    defaults = {"id": new_id(), "version": 1, "created_at": 0.0, "updated_at": 0.0, "owner": ALIVE}
    fields = {**defaults, "boot_id": "this boot", "written": made, "end": end, **fields}
    return Record(spec=asked, state=state, **fields)


def verdict_on(it: Record, box: BoxStatus | None) -> Verdict:
    (verdict,) = decide("mock", [it], {it.id: box} if box is not None else {}, NOW)
    return verdict


C, R, P, S, L = State.CREATING, State.READY, State.PAUSED, State.STOPPED, State.LOST
GONE = {"box_died": {}, "host_restarted": {"boot_id": "another boot"}}
Z = State.DESTROYED
FAILED = Cause.CREATION_FAILED

TABLE: list[tuple[State, dict[str, Any], str | None, Action, State | None, Cause | None]] = [
    # its maker lives: whatever the host says, it is the maker's
    (C, {}, None, Action.LEAVE, None, None),
    (C, {}, "running", Action.LEAVE, None, None),
    (C, {}, "dead", Action.LEAVE, None, None),
    (C, {"key": "k"}, "running", Action.LEAVE, None, None),
    # its maker is dead
    (C, {"owner": DEAD}, None, Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD}, "running", Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD}, "dead", Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD, "key": "k"}, None, Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD, "key": "k"}, "dead", Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD, "key": "k", "ephemeral": True}, "running", Action.DESTROY, Z, Cause.CREATION_FAILED),
    (C, {"owner": DEAD, "key": "k"}, "running", Action.FINISH, R, None),
    (C, {"owner": DEAD, "key": "k", "spec": {"env": {"A": "***"}}}, "running", Action.DESTROY, Z, FAILED),
    (C, {"owner": DEAD, "key": "k", "spec": {"snapshot": "s"}}, "running", Action.DESTROY, Z, FAILED),
    # it is made anew
    (R, {"remaker": ALIVE}, "running", Action.LEAVE, None, None),
    (R, {"remaker": ALIVE}, None, Action.LEAVE, None, None),
    (C, {"remaker": ALIVE, "owner": DEAD}, None, Action.LEAVE, None, None),
    (C, {"remaker": ALIVE, "owner": DEAD, "ephemeral": True}, "running", Action.LEAVE, None, None),
    (C, {"remaker": FAR}, None, Action.LEAVE, None, None),
    # whoever did that is dead: the old box was whole, of a new one nobody knows
    (R, {"remaker": DEAD}, "running", Action.ADOPT, R, None),
    (S, {"remaker": DEAD}, "stopped", Action.ADOPT, S, None),
    (P, {"remaker": DEAD}, "stopped", Action.ADOPT, S, None),
    (R, {"remaker": DEAD}, "dead", Action.LOST, L, FAILED),
    (R, {"remaker": DEAD}, None, Action.LOST, L, FAILED),
    (C, {"remaker": DEAD}, None, Action.LOST, L, FAILED),
    (C, {"remaker": DEAD}, "running", Action.LOST, L, FAILED),
    (C, {"remaker": FAR, "age_s": 1_000.0}, "dead", Action.LOST, L, FAILED),
    (L, {"remaker": DEAD}, "running", Action.LOST, L, FAILED),
    (L, {"remaker": DEAD}, None, Action.LEAVE, None, None),
    (L, {"remaker": ALIVE}, None, Action.LEAVE, None, None),
    (R, {"remaker": DEAD, "doomed": True, "cause": Cause.USER}, "running", Action.DESTROY, Z, Cause.USER),
    # its maker is on another machine
    (C, {"owner": FAR}, None, Action.LEAVE, None, None),
    (C, {"owner": FAR, "age_s": 1_000.0}, None, Action.DESTROY, Z, Cause.CREATION_FAILED),
    # as it should be
    (R, {}, "running", Action.LEAVE, None, None),
    (P, {}, "paused", Action.LEAVE, None, None),
    (S, {}, "stopped", Action.LEAVE, None, None),
    (R, {"owner": DEAD}, "running", Action.LEAVE, None, None),
    (R, {"owner": FAR, "ephemeral": True}, "running", Action.LEAVE, None, None),
    (R, {"ephemeral": True}, "running", Action.LEAVE, None, None),
    # somebody did it by hand
    (R, {}, "paused", Action.FOLLOW, P, None),
    (R, {}, "stopped", Action.FOLLOW, S, None),
    (P, {}, "running", Action.FOLLOW, R, None),
    (P, {}, "stopped", Action.FOLLOW, S, None),
    (S, {}, "running", Action.FOLLOW, R, None),
    # gone without a trace
    (R, {}, None, Action.LOST, L, Cause.BOX_DIED),
    (P, {}, None, Action.LOST, L, Cause.BOX_DIED),
    (S, {}, None, Action.LOST, L, Cause.BOX_DIED),
    (R, {"boot_id": "another boot"}, None, Action.LOST, L, Cause.HOST_RESTARTED),
    (L, {"cause": Cause.BOX_DIED}, None, Action.LEAVE, None, None),
    # gone but for its files
    (R, {}, "remains", Action.LOST, L, Cause.BOX_DIED),
    (L, {"cause": Cause.BOX_DIED}, "remains", Action.LEAVE, None, None),
    (R, {"spec": {"lifetime_s": 100}}, "remains", Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"doomed": True, "cause": Cause.USER}, "remains", Action.DESTROY, Z, Cause.USER),
    (R, {"remaker": DEAD}, "remains", Action.LOST, L, FAILED),
    (C, {"owner": DEAD}, "remains", Action.DESTROY, Z, Cause.CREATION_FAILED),
    # back again
    (L, {}, "running", Action.ADOPT, R, None),
    (L, {}, "paused", Action.ADOPT, P, None),
    (L, {}, "stopped", Action.ADOPT, S, None),
    # dead, with something left
    (R, {}, "dead", Action.DESTROY, Z, Cause.BOX_DIED),
    (P, {}, "dead", Action.DESTROY, Z, Cause.BOX_DIED),
    (R, {"boot_id": "another boot"}, "dead", Action.DESTROY, Z, Cause.HOST_RESTARTED),
    (L, {}, "dead", Action.DESTROY, Z, Cause.BOX_DIED),
    # its time was over
    (R, {"spec": {"lifetime_s": 100}}, None, Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"spec": {"lifetime_s": 100}}, "dead", Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"spec": {"lifetime_s": 500}}, None, Action.LOST, L, Cause.BOX_DIED),
    (P, {"spec": {"lifetime_s": 100}}, "paused", Action.DESTROY, Z, Cause.LIFETIME),
    (S, {"spec": {"lifetime_s": 100}}, "stopped", Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"spec": {"lifetime_s": 100}}, "stopped", Action.DESTROY, Z, Cause.LIFETIME),
    (S, {"spec": {"lifetime_s": 500}}, "stopped", Action.LEAVE, None, None),
    (R, {"spec": {"lifetime_s": 100}}, "running", Action.LEAVE, None, None),
    (R, {"spec": {"lifetime_s": 96}}, "running", Action.LEAVE, None, None),
    (R, {"spec": {"lifetime_s": 95}}, "running", Action.DESTROY, Z, Cause.LIFETIME),
    (L, {"spec": {"lifetime_s": 95}}, "running", Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"spec": {"lifetime_s": 110}}, None, Action.LOST, L, Cause.BOX_DIED),
    (R, {"spec": {"lifetime_s": 110}, "early_s": 10}, None, Action.DESTROY, Z, Cause.LIFETIME),
    (R, {"spec": {"lifetime_s": 110}, "early_s": 10}, "running", Action.LEAVE, None, None),
    (R, {"spec": {"idle_s": 60}}, None, Action.DESTROY, Z, Cause.IDLE),
    (R, {"spec": {"idle_s": 60}}, "dead", Action.DESTROY, Z, Cause.IDLE),
    (R, {"spec": {"idle_s": 200}}, None, Action.LOST, L, Cause.BOX_DIED),
    # it ends with its program
    (R, {"owner": DEAD, "ephemeral": True}, "running", Action.DESTROY, Z, Cause.OWNER_DIED),
    (P, {"owner": DEAD, "ephemeral": True}, "paused", Action.DESTROY, Z, Cause.OWNER_DIED),
    (L, {"owner": DEAD, "ephemeral": True}, None, Action.DESTROY, Z, Cause.OWNER_DIED),
    # somebody decided its end and did not come to it
    (C, {"doomed": True, "cause": Cause.USER}, None, Action.DESTROY, Z, Cause.USER),
    (R, {"doomed": True, "cause": Cause.LIFETIME}, "running", Action.DESTROY, Z, Cause.LIFETIME),
    (L, {"doomed": True, "cause": Cause.USER}, None, Action.DESTROY, Z, Cause.USER),
    (S, {"doomed": True, "cause": Cause.USER}, "dead", Action.DESTROY, Z, Cause.USER),
]


@pytest.mark.parametrize(("state", "fields", "box", "action", "to", "cause"), TABLE)
def test_each_combination_has_its_verdict(
    state: State, fields: dict[str, Any], box: str | None, action: Action, to: State | None, cause: Cause | None
) -> None:
    verdict = verdict_on(record(state, **fields), BOXES[box] if box else None)
    assert (verdict.action, verdict.to, verdict.cause) == (action, to, cause), verdict.why


def test_a_lost_one_keeps_its_cause_when_its_time_is_over() -> None:
    it = record(L, cause=Cause.BOX_DIED, spec={"lifetime_s": 50})
    assert verdict_on(it, None).cause in (None, Cause.BOX_DIED)


@pytest.mark.parametrize(
    ("state", "fields", "box", "action"),
    [
        (R, {}, BoxStatus(state=BoxState.RUNNING, outdated=True), Action.REBUILD),
        (R, {}, BoxStatus(state=BoxState.RUNNING), Action.LEAVE),
        (S, {}, BoxStatus(state=BoxState.STOPPED, outdated=True), Action.LEAVE),
        (R, {}, BoxStatus(state=BoxState.STOPPED, outdated=True), Action.FOLLOW),
        (R, {"doomed": True}, BoxStatus(state=BoxState.RUNNING, outdated=True), Action.DESTROY),
        (R, {"remaker": ALIVE}, BoxStatus(state=BoxState.RUNNING, outdated=True), Action.LEAVE),
        (L, {"remaker": DEAD}, None, Action.REBUILD),
        (L, {}, None, Action.LEAVE),
    ],
)
def test_what_is_outdated_is_made_anew_where_asked(
    state: State, fields: dict[str, Any], box: BoxStatus | None, action: Action
) -> None:
    it = record(state, **fields)
    there = {it.id: box} if box is not None else {}
    (verdict,) = decide("mock", [it], there, msgspec.structs.replace(NOW, rebuild=True))
    assert verdict.action is action, verdict.why
    (without,) = decide("mock", [it], there, NOW)
    assert without.action is (Action.LEAVE if action is Action.REBUILD else action)


def test_only_what_a_fork_of_ours_has_left_is_a_leftover() -> None:
    gone, there = record(Z, cause=Cause.USER), record(R)
    forgotten, foreign = new_id(), new_id()

    def snapshot(name: str, sandbox: str) -> Snapshot:
        return Snapshot(name=name, id=name, sandbox=sandbox, size=1, created_at=0.0)

    found = [
        snapshot("mine", there.id),
        snapshot(f"tmp-{gone.id}", there.id),
        snapshot(f"tmp-{there.id}", there.id),
        snapshot(f"tmp-{forgotten}", there.id),
        snapshot(f"tmp-{foreign}", new_id()),
    ]
    assert leftovers(found, [gone, there]) == [f"tmp-{gone.id}", f"tmp-{forgotten}"]


def test_a_box_of_ours_without_a_record_is_destroyed() -> None:
    (verdict,) = decide("mock", [], {new_id(): BOXES["running"]}, NOW)
    assert verdict.action is Action.DESTROY


def test_a_box_that_came_after_its_end_is_destroyed() -> None:
    it = record(Z, cause=Cause.USER)
    assert verdict_on(it, BOXES["running"]).action is Action.DESTROY
    assert verdict_on(it, BoxStatus(state=BoxState.DEAD)).action is Action.DESTROY


def test_the_causes_of_an_end_nobody_asked_for_have_an_order() -> None:
    both = {"spec": {"lifetime_s": 100, "idle_s": 10}, "boot_id": "another boot"}
    assert cause_of_end(record(**both), NOW) is Cause.LIFETIME
    assert cause_of_end(record(spec={"idle_s": 10}, boot_id="another boot"), NOW) is Cause.HOST_RESTARTED
    assert cause_of_end(record(boot_id=""), NOW) is Cause.BOX_DIED


# what holds for all

IDS = [new_id() for _ in range(6)]


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    return [
        record(
            draw(st.sampled_from(State)),
            id=id,
            owner=draw(st.sampled_from([ALIVE, DEAD, FAR])),
            ephemeral=draw(st.booleans()),
            doomed=draw(st.booleans()),
            cause=draw(st.sampled_from([None, *Cause])),
            key=draw(st.sampled_from([None, f"key of {id}"])),
            boot_id=draw(st.sampled_from(["", "this boot", "another boot"])),
            age_s=draw(st.sampled_from([1_000.0, 100.0, 1.0])),
            remaker=draw(st.sampled_from([None, None, ALIVE, DEAD, FAR])),
            spec={
                "lifetime_s": draw(st.sampled_from([0, 50, 5000])),
                "idle_s": draw(st.sampled_from([0, 50, 5000])),
            },
        )
        for id in draw(st.lists(st.sampled_from(IDS), unique=True))
    ]


boxes = st.dictionaries(
    st.sampled_from(IDS),
    st.builds(
        BoxStatus,
        state=st.sampled_from(BoxState),
        labels=st.sampled_from([{}, {INSTANCE_LABEL: "ours"}, {INSTANCE_LABEL: "another"}]),
        outdated=st.booleans(),
    ),
)


@given(records())
def test_a_provider_that_does_not_answer_changes_nothing(them: list[Record]) -> None:
    assert {verdict.action for verdict in decide("mock", them, None, NOW)} <= {Action.LEAVE}


@given(records(), boxes)
def test_everything_gets_exactly_one_verdict(them: list[Record], there: dict[SandboxId, BoxStatus]) -> None:
    verdicts = decide("mock", them, there, NOW)
    assert len({verdict.id for verdict in verdicts}) == len(verdicts), "nothing is both kept and destroyed"
    assert {verdict.id for verdict in verdicts} == {it.id for it in them if it.is_live} | there.keys()
    assert all(verdict.why and verdict.provider == "mock" for verdict in verdicts)


@given(records(), boxes)
def test_what_is_being_made_is_left_to_its_living_maker(them: list[Record], there: dict[SandboxId, BoxStatus]) -> None:
    verdicts = {verdict.id: verdict for verdict in decide("mock", them, there, NOW)}
    for it in them:
        if it.state is C and (it.remaker or it.owner) is ALIVE and not it.doomed:
            assert verdicts[it.id].action is Action.LEAVE


@given(records(), boxes)
def test_the_box_of_another_installation_is_never_touched(
    them: list[Record], there: dict[SandboxId, BoxStatus]
) -> None:
    ours = {it.id for it in them if it.is_live}
    for verdict in decide("mock", them, there, NOW):
        box = there.get(verdict.id)
        if verdict.id not in ours and box is not None and box.labels.get(INSTANCE_LABEL) == "another":
            assert verdict.action is Action.LEAVE


@given(records(), boxes)
def test_a_wanted_sandbox_whose_box_lives_is_never_destroyed(
    them: list[Record], there: dict[SandboxId, BoxStatus]
) -> None:
    verdicts = {verdict.id: verdict for verdict in decide("mock", them, there, NOW)}
    for it in them:
        box = there.get(it.id)
        kept = it.state in (R, P, S, L) and not it.doomed and not (it.ephemeral and it.owner is DEAD)
        is_over = it.is_over(HERE)
        half_made = it.remaker is not None and it.state is L
        lives = box is not None and box.state not in (BoxState.DEAD, BoxState.REMAINS)
        if kept and not is_over and not half_made and lives:
            assert verdicts[it.id].action in (Action.LEAVE, Action.FOLLOW, Action.ADOPT)


@given(records(), boxes, st.booleans())
def test_one_that_is_made_anew_is_never_destroyed_for_that(
    them: list[Record], there: dict[SandboxId, BoxStatus], rebuild: bool
) -> None:
    now = msgspec.structs.replace(NOW, rebuild=rebuild)
    verdicts = {verdict.id: verdict for verdict in decide("mock", them, there, now)}
    for it in them:
        if it.remaker is None or it.doomed or it.state in (L, Z):
            continue
        verdict = verdicts[it.id]
        if it.remaker is ALIVE:
            assert verdict.action is Action.LEAVE
        elif not (it.ephemeral and it.owner is DEAD) and it.spec.lifetime_s != 50:
            assert verdict.action in (Action.LEAVE, Action.ADOPT, Action.LOST)


@given(records(), boxes)
def test_every_verdict_can_be_carried_out_and_every_end_has_a_cause(
    them: list[Record], there: dict[SandboxId, BoxStatus]
) -> None:
    known = {it.id: it for it in them}
    for verdict in decide("mock", them, there, NOW):
        if verdict.to is not None:
            state = known[verdict.id].state
            assert verdict.to is state or verdict.to in TRANSITIONS[state]
        if verdict.to in (Z, L):
            assert verdict.cause is not None


def act(
    them: list[Record], there: dict[SandboxId, BoxStatus], verdicts: list[Verdict]
) -> tuple[list[Record], dict[SandboxId, BoxStatus]]:
    after, left = {it.id: it for it in them}, dict(there)
    for verdict in verdicts:
        was_one = verdict.action is Action.LOST and after[verdict.id].remaker is None
        has_files = verdict.id in left and left[verdict.id].state is BoxState.REMAINS
        if verdict.action in (Action.DESTROY, Action.LOST) and not (was_one and has_files):
            left.pop(verdict.id, None)
        if verdict.to is not None:
            settled = {} if verdict.to in (L, Z) else {"remaker": None}
            fields = {"state": verdict.to, "cause": verdict.cause, **settled}
            after[verdict.id] = msgspec.structs.replace(after[verdict.id], **fields)
    return list(after.values()), left


@settings(max_examples=300)
@given(records(), boxes)
def test_once_acted_on_nothing_is_left_to_do(them: list[Record], there: dict[SandboxId, BoxStatus]) -> None:
    after, left = act(them, there, decide("mock", them, there, NOW))
    assert {verdict.action for verdict in decide("mock", after, left, NOW)} <= {Action.LEAVE}
    held = {it.id: it.state for it in after if it.is_live and it.remaker is None}
    for id, box in left.items():
        if id in held and held[id] is not C and box.state is not BoxState.REMAINS:
            assert FOLLOWED[box.state] is held[id]
