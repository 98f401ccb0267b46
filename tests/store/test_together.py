"""Changes that wait for the registry at the same moment are made together, and each is still whole or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skerry.errors import Conflict, NotFound, StoreError, StoreUnavailable
from skerry.model.records import Cause, Filter, Owner
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.store import Store
from skerry.store.base import Transaction

OWNER = Owner("host", 1, 1)


@asynccontextmanager
async def kept_busy(store: Store) -> AsyncIterator[None]:
    """Keep the thread of the registry busy, so that all that is asked for meanwhile waits."""
    begun, go = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        begun.set()
        go.wait(10)

    busy = asyncio.create_task(store._database.transact(work, write=False))
    await asyncio.to_thread(begun.wait, 10)
    try:
        yield
        await asyncio.sleep(0)  # tasks that were made meanwhile begin
    finally:
        go.set()
        await busy


def counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every transaction from now on: whether it writes."""
    transactions: list[bool] = []
    run = store._database._run

    def count(work: Callable[[Transaction], Any], write: bool, frees: bool) -> Any:
        transactions.append(write)
        return run(work, write, frees)

    monkeypatch.setattr(store._database, "_run", count)
    return transactions


async def reserve(store: Store, **options: Any) -> Any:
    return (await store.reserve(new_id(), Spec(**options), owner=OWNER, boot_id=""))[0]


async def together(store: Store, *works: Any) -> list[Any]:
    async with kept_busy(store):
        tasks = [asyncio.ensure_future(work) for work in works]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_changes_that_wait_are_one_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = counted(store, monkeypatch)
    made = await together(store, *(reserve(store) for _ in range(40)))
    assert transactions == [False, True]
    assert [event.seq for event in await store.events()] == list(range(1, 41))
    assert [record.id for record in await store.list()] == [record.id for record in made]


async def test_one_that_is_refused_takes_nothing_with_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await reserve(store, name="taken")
    transactions = counted(store, monkeypatch)
    one, refused, other, missing = await together(
        store,
        reserve(store, name="a"),
        reserve(store, name="taken"),
        reserve(store, name="b"),
        store.boot_slot(new_id(), max_boots=1, owner_alive=lambda owner: True),
    )
    assert transactions == [False, True]
    assert isinstance(refused, Conflict)
    assert isinstance(missing, NotFound)
    assert [record.id for record in await store.list()] == [first.id, one.id, other.id]
    assert [event.seq for event in await store.events()] == [1, 2, 3]


async def test_one_whose_sql_fails_fails_alone(store: Store) -> None:
    def wrong(tx: Transaction) -> None:
        tx.execute("UPDATE counters SET value = 1000 WHERE name = 'event'")
        tx.execute("INSERT INTO counters (name, value) VALUES ('event', 0)")

    one, failed, other = await together(store, reserve(store), store._database.transact(wrong), reserve(store))
    assert isinstance(failed, StoreError)
    assert [record.id for record in await store.list()] == [one.id, other.id]
    assert await store.last_event() == 2


async def test_what_is_read_comes_between_the_changes_before_and_after_it(store: Store) -> None:
    counts = await together(store, reserve(store), store.count(), reserve(store), reserve(store), store.count())
    assert (counts[1], counts[4]) == (1, 3)


async def test_one_that_is_cancelled_before_its_turn_is_not_made(store: Store) -> None:
    async with kept_busy(store):
        kept, cancelled = (asyncio.create_task(reserve(store)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
    assert [record.id for record in await store.list()] == [(await kept).id]
    assert cancelled.cancelled()


async def test_ends_that_wait_are_made_together_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [await reserve(store) for _ in range(5)]
    transactions = counted(store, monkeypatch)
    ends = (store.change(record, to=State.DESTROYED, cause=Cause.USER) for record in records)
    await together(store, *ends, reserve(store))
    assert transactions == [False, True, True], "those that may use the room of a full disk are by themselves"
    assert len(await store.list(Filter(include_ended=True))) == 6


async def test_a_registry_that_is_out_of_reach_is_waited_for_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = counted(store, monkeypatch)
    run = store._database._run

    def fail(work: Callable[[Transaction], Any], write: bool, frees: bool) -> Any:
        run(lambda tx: None, write, frees)
        if write:
            raise StoreUnavailable("another process has held it for too long")
        return work(Transaction(lambda sql, params: None))

    monkeypatch.setattr(store._database, "_run", fail)
    failed = await together(store, *(reserve(store) for _ in range(5)))
    assert [type(each) for each in failed] == [StoreUnavailable] * 5
    assert tries == [False, True]
