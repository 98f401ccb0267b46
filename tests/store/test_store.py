"""What the registry promises, on every database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from skerry.errors import (
    ConfigError,
    Conflict,
    HostFull,
    InvalidSpec,
    LimitReached,
    NotFound,
    StoreUnavailable,
    WrongState,
)
from skerry.model.records import Cause, Filter, Owner, Record
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import TRANSITIONS, State
from skerry.model.tenants import Quota
from skerry.store import Changes, Store

OWNER = Owner("host", 1, 1)


async def reserve(store: Store, spec: Spec | None = None, *, key: str | None = None, limit: int = 0) -> Record:
    record, _ = await store.reserve(new_id(), spec or Spec(), owner=OWNER, boot_id="boot", key=key, max_sandboxes=limit)
    return record


async def destroy(store: Store, record: Record) -> Record:
    return await store.change(record, to=State.DESTROYED, cause=Cause.USER)


def test_what_counts_as_live_is_what_the_indexes_hold() -> None:
    assert {state for state, following in TRANSITIONS.items() if not following} == {State.DESTROYED}


async def test_a_record_comes_back_as_it_was_stored(store: Store) -> None:
    spec = Spec.of(name="a", project="p", memory="1G", env={"A": "\0ü"[1:]}, labels={"x": "y"}, mounts=["/tmp:/mnt:ro"])
    made, is_new = await store.reserve(new_id(), spec, owner=OWNER, boot_id="boot", ephemeral=True, key="k")
    assert is_new
    assert made.state is State.CREATING
    assert made.spec == spec.but(env={"A": "***"})
    assert await store.get(made.id) == made
    enforced = {"memory": {"by": "cgroup", "why_not": ""}}
    changed = await store.change(made, to=State.READY, enforced=enforced, owner=Owner("h", 2, 3), ephemeral=False)
    assert await store.get(made.id) == changed
    assert (changed.version, changed.enforced, changed.ephemeral) == (2, enforced, False)


async def test_of_what_a_box_says_of_its_environment_only_what_it_was_told_is_vouched_for(store: Store) -> None:
    made, other = await reserve(store, Spec(env={"A": "1", "B": "2"})), await reserve(store, Spec(env={"C": "3"}))
    told = {"A": "1", "B": "lie", "C": "3", "D": "4", "LD_PRELOAD": "evil.so"}
    assert await store.vouched(made.id, told) == {"A": "1"}
    await store.note_env(made.id, {"B": "lie", "D": "4"})
    await store.change(made, to=State.READY)
    assert await store.vouched(made.id, told) == {"A": "1", "B": "lie", "D": "4"}
    assert await store.vouched(other.id, told) == {"C": "3"}
    assert await store.vouched(new_id(), told) == {}


async def test_a_registry_outlives_those_who_use_it(store: Store, url: str) -> None:
    made = await reserve(store)
    other = await Store.open(url)
    assert other.instance == store.instance
    assert await other.get(made.id) == made
    await other.aclose()


async def test_closing_twice_is_quiet_and_use_after_it_is_refused(url: str) -> None:
    store = await Store.open(url)
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.list()


async def test_a_reached_limit_names_the_limit_and_the_count(store: Store) -> None:
    first = await reserve(store, limit=2)
    await reserve(store, limit=2)
    with pytest.raises(LimitReached, match="max_sandboxes is 2 and 2 exist"):
        await reserve(store, limit=2)
    await store.change(first, to=State.LOST)
    with pytest.raises(LimitReached):
        await reserve(store, limit=2)
    await destroy(store, await store.get(first.id))
    await reserve(store, limit=2)


async def test_a_name_is_one_live_sandboxs_in_its_project(store: Store) -> None:
    holder = await reserve(store, Spec(name="a"))
    with pytest.raises(Conflict, match=holder.id):
        await reserve(store, Spec(name="a"))
    await reserve(store, Spec(name="a", project="other"))
    await destroy(store, holder)
    again = await reserve(store, Spec(name="a"))
    unnamed = await reserve(store)
    with pytest.raises(Conflict, match=again.id):
        await store.change(unnamed, spec=Spec(name="a"))
    assert (await store.change(unnamed, spec=Spec(name="b"))).name == "b"
    assert (await store.find("b")).id == unnamed.id


async def test_an_id_is_taken_for_ever(store: Store) -> None:
    ended = await destroy(store, await reserve(store))
    with pytest.raises(Conflict, match=ended.id):
        await store.reserve(ended.id, Spec(), owner=OWNER, boot_id="boot")


async def test_a_cid_is_one_sandboxs_for_ever(store: Store, url: str) -> None:
    """Also when those that had it ended, are forgotten, and the registry was closed meanwhile."""
    first, second = await reserve(store), await reserve(store)
    await destroy(store, second)
    assert (await store.get(second.id)).cid == second.cid
    await store.prune(before=time.time() + 1)
    other = await Store.open(url)
    third = await reserve(other)
    await other.aclose()
    numbers = [record.cid for record in (first, second, third)]
    assert len({*numbers}) == 3
    assert all(number is not None and 3 <= number < 2**32 - 1 for number in numbers)
    assert (await store.get(first.id)).cid == first.cid


async def test_registries_of_one_host_give_out_other_cids(new_url: Callable[[], str]) -> None:
    """The kernel knows a number once, whoever gave it out."""
    numbers = []
    for _ in range(3):
        store = await Store.open(new_url())
        numbers += [(await reserve(store)).cid for _ in range(3)]
        await store.aclose()
    assert len({*numbers}) == 9


async def test_a_sandbox_without_a_registry_has_no_cid_of_its_own() -> None:
    store = await Store.in_memory()
    assert (await reserve(store)).cid is None
    await store.aclose()


async def test_many_at_once_never_take_more_of_a_quota_than_there_is(store: Store) -> None:
    mine, spec = store.of_project("acme", Quota(egress=100 << 20)), Spec.of(project="acme", allow=["a.b"], egress="7M")
    made = await asyncio.gather(*(reserve(mine, spec) for _ in range(50)), return_exceptions=True)
    assert sum(isinstance(each, Record) for each in made) == 100 // 7
    assert {type(each) for each in made} == {Record, LimitReached}
    await destroy(store, next(each for each in made if isinstance(each, Record)))
    await reserve(mine, spec)
    with pytest.raises(LimitReached, match="98M a second is taken and 7M a second was asked for"):
        await reserve(mine, spec)


async def test_a_key_gives_the_same_sandbox_even_at_the_limit(store: Store) -> None:
    first = await reserve(store, Spec(name="a"), key="k", limit=1)
    second, is_new = await store.reserve(
        new_id(), Spec(name="a"), owner=Owner("x", 1, 1), boot_id="", key="k", max_sandboxes=1
    )
    assert (second, is_new) == (first, False)
    assert await store.last_event() == 1


async def test_a_key_with_another_spec_is_a_conflict(store: Store) -> None:
    first = await reserve(store, key="k")
    with pytest.raises(Conflict, match=first.id):
        await reserve(store, Spec(cpus=1), key="k")
    assert (await reserve(store, Spec(project="other", cpus=1), key="k")).id != first.id


async def test_a_key_remembers_what_was_asked_not_what_it_became(store: Store) -> None:
    asked = Spec(env={"A": "1", "B": "2"})
    first = await reserve(store, asked, key="k")
    changed = await store.change(first, spec=Spec(lifetime_s=9, env=asked.env))
    assert await reserve(store, Spec(env={"B": "2", "A": "1"}), key="k") == changed


async def test_a_key_is_free_again_when_its_sandbox_ended(store: Store) -> None:
    first = await reserve(store, key="k")
    await destroy(store, first)
    assert (await reserve(store, Spec(cpus=1), key="k")).id != first.id


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 257, "\n"])
async def test_a_key_that_cannot_be_one_is_refused(store: Store, key: str) -> None:
    with pytest.raises(InvalidSpec, match="key"):
        await reserve(store, key=key)


async def test_a_change_from_an_old_version_is_a_conflict(store: Store) -> None:
    made = await reserve(store)
    await store.change(made, to=State.READY)
    with pytest.raises(Conflict, match="is ready now"):
        await store.change(made, to=State.LOST)
    assert (await store.get(made.id)).state is State.READY
    assert await store.last_event() == 2


async def test_of_many_who_change_a_record_at_once_one_wins(store: Store, url: str) -> None:
    made = await reserve(store)
    others = [await Store.open(url) for _ in range(5)]
    outcomes = await asyncio.gather(*(other.change(made, to=State.READY) for other in others), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict"] * 4 + ["Record"]
    for other in others:
        await other.aclose()


async def test_a_change_that_the_table_of_states_forbids_changes_nothing(store: Store) -> None:
    ended = await destroy(store, await reserve(store))
    with pytest.raises(WrongState, match="destroyed cannot become ready"):
        await store.change(ended, to=State.READY)
    assert await store.get(ended.id) == ended


async def test_a_lost_sandbox_that_is_found_has_no_cause_of_end(store: Store) -> None:
    lost = await store.change(await reserve(store), to=State.LOST, cause=Cause.AGENT_LOST, detail="gone")
    again = await store.change(lost, to=State.READY, kind="adopted")
    assert (again.cause, again.detail) == (None, "")


async def test_a_detail_may_hold_what_boxes_log(store: Store) -> None:
    record = await store.change(await reserve(store), to=State.LOST, detail="a\0b\ud800 ✓")
    assert (await store.get(record.id)).detail == record.detail == "a\ufffdb? ✓"


async def test_a_sandbox_is_found_by_id_name_or_prefix(store: Store) -> None:
    one, _ = await store.reserve(
        SandboxId("aaaa0000-0000-4000-8000-000000000001"), Spec(name="b"), owner=OWNER, boot_id=""
    )
    two, _ = await store.reserve(SandboxId("aaab0000-0000-4000-8000-000000000002"), Spec(), owner=OWNER, boot_id="")
    three, _ = await store.reserve(SandboxId("b0000000-0000-4000-8000-000000000003"), Spec(), owner=OWNER, boot_id="")
    for reference, found in ((one.id, one), ("aaaa", one), ("b", one), ("aaab", two), ("b0", three)):
        assert await store.find(reference) == found
    with pytest.raises(Conflict, match=f"{one.id} \\(b\\), {two.id}"):
        await store.find("aaa")
    for reference in ("c", "", "%", "_", "\0", "' OR 1=1", "aaaa0000-0000-4000-8000-000000000001x"):
        with pytest.raises(NotFound):
            await store.find(reference)
    ended = await destroy(store, one)
    assert await store.find("aaa") == two
    assert await store.find("aaaa") == ended
    with pytest.raises(NotFound):
        await store.get(SandboxId("aaaa"))


async def test_a_name_in_two_projects_is_ambiguous(store: Store) -> None:
    await reserve(store, Spec(name="a-z", project="one"))
    await reserve(store, Spec(name="a-z", project="two"))
    with pytest.raises(Conflict, match="a-z"):
        await store.find("a-z")


async def test_lists_are_oldest_first_and_filtered(store: Store) -> None:
    one = await reserve(store, Spec(name="one", labels={"a": "1", "b": "2"}))
    two = await reserve(store, Spec(project="p", labels={"a": "1"}))
    three = await destroy(store, await reserve(store, Spec(provider="mock")))
    for filter in (
        Filter(),
        Filter(include_ended=True),
        Filter(states=frozenset({State.DESTROYED})),
        Filter(states=frozenset({State.DESTROYED, State.CREATING})),
        Filter(project="p"),
        Filter(project="\0"),
        Filter(provider="mock", include_ended=True),
        Filter(name="one"),
        Filter(labels={"a": "1"}),
        Filter(labels={"a": "1", "b": "2"}, project="default"),
        Filter(labels={"a": "2"}),
    ):
        expected = [record for record in (one, two, three) if filter.fits(record)]
        assert await store.list(filter) == expected, filter
        assert await store.count(filter) == len(expected), filter


async def test_a_list_is_read_page_by_page(store: Store) -> None:
    made = [await reserve(store, Spec(project="ab"[n % 2], labels={"third": str(n % 3)})) for n in range(12)]
    ids = [record.id for record in made]

    async def pages(filter: Filter, limit: int) -> list[list[str]]:
        found: list[list[str]] = []
        while page := await store.list(filter, after=found[-1][-1] if found else "", limit=limit):
            found.append([record.id for record in page])
        return found

    assert await pages(Filter(), 5) == [ids[:5], ids[5:10], ids[10:]]
    assert await pages(Filter(project="b"), 4) == [ids[1:8:2], ids[9::2]]
    assert await pages(Filter(labels={"third": "0"}), 3) == [ids[0:9:3], ids[9::3]]
    assert [record.id for record in await store.list(after=ids[9])] == ids[10:]
    assert await store.list(after=ids[-1], limit=5) == []
    assert await store.list(limit=0) == []
    await destroy(store, made[4])
    assert [record.id for record in await store.list(after=ids[4], limit=2)] == ids[5:7]  # its place stays
    assert await pages(Filter(include_ended=True), 100) == [ids]
    with pytest.raises(InvalidSpec, match="after"):
        await store.list(after=new_id(), limit=2)


async def test_a_page_of_one_project_begins_after_nothing_of_another(store: Store) -> None:
    theirs, ours = await reserve(store, Spec(project="b")), await reserve(store, Spec(project="a"))
    scoped = store.of_project("a", Quota())
    assert [record.id for record in await scoped.list(limit=5)] == [ours.id]
    with pytest.raises(InvalidSpec, match="after"):
        await scoped.list(after=theirs.id, limit=5)


async def test_every_change_is_one_event_in_one_order(store: Store) -> None:
    made = await reserve(store)
    other = await reserve(store)
    ready = await store.change(made, to=State.READY)
    doomed = await store.change(ready, doomed=True, cause=Cause.IDLE)
    longer = await store.change(doomed, kind="lifetime", spec=Spec(lifetime_s=9))
    await store.change(longer, to=State.DESTROYED, detail="bye")
    events = await store.events()
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    told = [(event.kind, event.state, event.cause, event.data) for event in events if event.sandbox == made.id]
    assert told == [
        ("created", State.CREATING, None, {}),
        ("ready", State.READY, None, {}),
        ("doomed", State.READY, Cause.IDLE, {}),
        ("lifetime", State.READY, Cause.IDLE, {}),
        ("destroyed", State.DESTROYED, Cause.IDLE, {"detail": "bye"}),
    ]
    assert await store.events(after=2, limit=2) == events[2:4]
    assert [event.seq for event in await store.events(sandbox=other.id)] == [2]
    assert await store.last_event() == 6


async def test_prune_forgets_what_ended_and_nothing_else(store: Store) -> None:
    ended = await destroy(store, await reserve(store))
    live = await reserve(store)
    assert await store.prune(before=ended.created_at) == 0
    assert await store.prune(before=time.time() + 1) == 1
    with pytest.raises(NotFound):
        await store.get(ended.id)
    assert await store.list(Filter(include_ended=True)) == [live]
    assert await store.events() == []
    assert await store.last_event() == 3
    await store.change(live, to=State.READY)
    assert [event.seq for event in await store.events(after=3)] == [4]


async def test_the_memory_of_a_host_is_promised_so_often_and_free_again_when_a_sandbox_has_ended(store: Store) -> None:
    async def promise(memory: int, boot_id: str = "boot", key: str | None = None) -> Record:
        options: dict[str, Any] = {"owner": OWNER, "boot_id": boot_id, "memory": memory, "max_memory": 100, "key": key}
        return (await store.reserve(new_id(), Spec(), **options))[0]

    first = await promise(60, key="k")
    with pytest.raises(HostFull, match=r"promised 100B .*admission.overcommit.*60B is promised and 41B was asked for"):
        await promise(41)
    await promise(40)
    await promise(0)
    await promise(100, "another host's boot")
    assert (await promise(60, key="k")).id == first.id, "who asks by a key asks for no more"
    assert [record.memory for record in await store.list()] == [60, 40, 0, 100]
    await store.change(first, to=State.DESTROYED, cause=Cause.USER)
    await promise(60)
    with pytest.raises(HostFull):
        await promise(1)


async def test_boot_slots_are_bounded_and_free_when_booted(store: Store) -> None:
    one, two, three = [await reserve(store) for _ in range(3)]

    async def slot(record: Record) -> bool:
        return await store.boot_slot(record.id, max_boots=2, owner_alive=lambda owner: True)

    assert [await slot(one), await slot(two), await slot(three), await slot(one)] == [True, True, False, True]
    assert await store.boot_slot(three.id, max_boots=0, owner_alive=lambda owner: True)
    await store.change(three, to=State.LOST)
    one = await store.change(one, to=State.READY)
    assert await slot(await reserve(store))
    with pytest.raises(WrongState, match="is ready"):
        await store.boot_slot(one.id, max_boots=9, owner_alive=lambda owner: True)
    with pytest.raises(NotFound):
        await store.boot_slot(new_id(), max_boots=9, owner_alive=lambda owner: True)


async def test_a_boot_slot_of_a_dead_owner_is_free(store: Store) -> None:
    dead = Owner("host", 2, 2)
    orphan, _ = await store.reserve(new_id(), Spec(), owner=dead, boot_id="")
    one, two = await reserve(store), await reserve(store)

    async def slot(record: Record, *, alive: bool) -> bool:
        return await store.boot_slot(record.id, max_boots=1, owner_alive=lambda owner: alive or owner != dead)

    assert await slot(orphan, alive=True)
    assert not await slot(one, alive=True)
    assert await slot(one, alive=False)
    assert not await slot(two, alive=False)


async def test_boot_slots_asked_for_at_once_are_never_too_many(store: Store, url: str) -> None:
    others = [await Store.open(url) for _ in range(6)]
    ids = [(await reserve(store)).id for _ in others]
    slots = await asyncio.gather(
        *(
            other.boot_slot(id, max_boots=2, owner_alive=lambda owner: True)
            for other, id in zip(others, ids, strict=True)
        )
    )
    assert sum(slots) == 2
    for other in others:
        await other.aclose()


async def test_a_cancelled_await_lets_what_has_begun_finish(store: Store) -> None:
    begun, go_on = threading.Event(), threading.Event()
    record = await reserve(store)

    def work(tx: object) -> None:
        begun.set()
        assert go_on.wait(10)

    blocker = asyncio.ensure_future(store._database.transact(work))
    await asyncio.to_thread(begun.wait, 10)
    blocker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocker
    later = asyncio.ensure_future(store.change(record, to=State.READY))
    go_on.set()
    assert (await later).state is State.READY


async def test_an_update_is_decided_again_from_the_current_record(store: Store) -> None:
    seen = await reserve(store)
    await store.change(seen, detail="by another")

    async def more(record: Record) -> Changes:
        return {"detail": f"{record.detail} and us"}

    assert (await store.update(seen, more)).detail == "by another and us"
    results = await asyncio.gather(*(store.update(seen, more) for _ in range(5)))
    assert sorted(result.version for result in results) == [4, 5, 6, 7, 8]


async def test_an_update_that_decides_on_nothing_changes_nothing(store: Store) -> None:
    seen = await reserve(store)

    async def nothing(_: Record) -> None:
        return None

    assert await store.update(seen, nothing) is seen
    assert await store.get(seen.id) == seen


async def test_an_update_raises_what_another_try_would_not_mend(store: Store) -> None:
    holder, seen = await reserve(store, Spec(name="taken")), await reserve(store)
    tries = []

    async def rename(record: Record) -> Changes:
        tries.append(record)
        return {"spec": Spec(name="taken")}

    with pytest.raises(Conflict, match=holder.id):
        await store.update(seen, rename)
    with pytest.raises(NotFound):
        await store.update(msgspec.structs.replace(seen, id=new_id()), rename)
    assert len(tries) == 2


async def test_an_update_ends_although_others_do_not(store: Store) -> None:
    seen = await reserve(store)

    async def lose(record: Record) -> Changes:
        await store.change(record, detail="again")
        return {"detail": "never"}

    with pytest.raises(Conflict, match="changed all the time"):
        await store.update(seen, lose)


async def test_work_that_fails_leaves_nothing(store: Store) -> None:
    def work(tx: object) -> None:
        tx.execute("UPDATE counters SET value = 99 WHERE name = 'event'")  # type: ignore[attr-defined]
        raise NotFound("on purpose")

    with pytest.raises(NotFound, match="on purpose"):
        await store._database.transact(work)
    assert await store.last_event() == 0


async def test_a_thousand_records_are_listed_fast(store: Store) -> None:
    spec = Spec.of(memory="1G", env={"A": "B"}, labels={"a": "b"})
    for number in range(1000):
        await reserve(store, msgspec.structs.replace(spec, name=f"n{number}"))
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        assert len(await store.list()) == 1000
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.1  # 8 ms on a quiet machine


@pytest.mark.parametrize("url", ["mysql://user:secret@host/db", "sqlite://relative.db"])
async def test_a_url_of_another_kind_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match=r"postgresql://") as raised:
        await Store.open(url)
    assert "secret" not in str(raised.value)
