"""Limits: who calls too often, sends too much, or takes too long is refused, and nobody else."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from manager.world import until
from surfaces.server.world import Served, serving
from uvicorn.server import ServerState

from skerry.config import ServerSettings
from skerry.errors import SkerryError
from skerry.providers.mock import Mock
from skerry.surfaces.rest.sandboxes import CreateSandbox
from skerry.surfaces.server import connections, guard
from skerry.surfaces.server.answers import StreamedAnswer
from skerry.surfaces.server.limits import Limits, TooMany


class FakeTime:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def limits(time: FakeTime, **settings: int) -> Limits:
    return Limits(lambda: ServerSettings(**settings), time)


def is_refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except TooMany:
        return True
    return False


def test_a_caller_gets_its_rate_and_twice_as_much_at_once() -> None:
    time = FakeTime()
    found = limits(time, rate=10)
    assert [is_refused(lambda: found.begin("a").end()) for _ in range(21)] == [False] * 20 + [True]
    assert not is_refused(lambda: found.begin("b"))
    time.at += 0.1
    assert [is_refused(lambda: found.begin("a").end()) for _ in range(2)] == [False, True]


def test_a_caller_gets_so_many_calls_at_a_time() -> None:
    found = limits(FakeTime(), max_calls=2)
    begun = [found.begin("a") for _ in range(2)]
    assert is_refused(lambda: found.begin("a"))
    begun[0].end()
    assert not is_refused(lambda: found.begin("a"))


def test_bodies_of_a_caller_have_a_bound_together_and_count_as_calls() -> None:
    time = FakeTime()
    found = limits(time, rate=10, max_body=1 << 20)
    first, second = found.begin("a"), found.begin("a")
    first.hold(3 << 20)
    assert is_refused(lambda: second.hold((1 << 20) + 1))
    found.begin("b").hold(1 << 20)
    first.end()
    second.hold(1)
    assert is_refused(lambda: found.begin("a")), "3 MiB are worth 96 calls of 32 KiB"
    time.at += 9
    assert not is_refused(lambda: found.begin("a"))


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/mcp"])
async def test_many_large_bodies_at_once_are_refused_and_nobody_else_is(
    tmp_path: Path, own_registry: None, mock_provider: Mock, path: str
) -> None:
    async with serving(tmp_path, mock_provider, max_body=1 << 20) as served:
        greedy, other, token = await served.client("acme"), await served.client("other"), await served.token("acme")
        token_id = token.split("_")[1]
        head = (
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n"
            b"accept: application/json, text/event-stream\r\ncontent-length: %d\r\n\r\n"
        )
        said = head % (path.encode(), token.encode(), 1 << 20) + b" " * ((1 << 20) - 1)
        held = [await opened(served, said) for _ in range(4)]
        try:
            await until(lambda: holds(served, f"token:{token_id}", 4 * ((1 << 20) - 1)))
            held.append(await opened(served, said))
            async with asyncio.timeout(20):
                assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 429 ")
            assert (await other.post("/v1/sandboxes", json={})).status_code == 201
            assert (await greedy.get("/v1/whoami")).status_code == 200, "that is another token"
        finally:
            for _, writer in held:
                writer.transport.abort()
        await until(lambda: holds(served, f"token:{token_id}", 0))


async def holds(served: Served, actor: str, count: int) -> bool:
    """Whether the bodies of a caller hold so many bytes."""
    return served.server.limits.held(actor) == count


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/mcp"])
async def test_a_client_that_goes_in_the_middle_of_a_body_is_no_failure_of_the_server(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    token = await served.token("acme")
    actor = f"token:{token.split('_')[1]}"
    head = "POST {} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-length: 100\r\n\r\n{{"
    _, writer = await opened(served, head.format(path, token).encode())
    await until(lambda: holds(served, actor, 1))
    writer.transport.abort()
    await until(lambda: holds(served, actor, 0))
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


async def test_nothing_of_a_refused_request_is_left_for_the_collector(served: Served) -> None:
    client = await served.client("acme")
    refused = {"labels": {"skerry.x": "1"}}
    assert (await client.post("/v1/sandboxes", json=refused)).status_code == 400
    gc.collect()
    gc.disable()
    try:
        assert (await client.post("/v1/sandboxes", json=refused)).status_code == 400
        assert not [each for each in gc.get_objects() if isinstance(each, CreateSandbox)]
    finally:
        gc.enable()


async def test_who_has_all_of_an_answer_may_call_again_whatever_the_server_still_has_to_do(
    tmp_path: Path, own_registry: None, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, over = StreamedAnswer.__call__, asyncio.Event()

    async def linger(self: StreamedAnswer, *given: Any) -> None:
        await answer(self, *given)
        await over.wait()

    monkeypatch.setattr(StreamedAnswer, "__call__", linger)
    async with serving(tmp_path, mock_provider, max_calls=1) as served:
        client = await served.client()
        for _ in range(2):
            assert (await client.get("/v1/events")).status_code == 200
        over.set()


def test_tokens_of_an_address_are_not_looked_at_after_too_many_wrong_ones() -> None:
    time = FakeTime()
    found = limits(time)
    found.accepted("good")
    told = [found.refused("192.0.2.1") for _ in range(20)]
    assert all(told)
    assert is_refused(lambda: found.check("192.0.2.1", "a guess"))
    assert not is_refused(lambda: found.check("192.0.2.1", "good")), "who was let in before is not shut out"
    assert not is_refused(lambda: found.check("192.0.2.2", "a guess"))
    time.at += 1
    assert not is_refused(lambda: found.check("192.0.2.1", "a guess"))


def test_all_addresses_of_a_network_of_ipv6_are_one() -> None:
    found = limits(FakeTime())
    for number in range(20):
        found.refused(f"2001:db8::{number:x}")
    assert is_refused(lambda: found.check("2001:db8::ffff", "a guess"))
    assert not is_refused(lambda: found.check("2001:db8:0:1::1", "a guess"))


def test_the_ledger_is_not_flooded_from_many_addresses() -> None:
    found = limits(FakeTime())
    assert sum(found.refused(f"10.0.{n >> 8}.{n & 255}") for n in range(2000)) <= 50


async def test_too_many_calls_are_answered_with_when_to_come_again(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider, rate=1) as served:
        client, other = await served.client("acme"), await served.client("other")
        answers = [await client.get("/v1/sandboxes") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert answers[-1].json()["code"] == "too_many_calls"
        assert (await other.get("/v1/sandboxes")).status_code == 200


async def test_a_call_counts_until_its_end_and_no_longer(served: Served) -> None:
    client = await served.client("acme")
    for _ in range(3):
        assert (await client.get("/v1/sandboxes")).status_code == 200
    assert [caller.calls for caller in served.server.limits._callers.values()] == [0]


async def test_somebody_who_guesses_tokens_is_slowed_down_and_shuts_nobody_out(served: Served) -> None:
    client, guesser = await served.client("acme"), await served.anonymous()
    assert (await client.get("/v1/sandboxes")).status_code == 200
    guess = {"authorization": f"Bearer skerry_000000000000_{'a' * 43}_00000000"}
    found = [(await guesser.get("/v1/sandboxes", headers=guess)).status_code for _ in range(40)]
    assert {*found} == {401, 429}
    assert (await client.get("/v1/sandboxes")).status_code == 200


async def raw(served: Served, *pieces: bytes) -> bytes:
    """What the server says to some bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


async def count_is(served: Served, count: int) -> bool:
    """Whether there are so many connections."""
    return served.server.metrics.connections() == count


async def opened(served: Served, said: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which something was said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(said)
    await writer.drain()
    return reader, writer


HEAD = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
FOLLOW = b"GET /v1/events?follow=true HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"
UPGRADE = (
    b"GET /v1/sandboxes/none/terminal HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["without an end", "whole"])
async def test_a_head_that_is_too_long_is_refused(served: Served, end: bytes) -> None:
    assert (await raw(served, HEAD, b"x-long: " + b"a" * 40_000, end)).startswith(b"HTTP/1.1 431 ")


async def test_many_headers_are_too_long_together(served: Served) -> None:
    lines = b"".join(b"x-%d: %b\r\n" % (n, b"a" * 60) for n in range(600))
    assert (await raw(served, HEAD, lines, b"\r\n")).startswith(b"HTTP/1.1 431 ")


async def test_a_long_head_asks_for_no_websocket_either(served: Served) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nx: %b\r\n\r\n" % (
        b"a" * 40_000
    )
    assert (await raw(served, HEAD, upgrade)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begin", [b"", HEAD], ids=["nothing", "half a head"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    assert (await raw(served, begin)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_does_not_come_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODY_S", 0.1)
    token = await served.token()
    head = b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    said = head + b"authorization: Bearer %b\r\ncontent-length: 100\r\n\r\n{" % token.encode()
    assert (await raw(served, said)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    client = await served.client()
    most = served.server.config.server.max_body
    answer = await client.post("/v1/sandboxes", content=b" " * (most + 1), headers={"content-type": "application/json"})
    assert answer.status_code == 413


async def test_there_is_room_for_so_many_connections_and_always_for_admins_on_the_socket(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider, max_connections=2) as served:
        token = await served.token()
        held = [await opened(served, FOLLOW % token.encode()) for _ in range(2)]
        try:
            for reader, _ in held:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            assert (await raw(served)).startswith(b"HTTP/1.1 503 ")
            by_socket = await served.by_socket()
            assert (await by_socket.get("/healthz")).status_code == 200
        finally:
            for _, writer in held:
                writer.close()


SILENT = {
    "nothing": (b"", b""),
    "half a head": (HEAD, b""),
    "an answer": (HEAD + b"\r\n", b"HTTP/1.1 200 "),
    "a websocket that was refused": (UPGRADE, b"HTTP/1.1 101 "),
}


@pytest.mark.parametrize("kind", SILENT)
async def test_who_holds_connections_and_asks_nothing_gives_way(
    tmp_path: Path, own_registry: None, mock_provider: Mock, kind: str
) -> None:
    said, answer = SILENT[kind]
    async with serving(tmp_path, mock_provider, max_connections=3) as served:
        token = await served.token()
        call = await opened(served, FOLLOW % token.encode())
        assert (await call[0].readline()).startswith(b"HTTP/1.1 200 ")
        held = [await opened(served, said) for _ in range(2)]
        try:
            for reader, _ in held if answer else ():
                assert (await reader.readline()).startswith(answer)
            await until(lambda: count_is(served, 3))
            assert (await raw(served, HEAD + b"connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            async with asyncio.timeout(20):
                with suppress(ConnectionResetError):
                    await held[0][0].read()
            assert not call[0].at_eof()
        finally:
            for _, writer in (call, *held):
                writer.transport.abort()


async def test_half_of_the_files_that_may_be_open_are_for_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    all = connections.Connections(most=4096)
    state = ServerState()
    all.add(state, counted=True)
    state.connections = {object() for _ in range(513)}  # type: ignore[misc]
    for files, full in ((resource.RLIM_INFINITY, False), (1026, False), (1024, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert all.is_full is full, files


async def test_a_client_that_reads_nothing_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, token = await served.client(), await served.token()
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    path = f"/v1/sandboxes/{id}/files/content?path=large"
    assert (await client.put(path, content=bytes(32 << 20))).status_code < 300
    monkeypatch.setattr(connections, "STALLED_S", 0.1)
    before = served.server.metrics.connections()
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]), limit=1024)
    try:
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        writer.write(head.encode())
        await until(lambda: count_is(served, before + 1))
        await until(lambda: count_is(served, before))
    finally:
        writer.transport.abort()


async def test_a_refusal_is_an_error_of_ours(served: Served) -> None:
    assert issubclass(TooMany, SkerryError)
    client = await served.anonymous()
    with pytest.raises(httpx.HTTPStatusError):
        (await client.get("/v1/sandboxes")).raise_for_status()
