"""Several servers on one registry: one does the background work, and its death is noticed in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from manager.world import until
from store import server as postgres_server
from surfaces.server.process import ServeProcess

from skerry.errors import StoreUnavailable
from skerry.manager import identity
from skerry.model.records import Owner
from skerry.store import Store
from skerry.surfaces.server import leader
from skerry.surfaces.server.leader import Leader

ELSEWHERE = Owner(host="another-machine/boot/pids", pid=1, started=1)


@pytest.fixture(autouse=True)
def _quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_S", 0.01)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(str(tmp_path / "registry.db"))
    yield store
    await store.aclose()


@asynccontextmanager
async def running(candidate: Leader) -> AsyncIterator[None]:
    task = asyncio.create_task(candidate.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def leads(candidate: Leader) -> None:
    async def is_so() -> bool:
        return candidate.is_leader

    await until(is_so)


class Count:
    """Work that never ends, and how much of it is going on."""

    def __init__(self) -> None:
        self.begun = self.going_on = 0

    async def __call__(self) -> None:
        self.begun += 1
        self.going_on += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.going_on -= 1


async def test_one_of_two_leads_and_the_other_when_that_leaves(store: Store) -> None:
    first, second, works = Leader(store), Leader(store), [Count(), Count()]
    for candidate, work in zip((first, second), works, strict=True):
        candidate.background("work", work)
    async with running(second):
        await leads(second)
        async with running(first):
            for _ in range(20):
                await asyncio.sleep(0)
            await store.last_event()
            assert (first.is_leader, [work.going_on for work in works]) == (False, [0, 1])
    assert works[1].going_on == 0
    async with running(first):
        await leads(first)
        assert works[0].begun == 1


async def test_a_holder_that_is_dead_on_this_machine_is_followed_at_once(store: Store) -> None:
    me = identity.this_process()
    dead = Leader(store, Owner(host=me.host, pid=me.pid, started=me.started + 1))
    assert await dead._hold()
    heir = Leader(store)
    assert await heir._hold()


async def test_a_holder_on_another_machine_is_followed_when_its_lease_stands_still(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, heir = Leader(store, ELSEWHERE), Leader(store)
    assert await other._hold()
    assert not await heir._hold()
    monkeypatch.setattr(leader, "EXPIRY_S", 0.0)
    assert await other._hold(), "it lives"
    assert not await heir._hold(), "it was renewed since"
    assert await heir._hold(), "it was not"
    assert not await other._hold(), "it comes too late"


async def test_a_leader_that_cannot_renew_stops_its_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, work = Leader(store), Count()
    candidate.background("work", work)
    monkeypatch.setattr(leader, "_GIVE_UP_S", leader._ANSWER_S)

    async def gone(id: str) -> None:
        raise StoreUnavailable("gone")

    async def has_stopped() -> bool:
        return not candidate.is_leader and work.going_on == 0

    async with running(candidate):
        await leads(candidate)
        monkeypatch.setattr(candidate._leases, "get", gone)
        await until(has_stopped)


async def test_work_that_fails_is_begun_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_RETRY_S", (0.001, 0.01))
    begun = 0

    async def fails() -> None:
        nonlocal begun
        begun += 1
        raise ValueError("a bug")

    async def was_begun_again() -> bool:
        return begun > 2

    candidate = Leader(store)
    async with running(candidate):
        await leads(candidate)
        candidate.background("bug", fails)
        await until(was_begun_again)


@pytest.fixture
def database() -> Iterator[str]:
    with postgres_server.running() as server:
        with psycopg.connect(server.url("served")) as connection:
            connection.execute("CREATE SCHEMA served")
        yield server.url("served")


async def is_leader(client: httpx.AsyncClient) -> bool:
    text = (await client.get("/metrics")).text
    return "\nskerry_leader 1\n" in text


async def test_the_death_of_a_server_is_noticed_and_every_server_answers(
    folder: Path, database: str, own_registry: None
) -> None:
    env = {
        "SKERRY_DATABASE": database,
        "SKERRY_PROVIDER": "local",
        "SKERRY_PROVIDERS__LOCAL__STATE_DIR": f"{folder}/local",
    }
    both = [ServeProcess(folder / name, env={**env, "SKERRY_STATE_DIR": str(folder / name)}) for name in ("a", "b")]
    async with both[0], both[1], both[0].client() as first, both[1].client() as second:

        async def one_leads() -> bool:
            return [await is_leader(first), await is_leader(second)].count(True) == 1

        await until(one_leads)
        made = (await first.post("/v1/sandboxes", json={"name": "shared"})).json()
        assert (await second.get("/v1/sandboxes/shared")).json()["id"] == made["id"]
        dies = 0 if await is_leader(first) else 1
        survivor = (first, second)[1 - dies]
        await both[dies].kill()

        async def has_followed() -> bool:
            return await is_leader(survivor)

        await until(has_followed)
        assert (await survivor.get("/v1/sandboxes/shared")).json()["state"] == "ready"
        assert (await survivor.delete("/v1/sandboxes/shared?grace_s=0")).status_code == 204
