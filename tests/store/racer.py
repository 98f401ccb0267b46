"""One of many processes that use a registry at once: says `ready`, waits for a line, acts, prints the result."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from skerry.errors import LimitReached
from skerry.model.records import Owner
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.store import Store
from skerry.store.base import Transaction

_OWNER = Owner("host", 1, 1)


def wait_for_go() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


async def open_it(url: str) -> str:
    wait_for_go()
    store = await Store.open(url, timeout_s=40)
    await store.aclose()
    return store.instance


async def reserve(store: Store, *, tries: int, limit: int) -> list[str]:
    made = []
    for _ in range(tries):
        try:
            record, _ = await store.reserve(new_id(), Spec(), owner=_OWNER, boot_id="b", max_sandboxes=limit)
            made.append(record.id)
        except LimitReached:
            break
    return made


async def reserve_with_key(store: Store) -> tuple[str, bool]:
    record, is_new = await store.reserve(new_id(), Spec(name="one"), owner=_OWNER, boot_id="b", key="k")
    return record.id, is_new


async def write(store: Store, *, rounds: int) -> int:
    for _ in range(rounds):
        record, _ = await store.reserve(new_id(), Spec(), owner=_OWNER, boot_id="b")
        await store.change(record, to=State.READY)
    return 2 * rounds


async def hold(store: Store) -> None:
    """Hold the registry as a writer until another line comes."""

    def work(tx: Transaction) -> None:
        tx.execute("UPDATE counters SET value = value WHERE name = 'event'")
        print("ready", flush=True)
        sys.stdin.readline()

    await store._database.transact(work)


ACTIONS: dict[str, Callable[..., Awaitable[Any]]] = {
    "reserve": reserve,
    "reserve_with_key": reserve_with_key,
    "write": write,
}


async def main(url: str, action: str, options: dict[str, Any]) -> Any:
    if action == "open":
        return await open_it(url)
    store = await Store.open(url, timeout_s=40)
    try:
        if action == "hold":
            return await hold(store)
        wait_for_go()
        return await ACTIONS[action](store, **options)
    finally:
        await store.aclose()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))))
