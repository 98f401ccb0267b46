"""`python -m tests.surfaces.server.soak --sandboxes 300`: a server is killed under load, and the next one takes over
all that it had. It is no test of the suite: it takes minutes, and a machine of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from surfaces.server.process import ServeProcess

_AT_ONCE = 8
_CLIENTS = 32
_LOAD_S = 5.0
_PATIENCE_S = 120.0
T = TypeVar("T")


class Soak:
    """Sandboxes of one server, what each of them is to hold, and what was found."""

    def __init__(self, server: ServeProcess, count: int) -> None:
        self._server = server
        self._count = count
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self.ids: list[str] = []
        self.calls: Counter[str] = Counter()
        self.took: dict[str, float] = {}

    async def run(self) -> list[str]:
        """Make them, kill the server while they are used, start it again; what is wrong then."""
        await self._timed("make", self._each(range(self._count), self._make))
        load = [asyncio.create_task(self._load(number)) for number in range(_CLIENTS)]
        await asyncio.sleep(_LOAD_S)
        await self._server.kill()
        await asyncio.gather(*load)
        await self._timed("start again", self._server.start())
        wrong = await self._timed("look at all", self._each(self.ids, self._look))
        async with self._client() as client:
            listed = await self._list(client)
            answer = (await client.get("/v1/ledger/verify")).json()
        wrong += [f"{id} is not listed" for id in self.ids if id not in listed]
        wrong += [f"{id} is listed, and nobody made it" for id in listed if id not in self.ids]
        wrong += [] if answer["whole"] else [f"the ledger: {answer}"]
        await self._timed("remove", self._each(listed, self._remove))
        async with self._client() as client:
            wrong += [f"{id} is still there" for id in await self._list(client)]
        return [each for each in wrong if each]

    def _client(self) -> httpx.AsyncClient:
        client = self._server.client()
        client.timeout = httpx.Timeout(_PATIENCE_S)
        return client

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.took[what] = time.monotonic() - began

    async def _each(self, things: Iterable[T], do: Callable[[httpx.AsyncClient, T], Awaitable[str]]) -> list[str]:
        async with self._client() as client:

            async def one(thing: T) -> str:
                async with self._turn:
                    return await do(client, thing)

            return await asyncio.gather(*(one(thing) for thing in things))

    async def _make(self, client: httpx.AsyncClient, number: int) -> str:
        answer = await client.post("/v1/sandboxes", json={"labels": {"number": str(number)}, "lifetime": "1h"})
        answer.raise_for_status()
        id: str = answer.json()["id"]
        self.ids.append(id)
        path = f"/v1/sandboxes/{id}/files/content?path=mark"
        (await client.put(path, content=id.encode())).raise_for_status()
        return ""

    async def _load(self, number: int) -> None:
        """Use sandboxes until there is no server."""
        async with self._client() as client:
            while True:
                for id in self.ids[number % len(self.ids) :: _CLIENTS]:
                    try:
                        answer = await client.post(f"/v1/sandboxes/{id}/exec", json={"command": ["/bin/true"]})
                        self.calls[str(answer.status_code)] += 1
                    except httpx.TransportError:
                        self.calls["cut off"] += 1
                        return

    async def _look(self, client: httpx.AsyncClient, id: str) -> str:
        """Whether one can be used, and is the one that it was."""
        answer = await client.post(f"/v1/sandboxes/{id}/exec", json={"command": ["cat", "mark"]})
        said = answer.json()
        return "" if answer.status_code == 200 and said["stdout"] == id else f"{id}: {answer.status_code} {said}"

    async def _list(self, client: httpx.AsyncClient) -> list[str]:
        ids, after = [], ""
        while True:
            page = (await client.get("/v1/sandboxes", params={"limit": 100, "after": after})).json()
            ids += [item["id"] for item in page["items"]]
            if page["next"] is None:
                return ids
            after = page["next"]

    async def _remove(self, client: httpx.AsyncClient, id: str) -> str:
        answer = await client.delete(f"/v1/sandboxes/{id}?grace_s=0")
        return "" if answer.status_code == 204 else f"{id}: {answer.status_code} {answer.text}"


async def soak(count: int, folder: Path) -> int:
    env = {"SKERRY_MAX_SANDBOXES": "0", "SKERRY_PROVIDER": "local"}
    async with ServeProcess(folder, env=env, rate=1_000_000) as server:
        made = Soak(server, count)
        wrong = await made.run()
    for line in wrong:
        print("WRONG", line)
    print(f"sandboxes {count}: {'ok' if not wrong else f'{len(wrong)} things are wrong'}")
    print("  calls under load:", ", ".join(f"{what} {number}" for what, number in sorted(made.calls.items())))
    print("  seconds to", ", ".join(f"{what} {took:.1f}" for what, took in made.took.items()))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=300)
    with TemporaryDirectory(prefix="sks-", dir="/tmp") as folder:
        return asyncio.run(soak(parser.parse_args().sandboxes, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
