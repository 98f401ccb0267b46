"""A sandbox of a served installation, and how its clients read events and speak over WebSockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from manager.world import config_of
from surfaces.server.world import Served, serving
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


class Sent(NamedTuple):
    """A server-sent event."""

    event: str
    data: Any
    id: str | None = None


class Box:
    """A sandbox, and a client of its tenant. Paths are those after the sandbox's own."""

    def __init__(self, served: Served, client: httpx.AsyncClient, id: str) -> None:
        self.served = served
        self.client = client
        self.id = id

    def url(self, path: str) -> str:
        return f"/v1/sandboxes/{self.id}{path}"

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(self.url(path), **options)

    async def post(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.post(self.url(path), **options)

    async def put(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.put(self.url(path), **options)

    async def delete(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.delete(self.url(path), **options)

    async def sh(self, script: str) -> dict[str, Any]:
        answer = await self.post("/exec", json={"command": script})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @asynccontextmanager
    async def events(self, method: str, path: str, **options: Any) -> AsyncIterator[AsyncIterator[Sent]]:
        """The events of an answer, while the `async with` lasts."""
        async with self.client.stream(method, self.url(path), **options) as answer:
            assert answer.status_code == 200, await answer.aread()
            yield events_of(answer)

    async def all_events(self, method: str, path: str, **options: Any) -> list[Sent]:
        async with self.events(method, path, **options) as events:
            return [event async for event in events]

    @asynccontextmanager
    async def raw(
        self, method: str, path: str, *headers: bytes, body: bytes = b"", length: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection on which a request was sent, or a part of it: nothing of its answer is read by itself."""
        address = urlsplit(self.served.url)
        # a small buffer, so that not much is on its way to those who do not read
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 12)
        lines = [
            f"{method} {self.url(path)} HTTP/1.1".encode(),
            b"host: localhost",
            b"authorization: " + self.client.headers["authorization"].encode(),
            b"content-length: %d" % (len(body) if length is None else length),
            *headers,
        ]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        try:
            yield reader, writer
        finally:
            writer.close()

    def socket(self, path: str) -> connect:
        """A WebSocket, with the token of the client."""
        url = self.served.url.replace("http", "ws", 1) + self.url(path)
        return connect(url, additional_headers={"authorization": self.client.headers["authorization"]}, proxy=None)


async def events_of(answer: httpx.Response) -> AsyncIterator[Sent]:
    """The events of an answer; comments are left out."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Sent(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


@asynccontextmanager
async def box_of(served: Served, tenant: str | None = "acme", **spec: Any) -> AsyncIterator[Box]:
    """A sandbox of a tenant, which is gone after."""
    client = await served.client(tenant)
    answer = await client.post("/v1/sandboxes", json=spec)
    assert answer.status_code == 201, answer.text
    box = Box(served, client, answer.json()["id"])
    try:
        yield box
    finally:
        await served.server.manager.destroy(box.id, grace_s=0)


@asynccontextmanager
async def local_box(folder: Path, **spec: Any) -> AsyncIterator[Box]:
    """A sandbox of the `local` provider."""
    config = config_of(folder, provider="local", providers={"local": {"state_dir": str(folder / "local")}})
    async with serving(folder, config=config) as served, box_of(served, **spec) as box:
        yield box


class Screen:
    """Terminal of a client: all that it was shown, and what it was told."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.shown = b""
        self.told: list[dict[str, Any]] = []

    async def type(self, text: str) -> None:
        await self._socket.send(text.encode())

    async def tell(self, **message: Any) -> None:
        await self._socket.send(json.dumps(message))

    async def shows(self, text: str) -> None:
        """Wait until it has shown this."""
        while text.encode() not in self.shown:
            await self._next()

    async def process(self) -> int:
        while not self.told:
            await self._next()
        assert self.told[0]["type"] == "process"
        number: int = self.told[0]["process"]
        return number

    async def end(self) -> dict[str, Any]:
        """How it ended."""
        while not self.told or self.told[-1]["type"] != "exit":
            await self._next()
        return self.told[-1]

    async def close(self) -> int:
        """Wait until the server ends it; the code that it gives."""
        try:
            while True:
                await self._next()
        except ConnectionClosed:
            assert self._socket.close_code is not None
            return self._socket.close_code

    async def _next(self) -> None:
        message = await self._socket.recv()
        if isinstance(message, bytes):
            self.shown += message
        else:
            self.told.append(json.loads(message))
