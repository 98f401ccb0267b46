"""WebSockets to ports: through the proxy as the app speaks them, and as tunnels of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from surfaces.server.ports_world import Box, boxed
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from skerry.model.tenants import Scope
from skerry.surfaces.ports import proxy

TOKEN = "skerry_0123456789ab_" + "a" * 43 + "_00000000"


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with boxed(folder) as box:
        yield box


def dial(
    box: Box, port: int, path: str = "/", cookie: str = "", origin: str | None = None, **options: Any
) -> AbstractAsyncContextManager[ClientConnection]:
    headers = {"cookie": cookie} if cookie else {}
    headers |= {"origin": origin} if origin is not None else {}
    return connect(
        f"ws://{box.host(port)}{path}",
        host="127.0.0.1",
        port=urlsplit(box.served.url).port,
        additional_headers={**headers, **options.pop("headers", {})},
        proxy=None,
        **options,
    )


async def test_an_open_websocket_is_one_of_the_connections_that_a_sandbox_may_have(box: Box) -> None:
    port = await box.mirror()
    cookie, origin = await box.cookie(port), f"http://{box.host(port)}"
    box.bound(max_calls=1)
    async with dial(box, port, cookie=cookie, origin=origin):
        with pytest.raises(InvalidStatus) as refused:
            async with dial(box, port, cookie=cookie, origin=origin):
                pass
        assert refused.value.response.status_code == 429
        assert refused.value.response.headers["retry-after"] == "1"
    await box.is_quiet()
    async with dial(box, port, cookie=cookie, origin=origin) as socket:
        await socket.send("again")


async def test_an_open_websocket_ends_with_its_link(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LOOK_S", 0.05)
    port, other = await box.mirror(), await box.mirror()
    cookie, origin = await box.cookie(port), f"http://{box.host(port)}"
    unharmed = dial(box, other, cookie=await box.cookie(other), origin=f"http://{box.host(other)}")
    async with dial(box, port, cookie=cookie, origin=origin) as socket, unharmed as beside:
        assert (await box.api.delete(f"{box.path}/{port}/link")).status_code == 204
        async with asyncio.timeout(20):
            await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (1008, "the link is not valid any more")
        await beside.send("still here")


async def test_a_websocket_goes_through_with_nothing_of_ours(box: Box) -> None:
    port = await box.mirror()
    cookie = await box.cookie(port)
    headers = {"authorization": f"Bearer {TOKEN}"}
    offered: Any = ["chat", f"skerry.bearer.{TOKEN}"]
    origin = f"http://{box.host(port)}"
    async with dial(box, port, "/a?b=c", f"x=1; {cookie}", origin, headers=headers, subprotocols=["chat"]) as socket:
        assert socket.subprotocol == "chat"
        seen = {name.lower(): value for name, value in json.loads(await socket.recv())}
        assert (seen["cookie"], seen["origin"], seen["x-forwarded-for"]) == ("x=1", origin, "127.0.0.1")
        assert "sec-websocket-extensions" not in seen
        assert "skerry" not in str(seen)
        for message in ("hällo", b"\x00\xff", "", b"x" * 900_000):
            await socket.send(message)
            assert await socket.recv() == message
        await socket.send(["in ", "three ", "parts"])
        assert await socket.recv() == "in three parts"
    async with dial(box, port, cookie=cookie, subprotocols=offered) as socket:
        assert "skerry" not in str(await socket.recv())


async def test_a_websocket_needs_the_cookie_and_the_apps_own_origin(box: Box) -> None:
    port = await box.mirror()
    cookie = await box.cookie(port)
    cases = [("", None, 401), ("skerry-port=x", None, 401)]
    cases += [(cookie, origin, 403) for origin in ("http://evil.test", "null", f"http://81-{box.id}.localhost")]
    for given, origin, status in cases:
        with pytest.raises(InvalidStatus) as refused:
            async with dial(box, port, "/", given, origin):
                pass
        assert refused.value.response.status_code == status
    elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "websocket"}
    with pytest.raises(InvalidStatus):
        async with dial(box, port, "/", cookie, f"http://{box.host(port)}", headers=elsewhere):
            pass


async def test_a_link_itself_opens_a_websocket_too(box: Box) -> None:
    port = await box.mirror()
    query = urlsplit(await box.link(port)).query
    async with dial(box, port, f"/?{query}") as socket:
        assert await socket.recv()


async def test_an_app_that_wants_no_websocket_says_so(box: Box) -> None:
    port = await box.mirror()
    with pytest.raises(InvalidStatus) as refused:
        async with dial(box, port, "/refused", await box.cookie(port)):
            pass
    assert refused.value.response.status_code == 418


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000,
        b"HTTP/1.1 499 Own\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_an_app_that_is_no_websocket_is_none(box: Box, said: bytes) -> None:
    port = await box.says(said)
    with pytest.raises(InvalidStatus) as refused:
        async with dial(box, port, "/", await box.cookie(port)):
            pass
    assert refused.value.response.status_code == 502


@pytest.mark.parametrize(("said", "code"), [("garbage", 1011), ("large", 1011), ("close", 4321)])
async def test_a_websocket_ends_as_the_app_ends_it(box: Box, said: str, code: int) -> None:
    port = await box.mirror()
    async with dial(box, port, "/", await box.cookie(port)) as socket:
        await socket.recv()
        await socket.send(said)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == code
    await box.is_quiet()


ECHO = """
import socket, threading

def serve(client):
    with client:
        seen = b""
        while data := client.recv(65536):
            seen += data
        client.sendall(seen + b"!")

with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""
EOF = '{"type":"eof"}'


def tunnel(box: Box, port: object, token: str) -> AbstractAsyncContextManager[ClientConnection]:
    url = box.served.url.replace("http", "ws")
    protocols: Any = ["skerry.v1", f"skerry.bearer.{token}"]
    return connect(f"{url}{box.path}/{port}", subprotocols=protocols, proxy=None)


async def test_a_tunnel_carries_bytes_both_ways_and_each_end(box: Box) -> None:
    port = await box.run(ECHO)
    data = bytes(range(256)) * 8000
    async with tunnel(box, port, await box.served.token("acme")) as socket:
        assert socket.subprotocol == "skerry.v1"
        for at in range(0, len(data), 500_000):
            await socket.send(data[at : at + 500_000])
        await socket.send(EOF)
        received = b""
        async for message in socket:
            if isinstance(message, str):
                assert json.loads(message) == {"type": "eof"}
                break
            received += message
        assert received == data + b"!"
        await socket.wait_closed()
        assert socket.close_code == 1000


async def test_a_tunnel_to_a_port_where_nothing_listens_is_closed_with_the_reason(box: Box) -> None:
    async with tunnel(box, 1, await box.served.token("acme")) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason.partition(":")[0]) == (4404, "not_found")


@pytest.mark.parametrize("message", ["", "{}", '{"type":"other"}', "[" * 10_000])
async def test_a_tunnel_is_closed_for_a_text_that_means_nothing(box: Box, message: str) -> None:
    async with tunnel(box, await box.run(ECHO), await box.served.token("acme")) as socket:
        await socket.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert "binary frames" in closed.value.rcvd.reason


async def test_a_tunnel_needs_the_scope_and_the_tenant(box: Box) -> None:
    port = await box.run(ECHO)
    tokens = [("", 4401), (await box.served.token("other"), 4404), (await box.served.token("acme", Scope.EXEC), 4403)]
    for token, code in tokens:
        async with tunnel(box, port, token) as socket:
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code
