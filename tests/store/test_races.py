"""Many processes on one registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from skerry.errors import StoreUnavailable
from skerry.model.records import Owner
from skerry.model.spec import Spec, new_id
from skerry.store import Store

from .conftest import Racers

Race = Callable[..., Racers]


async def test_20_processes_that_reserve_make_exactly_as_many_as_allowed(store: Store, url: str, race: Race) -> None:
    racers = race(url, "reserve", tries=10, limit=37)
    racers.go()
    made = [id for ids in racers.results() for id in ids]
    assert sorted(made) == sorted({record.id for record in await store.list()})
    assert [event.seq for event in await store.events()] == list(range(1, 38))
    assert len({record.cid for record in await store.list()} - {None}) == 37
    assert await store.count() == 37


async def test_20_processes_with_one_key_get_one_sandbox(store: Store, url: str, race: Race) -> None:
    racers = race(url, "reserve_with_key")
    racers.go()
    results = racers.results()
    assert len({id for id, _ in results}) == 1
    assert sum(is_new for _, is_new in results) == 1


async def test_20_processes_that_open_a_new_registry_agree_on_it(url: str, race: Race) -> None:
    racers = race(url, "open")
    racers.go()
    store = await Store.open(url)
    assert set(racers.results()) == {store.instance}
    await store.aclose()


async def test_a_reader_with_a_cursor_misses_no_event_of_many_writers(store: Store, url: str, race: Race) -> None:
    racers = race(url, "write", processes=6, rounds=25)
    racers.go()
    results = asyncio.create_task(asyncio.to_thread(racers.results))
    seen: list[int] = []
    while not results.done() or seen[-1:] != [await store.last_event()]:
        seen += [event.seq for event in await store.events(after=seen[-1] if seen else 0, limit=7)]
    assert sum(await results) == 300
    assert seen == list(range(1, 301))


async def test_a_registry_held_too_long_by_another_process_is_unavailable(url: str, race: Race) -> None:
    store = await Store.open(url, timeout_s=0.3)
    holder = race(url, "hold", processes=1)
    with pytest.raises(StoreUnavailable, match="retry"):
        await store.reserve(new_id(), Spec(), owner=Owner("h", 1, 1), boot_id="")
    assert await store.list() == []  # readers are not kept out
    holder.go()
    assert holder.results() == [None]
    await store.reserve(new_id(), Spec(), owner=Owner("h", 1, 1), boot_id="")
    await store.aclose()
