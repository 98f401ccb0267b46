"""The agent's stream through a server, spoken by clients that mean no good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from surfaces.server.world import Served, serving
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed

from skerry.manager.manager import AsyncSandboxManager
from skerry.surfaces.rest.relayed_call import RelayedCall


@asynccontextmanager
async def stream(served: Served, reference: str, *, token: str | None = None, more: str = "") -> AsyncIterator[Any]:
    """A WebSocket of a client of its own."""
    url = f"{served.url.replace('http', 'ws', 1)}/v1/sandboxes/{reference}/agent{more}"
    headers = {"Authorization": f"Bearer {token or await served.token()}"}
    async with open_socket(url, additional_headers=headers, max_size=None, proxy=None) as socket:
        yield socket


async def ask(socket: ClientConnection, method: str, id: int = 1, attachment: bytes = b"", **params: Any) -> None:
    frame: dict[str, Any] = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
    if attachment:
        frame["bytes"] = len(attachment)
    await socket.send(msgspec.json.encode(frame) + b"\n" + attachment)


async def answer(socket: ClientConnection) -> dict[str, Any]:
    """The next frame that is an answer."""
    while True:
        data = await asyncio.wait_for(socket.recv(), 20)
        assert isinstance(data, bytes)
        frame: dict[str, Any] = msgspec.json.decode(data.partition(b"\n")[0])
        if "method" not in frame:
            return frame


async def close_of(socket: ClientConnection) -> tuple[int, str]:
    try:
        while True:
            await asyncio.wait_for(socket.recv(), 20)
    except ConnectionClosed as error:
        told = error.rcvd
    assert told is not None
    return told.code, told.reason


@pytest.fixture
async def box(served: Served) -> AsyncIterator[str]:
    made = await served.server.manager.create()
    yield made.id
    await served.server.manager.destroy(made.id)


async def test_an_unknown_sandbox_and_no_token_are_refused_with_their_codes(served: Served, box: str) -> None:
    async with stream(served, "nothing-of-that-name") as socket:
        code, reason = await close_of(socket)
        assert (code, reason.partition(":")[0]) == (4404, "not_found")
    async with stream(served, box, token="wrong") as socket:
        assert (await close_of(socket))[0] == 4401
    async with stream(served, box, token=await served.token("other")) as socket:
        assert (await close_of(socket))[0] == 4404


async def test_the_greeting_is_the_servers(served: Served, box: str) -> None:
    async with stream(served, box) as socket:
        await ask(socket, "hello", protocol=1, token="whatever")
        found = await answer(socket)
        assert found["result"]["protocol"] == 1
        await ask(socket, "ping", 2)
        assert (await answer(socket))["result"] == {}


@pytest.mark.parametrize(
    "data",
    [
        b"not json\n",
        b"[]\n",
        b'{"id":1}\n',
        b'{"id":"x","method":"ping"}\n',
        b'{"id":1,"method":"ping","bytes":-1}\n',
        b'{"id":1,"method":"ping","bytes":1048577}\n',
        b'{"method":"end","params":{"id":1},"bytes":1}\nx',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"x" * 900_000,
        "text, where bytes go",
    ],
)
async def test_what_is_no_frame_ends_the_stream(served: Served, box: str, data: bytes | str) -> None:
    async with stream(served, box) as socket:
        await socket.send(data)
        if data == b"x" * 900_000:
            await socket.send(data)
        code, reason = await close_of(socket)
        assert (code, reason.partition(":")[0]) == (4400, "agent_protocol")
    async with stream(served, box) as socket:  # and harms nobody else
        await ask(socket, "ping")
        assert (await answer(socket))["result"] == {}


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("exec", {"argv": "no list"}, "invalid_spec"),
        ("exec", {"argv": [1, 2]}, "invalid_spec"),
        ("exec", {"argv": ["true"], "more": 1 << 30}, "invalid_spec"),
        ("exec", {"argv": ["true"], "more": -5}, "invalid_spec"),
        ("exec", {"argv": ["true"], "window": 1 << 30}, "invalid_spec"),
        ("exec", {"argv": ["true"], "window": 0}, "invalid_spec"),
        ("read_file", {"path64": 7}, "invalid_spec"),
        ("set_env", {"env": "x"}, "invalid_spec"),
        ("signal", {"call": 77, "signal": 9}, "not_found"),
        ("set_lifetime", {"lifetime_s": "soon"}, "invalid_spec"),
        ("connect", {"port": 1 << 40}, "invalid_spec"),
        ("connect", {"port": "80"}, "invalid_spec"),
        ("shutdown", {}, "agent_error"),
        ("network", {}, "agent_error"),
    ],
)
async def test_what_cannot_be_asked_is_an_answer(
    served: Served, box: str, method: str, params: dict[str, Any], code: str
) -> None:
    async with stream(served, box) as socket:
        await ask(socket, method, **params)
        assert (await answer(socket))["error"]["data"]["code"] == code
        await ask(socket, "ping", 2)
        assert (await answer(socket))["result"] == {}


async def test_more_bytes_than_the_window_and_more_credit_than_was_used_end_the_stream(
    served: Served, box: str
) -> None:
    async with stream(served, box) as socket:
        await ask(socket, "write_file", path="big")
        frame = msgspec.json.encode({"method": "credit", "params": {"id": 1, "bytes": 1 << 40}}) + b"\n"
        await socket.send(frame)
        assert (await close_of(socket))[0] == 4400


async def test_what_costs_no_credit_is_not_kept(served: Served, box: str) -> None:
    async with stream(served, box) as socket:
        await ask(socket, "write_file", path="small")
        end = msgspec.json.encode({"method": "end", "params": {"id": 1}}) + b"\n"
        nothing = msgspec.json.encode({"method": "data", "params": {"id": 1}}) + b"\n"
        some = msgspec.json.encode({"method": "data", "params": {"id": 1}, "bytes": 1}) + b"\nx"
        await socket.send(nothing * 1000 + some + end * 1000 + some)
        assert (await answer(socket))["result"]["size"] == 1


async def test_an_answer_of_a_box_that_is_none_is_told_to_whoever_waits(
    served: Served, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lie(self: RelayedCall, call: object) -> msgspec.Raw:
        return msgspec.Raw(b'{"process": "none"}')

    monkeypatch.setattr(RelayedCall, "follow", lie)
    async with stream(served, box) as socket:
        await ask(socket, "exec", argv=["true"], background=True)
        assert (await answer(socket))["error"]["data"]["code"] == "agent_protocol"


async def test_a_failure_of_the_server_itself_is_told_to_whoever_waits(
    served: Served, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: RelayedCall, call: object) -> msgspec.Raw:
        raise KeyError("nobody has thought of it")

    monkeypatch.setattr(RelayedCall, "follow", fail)
    async with stream(served, box) as socket:
        await ask(socket, "ping")
        found = (await answer(socket))["error"]
        assert (found["data"]["code"], "nobody" in found["message"]) == ("error", False)


async def test_a_stream_has_so_many_calls_and_no_more(
    served: Served, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.surfaces.rest.agent_stream._MAX_CALLS", 3)
    async with stream(served, box) as socket:
        for id in range(1, 5):
            await ask(socket, "write_file", id, path=f"file-{id}")
        assert (await answer(socket))["error"]["data"]["code"] == "limit_reached"


async def test_a_client_that_reads_nothing_holds_up_nobody(folder: Path, own_registry: None) -> None:
    async with serving(folder, config=_local(folder)) as served:
        manager: AsyncSandboxManager = served.server.manager
        async with await manager.create() as made:
            async with stream(served, made.id) as slow:
                await ask(slow, "exec", shell="echo $$ > pid; exec cat /dev/zero")
                await asyncio.wait_for(slow.recv(), 20)
                for _ in range(20):
                    assert (await made.exec(["echo", "quick"])).stdout == b"quick\n"
            # and what it ran has ended with it
            async with asyncio.timeout(20):
                await made.exec("while kill -0 $(cat pid); do sleep 0.05; done")


def _local(folder: Path) -> Any:
    from manager.world import config_of

    return config_of(folder, provider="local")
