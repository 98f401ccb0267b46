"""Abuse of the API: names that are paths, fields that must not be, races for one thing, and floods; the server is as it
was after each."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from manager.world import config_of
from surfaces.server.world import Served, serving

from skerry.model.tenants import Quota
from skerry.providers.mock import Mock

REFERENCES = {
    "a folder above": "..",
    "folders above": "../../etc/passwd",
    "folders above, quoted": "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "quoted twice": "%252e%252e%252f",
    "dots, quoted": "%2e%2e",
    "a zero byte": "%00",
    "a zero byte within": "box%00",
    "a line feed": "box%0a",
    "a backslash": "..%5c..%5c",
    "no text": "%ff%fe",
    "a surrogate": "%ed%a0%80",
    "other letters": "%D1%8F%E2%80%AE%F0%9F%92%A5",
    "a wildcard": "%25",
    "SQL": "box'%20OR%20'1'='1",
    "overlong": "a" * 4000,
    "10 kB": "a" * 10_000,
}


@pytest.mark.parametrize("noun", ["sandboxes", "pools", "fleets", "operations", "webhooks", "tokens", "tenants"])
async def test_a_name_that_is_none_finds_nothing(served: Served, noun: str) -> None:
    client = await served.client()
    assert (await client.post("/v1/sandboxes", json={"name": "box"})).status_code == 201
    found = {}
    for kind, text in REFERENCES.items():
        path = f"/v1/{noun}/{text}"
        found[kind] = (await client.request("DELETE" if noun != "operations" else "GET", path)).status_code
        if noun == "sandboxes":
            found[f"file of {kind}"] = (await client.get(f"{path}/files/content?path={text}")).status_code
    wrong = {kind: status for kind, status in found.items() if status not in (400, 404, 405, 414, 431)}
    assert wrong == {}
    assert (await client.get("/v1/sandboxes/box")).json()["state"] == "ready"


REFUSED: dict[str, Any] = {
    "privileged": {"privileged": True},
    "cap_add": {"cap_add": ["SYS_ADMIN"]},
    "security_opt": {"security_opt": ["seccomp=unconfined"]},
    "devices": {"devices": ["/dev/kvm"]},
    "runtime_args": {"runtime_args": ["--privileged"]},
    "an unknown field": {"nonsense": 1},
    "an image that is an option": {"image": "-v/:/host"},
    "a name that is a path": {"name": "../../etc"},
    "a project that is a path": {"project": "../default"},
    "negative memory": {"memory": -1},
    "no memory": {"memory": 0},
    "more memory than there is": {"memory": 1 << 63},
    "memory that is no number": {"memory": "NaN"},
    "negative cpus": {"cpus": -0.5},
    "more cpus than there are": {"cpus": 1e300},
    "negative pids": {"pids": -1},
    "too many pids": {"pids": 1 << 63},
    "a negative disk": {"disk": "-5G"},
    "a negative lifetime": {"lifetime": -1},
    "a lifetime that is no number": {"lifetime": "nan"},
    "a lifetime without end": {"lifetime": "inf"},
    "a very long lifetime": {"lifetime": 1e300},
    "a number as a text": {"cpus": "2"},
    "100,000 labels": {"labels": {f"label-{number}": "x" for number in range(100_000)}},
    "a long label": {"labels": {"a": "x" * 100_000}},
    "a label of ours": {"labels": {"skerry.project": "other"}},
    "a variable with a sign in its name": {"env": {"A=B": "x"}},
    "a variable with a zero byte": {"env": {"A": "x\0y"}},
    "a zero byte in a command": {"command": ["a\0b"]},
    "a user that is an option": {"user": "-x\n"},
    "a port that is none": {"ports": [70_000]},
    "a negative port": {"ports": [-1]},
}
RAW = {
    "NaN": b'{"cpus": NaN}',
    "Infinity": b'{"memory": Infinity}',
    "a number without end": b'{"cpus": 1e999}',
    "10,000 digits": b'{"pids": ' + b"9" * 10_000 + b"}",
    "deep lists": b'{"labels": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a lone surrogate": b'{"name": "\\ud800"}',
    "no UTF-8": b'{"name": "\xff\xfe"}',
    "a list": b"[]",
    "two documents": b"{}{}",
    "no JSON": b"name: box",
}


async def test_a_spec_with_what_must_not_be_is_refused(served: Served) -> None:
    client = await served.client("acme")
    bodies = {**{kind: msgspec.json.encode(body) for kind, body in REFUSED.items()}, **RAW}
    headers = {"content-type": "application/json"}
    answers = {kind: await client.post("/v1/sandboxes", content=body, headers=headers) for kind, body in bodies.items()}
    wrong = {kind: answer.text[:200] for kind, answer in answers.items() if answer.status_code not in (400, 403, 422)}
    assert wrong == {}
    assert (await client.get("/v1/sandboxes")).json()["items"] == []


async def test_a_hundred_creates_with_one_key_make_one_sandbox(served: Served) -> None:
    client = await served.client("acme")
    key = {"idempotency-key": "the-one"}
    answers = await asyncio.gather(
        *(client.post("/v1/sandboxes", json={"labels": {"a": "1"}}, headers=key) for _ in range(100))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len((await client.get("/v1/sandboxes")).json()["items"]) == 1
    other = await client.post("/v1/sandboxes", json={"labels": {"a": "2"}}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "conflict")
    theirs = await (await served.client("other")).post("/v1/sandboxes", json={}, headers=key)
    assert theirs.status_code == 201, "a key is a tenant's own"
    for text in ("", "x" * 257):
        refused = await client.post("/v1/sandboxes", json={}, headers={"idempotency-key": text})
        assert refused.status_code == 400, text


async def test_what_races_a_destroy_is_done_or_refused_and_nothing_is_left(served: Served, mock_provider: Mock) -> None:
    client = await served.client("acme")
    found: collections.Counter[int] = collections.Counter()
    for _ in range(10):
        id = (await client.post("/v1/sandboxes", json={})).json()["id"]
        path = f"/v1/sandboxes/{id}"
        answers = await asyncio.gather(
            *(client.post(f"{path}/exec", json={"command": ["echo", "x"]}) for _ in range(3)),
            client.put(f"{path}/files/content?path=a", content=b"x" * 100_000),
            client.delete(path),
            *(client.post(f"{path}/exec", json={"command": ["echo", "x"]}) for _ in range(3)),
            client.delete(path),
            client.put(f"{path}/files/content?path=b", content=b"x" * 100_000),
            client.post(f"{path}/pause"),
        )
        found.update(answer.status_code for answer in answers)
        cut = {answer.json()["code"] for answer in answers if answer.status_code == 502}
        assert cut <= {"call_interrupted"}, "a command that ran when its box went may have been done, or not"
        assert [answers[4].status_code, answers[8].status_code] == [204, 204]
    assert set(found) <= {200, 204, 404, 409, 410, 502}, found
    assert (await client.get("/v1/sandboxes")).json()["items"] == []
    assert await mock_provider.discover() == {}


async def test_a_destroy_while_it_is_made_leaves_nothing(served: Served, mock_provider: Mock) -> None:
    client = await served.client("acme")
    for number in range(10):
        made = asyncio.create_task(client.post("/v1/sandboxes", json={"name": f"box-{number}"}))
        while (gone := await client.delete(f"/v1/sandboxes/box-{number}")).status_code == 404 and not made.done():
            pass
        assert (await made).status_code in (201, 404, 409, 410)
        if gone.status_code == 404:
            gone = await client.delete(f"/v1/sandboxes/box-{number}")
        assert gone.status_code in (204, 404)
    assert (await client.get("/v1/sandboxes")).json()["items"] == []
    assert await mock_provider.discover() == {}


# WebSockets, as bytes


def _frame(
    opcode: int, data: bytes, *, is_last: bool = True, is_masked: bool = True, length: int | None = None
) -> bytes:
    size = len(data) if length is None else length
    mask = 0x80 if is_masked else 0
    head = bytes([(0x80 if is_last else 0) | opcode])
    if size < 126:
        head += bytes([mask | size])
    elif size < 1 << 16:
        head += bytes([mask | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([mask | 127]) + size.to_bytes(8, "big")
    return head + (bytes(4) if is_masked else b"") + data  # a mask of zeros leaves data as it is


_TEXT, _BINARY, _PING, _MORE = 1, 2, 9, 0
ABUSES = {
    "a frame of a gigabyte": (_frame(_BINARY, b"x", length=1 << 30), 1009),
    "a frame of all bytes that there are": (_frame(_BINARY, b"x", length=(1 << 63) - 1), 1009),
    "a length with a sign": (_frame(_BINARY, b"x", length=(1 << 64) - 1), 1009),
    "fragments without end": (
        _frame(_BINARY, b"x", is_last=False) + _frame(_MORE, b"x" * 65_000, is_last=False) * 400,
        1009,
    ),
    "an unmasked frame": (_frame(_TEXT, b"{}", is_masked=False), 1002),
    "text that is none": (_frame(_TEXT, b"\xff\xfe"), 1007),
    "a reserved opcode": (_frame(3, b"x"), 1002),
    "a long ping": (_frame(_PING, b"x" * 200), 1002),
    "a ping in parts": (_frame(_PING, b"x", is_last=False), 1002),
    "more of nothing": (_frame(_MORE, b"x"), 1002),
}


class RawSocket:
    """A WebSocket whose frames are a test's own bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, served: Served, path: str, token: str) -> RawSocket:
        url = urlsplit(served.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        """Send what there is room for; the other side may have closed."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            return

    async def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and its data."""
        first, second = await self.reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2), "big")
        elif size == 127:
            size = int.from_bytes(await self.reader.readexactly(8), "big")
        return first & 0x0F, await self.reader.readexactly(size)

    async def close_code(self) -> int | None:
        """The code that it is closed with; None if the connection broke off first."""
        try:
            while True:
                opcode, data = await self.frame()
                if opcode == 8:
                    return int.from_bytes(data[:2], "big")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


async def test_a_websocket_that_breaks_the_rules_is_closed(served: Served) -> None:
    client, token = await served.client("acme"), await served.token("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    found = {}
    for kind, (data, _) in ABUSES.items():
        socket = await RawSocket.open(served, f"/v1/sandboxes/{id}/terminal?command=cat", token)
        try:
            async with asyncio.timeout(20):
                await socket.send(data)
                found[kind] = await socket.close_code()
        finally:
            socket.writer.transport.abort()
    cut = found.pop("fragments without end")
    assert cut in (None, 1009), "what was still on its way may have reset the connection before its code was read"
    assert found == {kind: code for kind, (_, code) in ABUSES.items() if kind in found}
    assert (await client.get(f"/v1/sandboxes/{id}")).json()["state"] == "ready"


async def test_a_flood_of_pings_is_answered_or_ended_and_others_are_served(served: Served) -> None:
    client, token = await served.client("acme"), await served.token("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    socket = await RawSocket.open(served, f"/v1/sandboxes/{id}/terminal?command=cat", token)

    async def flood() -> None:
        for _ in range(100):  # 50,000 pings, whose answers nobody reads
            await socket.send(_frame(_PING, b"x" * 100) * 500)

    flooding = asyncio.create_task(flood())
    try:
        for _ in range(10):
            assert (await client.get(f"/v1/sandboxes/{id}")).status_code == 200
    finally:
        flooding.cancel()
        await asyncio.wait([flooding])
        socket.writer.transport.abort()
    assert (await client.post(f"/v1/sandboxes/{id}/exec", json={"command": ["true"]})).status_code == 200


async def test_health_tells_nothing_of_anybody(served: Served) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={"name": "secret-plan", "labels": {"a": "secret-label"}})).json()
    anonymous = await served.anonymous()
    for path in ("/healthz", "/readyz", "/v1/openapi.json", "/"):
        answer = await anonymous.get(path)
        told = answer.text + str(answer.headers)
        assert [
            each for each in (made["id"], made["id"][:8], "secret-plan", "secret-label", "acme") if each in told
        ] == []
    assert (await anonymous.get("/metrics")).status_code == 401


async def test_secrets_without_a_gate_are_a_matter_of_the_sandbox_and_not_of_the_server(served: Served) -> None:
    client = await served.client("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    answer = await client.put(f"/v1/sandboxes/{id}/secrets", json={"values": {}})
    assert (answer.status_code, answer.json()["code"]) == (409, "wrong_state")


# creates beyond a limit


async def _flood(client: httpx.AsyncClient, count: int) -> collections.Counter[int]:
    """How often each status is the answer to that many creates at once."""

    async def create() -> int:
        return (await client.post("/v1/sandboxes", json={})).status_code

    return collections.Counter(await asyncio.gather(*(create() for _ in range(count))))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("bound", ["quota", "max_sandboxes"])
async def test_a_thousand_creates_at_once_make_no_more_than_there_may_be(
    tmp_path: Path, own_registry: None, mock_provider: Mock, bound: str
) -> None:
    config = config_of(tmp_path, max_sandboxes=100 if bound == "max_sandboxes" else 10_000)
    settings = {"rate": 1_000_000, "max_calls": 10_000}
    async with serving(tmp_path, mock_provider, config=config, **settings) as served:
        client = await served.client("acme", quota=Quota(sandboxes=100) if bound == "quota" else None)
        client = httpx.AsyncClient(
            base_url=served.url,
            headers=client.headers,
            timeout=150,
            trust_env=False,
            limits=httpx.Limits(max_connections=1000, max_keepalive_connections=0),
        )
        async with client:
            found = await _flood(client, 1000)
            assert found == {201: 100, 429: 900}
            assert await served.server.manager.count() == 100
            assert len(await mock_provider.discover()) == 100
