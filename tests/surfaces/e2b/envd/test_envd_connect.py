"""The Connect protocol as hostile and clumsy clients speak it."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from surfaces.e2b.envd.envd_world import Client, Sandboxed, packed

START, LIST = "process.Process/Start", "process.Process/List"
TRUE = {"process": {"cmd": "true"}}
CODES = {"internal", "invalid_argument", "resource_exhausted", "unimplemented"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0\0\0", "invalid_argument"),
        (b"\0\0\0\0\x09{}", "invalid_argument"),
        (packed(TRUE)[:-1], "invalid_argument"),
        (packed(TRUE, 1), "internal"),
        (packed(TRUE, 4), "invalid_argument"),
        (packed(TRUE) * 2, "invalid_argument"),
        (packed({}, 2), "invalid_argument"),
        (struct.pack(">BI", 0, 0xFFFFFFFF), "resource_exhausted"),
        (struct.pack(">BI", 0, 3) + b"no ", "invalid_argument"),
        (struct.pack(">BI", 0, 2) + b"[]", "invalid_argument"),
        (struct.pack(">BI", 0, 4) + b'"\xff"\n', "invalid_argument"),
        (packed({"process": {"cmd": 7}}), "invalid_argument"),
        (packed({"process": {"cmd": ""}}), "invalid_argument"),
        (packed({"process": {"cmd": "a\0b"}}), "invalid_argument"),
        (packed({"process": {"cmd": "true", "envs": {"A=B": "c"}}}), "invalid_argument"),
        (packed({"process": {"cmd": "true"}, "pty": {"size": {"rows": 70_000}}}), "invalid_argument"),
        (struct.pack(">BI", 0, 200_000) + b"[" * 200_000, "invalid_argument"),
    ],
)
async def test_a_stream_that_breaks_the_protocol_ends_with_an_error(envd: Client, body: bytes, code: str) -> None:
    status, error = await envd.failure(START, body)
    assert (status, error["code"]) == (200, code)
    assert (await envd.run("echo", "well"))[0] == b"well\n"


@pytest.mark.parametrize("body", [b"no json", b"[]", b"{", b'{"a": ' * 100_000, b"\xff", b"null"])
async def test_a_message_that_is_not_readable_is_an_invalid_argument(envd: Client, body: bytes) -> None:
    response = await envd.http.post(f"/{LIST}", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")


async def test_a_message_that_is_too_large_is_refused_without_being_kept(envd: Client) -> None:
    async def endless() -> Any:
        for _ in range(64):
            yield bytes(1 << 20)

    head = {"content-type": "application/json"}
    response = await envd.http.post("/process.Process/SendInput", content=endless(), headers=head)
    assert (response.status_code, response.json()["code"]) == (429, "resource_exhausted")
    assert response.headers["should-retry"] == "false"


async def test_other_forms_and_compressions_are_refused(envd: Client) -> None:
    for kind in ("application/proto", "text/plain", "application/connect+json"):
        response = await envd.http.post(f"/{LIST}", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 415
        assert "application/json" in response.headers["accept-post"]
    response = await envd.http.post(f"/{START}", content=b"{}", headers={"content-type": "application/json"})
    assert response.status_code == 415
    assert await envd.code(LIST, {}, content_encoding="gzip") == "unimplemented"
    _, error = await envd.failure(START, packed(TRUE), connect_content_encoding="gzip")
    assert error["code"] == "unimplemented"
    assert await envd.result(LIST, {}, content_encoding="identity") == {"processes": []}


async def test_fields_that_nobody_knows_are_passed_over(envd: Client) -> None:
    text, _ = await envd.run("echo", options={"process": {"cmd": "echo", "args": ["a"], "new": 1}, "more": [1]})
    assert text == b"a\n"


async def test_a_message_may_come_slowly_and_its_client_may_go(envd: Client) -> None:
    message = packed(TRUE)
    head = (
        f"POST /{START} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/connect+json\r\n"
        f"content-length: {len(message)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", envd.port)
    for at in range(len(message)):
        writer.write((head if at == 0 else b"") + message[at : at + 1])
        await writer.drain()
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    _, writer = await asyncio.open_connection("127.0.0.1", envd.port)
    writer.write(head + message[:3])
    await writer.drain()
    writer.close()
    assert (await envd.run("echo", "well"))[0] == b"well\n"


async def test_an_unknown_call_and_another_method_are_refused(envd: Client) -> None:
    assert (await envd.call("process.Process/Fork")).status_code == 404
    assert (await envd.http.get(f"/{LIST}")).status_code == 405


async def test_the_sandbox_tells_that_it_is_well_what_it_uses_and_its_environment(
    envd: Client, boxed: Sandboxed
) -> None:
    boxed.envs = {"A": "b"}
    assert (await envd.http.get("/health")).status_code == 204
    metrics = (await envd.http.get("/metrics")).json()
    assert metrics["mem_used"] > 0
    assert metrics["disk_total"] > 0
    assert (await envd.http.get("/envs")).json() == {"A": "b"}
    assert (await envd.run("/bin/sh", "-c", "echo $A"))[0] == b"b\n"


async def test_an_answer_to_a_stream_is_json_in_envelopes(envd: Client) -> None:
    head = {"content-type": "application/connect+json"}
    response = await envd.http.post(f"/{START}", content=packed(TRUE), headers=head)
    assert response.headers["content-type"] == "application/connect+json"
    assert "content-length" not in response.headers
    flags, length = struct.unpack_from(">BI", response.content)
    assert flags == 0
    assert "start" in json.loads(response.content[5 : 5 + length])["event"]


async def test_a_client_that_goes_before_anything_is_told_is_no_failure_of_ours(
    envd: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(20):
        for path, kind in ((START, "connect+json"), (LIST, "json"), ("files?path=x", "octet-stream")):
            _, writer = await asyncio.open_connection("127.0.0.1", envd.port)
            head = f"POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/{kind}\r\ncontent-length: 99\r\n\r\n"
            writer.write(head.encode() + b"\0\0")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert (await envd.run("echo", "well"))[0] == b"well\n"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_an_error_says_in_our_words_too_what_it_is_and_whether_the_machinery_failed(
    envd: Client, boxed: Sandboxed
) -> None:
    missing = (await envd.call("filesystem.Filesystem/Stat", {"path": "/nothing"})).json()
    assert (missing["code"], missing["error_code"], missing["infrastructure"]) == ("not_found", "path_not_found", False)
    content = await envd.http.get("/files?path=/nothing")
    assert content.json() == {"code": 404, "message": "path '/nothing' does not exist"}  # and nothing more, for the SDK
    assert content.headers["skerry-error-code"] == "path_not_found"
    assert content.headers["skerry-infrastructure"] == "false"
    await boxed.sandbox.connection.provider.destroy(boxed.sandbox.id)
    for answer in (
        await envd.call("filesystem.Filesystem/Stat", {"path": "/"}),
        await envd.http.get("/files?path=/nothing"),
    ):
        assert answer.status_code == 502
        assert (answer.json()["error_code"], answer.json()["infrastructure"]) == ("sandbox_gone", True)
