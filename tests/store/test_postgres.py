"""What can befall a server: lost connections, restarts, silence; and what its messages must not tell."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from skerry.errors import ConfigError, StoreReadOnly, StoreUnavailable
from skerry.model.records import Filter, Owner, Record
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.store import Store
from skerry.store.base import Transaction

from .server import Server

OWNER = Owner("host", 1, 1)


@pytest.fixture
def url(new_postgres_url: Callable[[], str]) -> str:
    return new_postgres_url()


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await Store.open(url)
    yield opened
    await opened.aclose()


async def reserve(store: Store) -> Record:
    record, _ = await store.reserve(new_id(), Spec(), owner=OWNER, boot_id="")
    return record


def disconnect_all(url: str) -> None:
    others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'skerry'"
    with psycopg.connect(url) as connection:
        connection.execute(others)


async def test_a_lost_connection_is_made_again_unseen(store: Store, url: str) -> None:
    first = await reserve(store)
    disconnect_all(url)
    second = await reserve(store)
    disconnect_all(url)
    assert await store.list() == [first, second]


async def test_work_that_is_cut_off_is_run_again_whole(store: Store, url: str) -> None:
    runs = []

    def work(tx: Transaction) -> int:
        tx.execute("UPDATE counters SET value = value + 1 WHERE name = 'event'")
        runs.append(1)
        if len(runs) == 1:
            disconnect_all(url)
        return int(tx.rows("SELECT value FROM counters WHERE name = 'event'")[0][0])

    assert await store._database.transact(work) == 1
    assert (len(runs), await store.last_event()) == (2, 1)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_commit_whose_answer_is_lost_is_neither_lost_nor_done_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    connection = store._database._connection  # type: ignore[attr-defined]
    commit = connection.commit

    def lose_the_answer() -> None:
        if commits:
            commit()
        connection.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(connection, "commit", lose_the_answer)
    record, is_new = await store.reserve(new_id(), Spec(name="a"), owner=OWNER, boot_id="")
    assert is_new
    assert await store.list() == [record]
    assert await store.last_event() == 1


@pytest.mark.parametrize("conflict", [psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected])
async def test_conflicts_are_tried_again_and_not_for_ever(store: Store, conflict: type[psycopg.Error]) -> None:
    def fail(times: int) -> Callable[[Transaction], int]:
        runs: list[int] = []

        def work(tx: Transaction) -> int:
            runs.append(1)
            if len(runs) <= times:
                raise conflict("on purpose")
            return len(runs)

        return work

    assert await store._database.transact(fail(3)) == 4
    with pytest.raises(StoreUnavailable, match="on purpose"):
        await store._database.transact(fail(99))


async def test_what_a_server_acknowledged_survives_its_crash(store: Store, postgres: Server) -> None:
    acknowledged: list[Record] = []
    refused = 0
    done = asyncio.Event()

    async def write() -> None:
        nonlocal refused
        while not done.is_set():
            try:
                acknowledged.append(await store.change(await reserve(store), to=State.READY))
            except StoreUnavailable:
                refused += 1
                await asyncio.sleep(0.01)

    writer = asyncio.create_task(write())
    await asyncio.sleep(0.2)
    await asyncio.to_thread(postgres.crash)
    before = len(acknowledged)
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.list()
    finally:
        await asyncio.to_thread(postgres.start)
    await asyncio.sleep(0.2)
    done.set()
    await writer
    assert len(acknowledged) > before
    known = {record.id: record for record in await store.list(Filter(include_ended=True))}
    assert before
    assert refused
    assert all(known[record.id] == record for record in acknowledged)
    assert len(known) <= len(acknowledged) + refused
    events = await store.events(limit=100_000)
    assert [event.seq for event in events] == list(range(1, await store.last_event() + 1))


async def test_a_writer_that_hangs_is_cut_off_so_that_others_go_on(store: Store, url: str) -> None:
    hanging = await Store.open(url, timeout_s=0.3)

    def work(tx: Transaction) -> list[Any]:
        time.sleep(1)
        return list(tx.rows("SELECT 1"))

    hung = asyncio.create_task(hanging._database.transact(work))
    await asyncio.sleep(0.1)
    await reserve(store)
    with pytest.raises(StoreUnavailable):
        await hung
    await hanging.aclose()


async def test_a_server_that_only_reads_is_read_only(url: str) -> None:
    await (await Store.open(url)).aclose()
    store = await Store.open(url + "%20-cdefault_transaction_read_only%3Don")
    assert await store.list() == []
    with pytest.raises(StoreReadOnly, match="read-only"):
        await reserve(store)
    await store.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:S3CRET@127.0.0.1:1/db",
        "postgresql://user:S3CRET@127.0.0.1:port/db",
        "postgresql://user:S3CRET@[::1/db",
        "postgresql://user:S3CRET@127.0.0.1:1/db?nonsense=S3CRET",
        "postgresql://user@nowhere.invalid/db?password=S3CRET",
    ],
)
async def test_no_message_tells_a_password(url: str) -> None:
    with pytest.raises((ConfigError, StoreUnavailable)) as raised:
        await Store.open(url, timeout_s=2)
    assert "S3CRET" not in "".join(traceback.format_exception(raised.value))


async def test_a_password_that_the_server_repeats_is_blanked(postgres: Server) -> None:
    with pytest.raises(StoreUnavailable, match=r"role .\*\*\*. does not exist"):
        await Store.open(f"postgresql://S3CRET:S3CRET@/postgres?host={postgres.folder}")


def test_without_psycopg_the_message_names_what_to_install() -> None:
    code = (
        "import asyncio, sys\nsys.modules['psycopg'] = None\nfrom skerry.store import Store\n"
        "asyncio.run(Store.open('postgresql://localhost/x'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError" in done.stderr
    assert "pip install 'skerry[postgres]'" in done.stderr
