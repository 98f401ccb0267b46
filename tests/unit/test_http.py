"""The HTTP client against servers that answer well, badly, slowly, or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skerry.http import HttpClient, HttpError, NoAnswer, Refused

Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(folder: Path, serve: Serve) -> AsyncIterator[HttpClient]:
    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    path = folder / "s"
    async with await asyncio.start_unix_server(on_connect, path):
        yield HttpClient(f"unix://{path}", timeout_s=5)


def answers(raw: bytes) -> Serve:
    async def serve(_head: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return serve


@pytest.mark.parametrize(
    "raw",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}ignored',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;x=y\r\n":1}\r\n0\r\n\r\n',
        b'HTTP/1.0 200 OK\r\n\r\n{"a":1}',
    ],
    ids=["length", "chunks", "to the end"],
)
async def test_a_body_is_read_to_its_end_however_that_is_told(tmp_path: Path, raw: bytes) -> None:
    async with server(tmp_path, answers(raw)) as client:
        answer = await client.request("GET", "/x")
    assert (answer.status, answer.json(dict[str, int])) == (200, {"a": 1})


async def test_the_request_is_what_was_asked(tmp_path: Path) -> None:
    seen = b""

    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = head + await reader.readexactly(9)
        writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")

    async with server(tmp_path, serve) as client:
        query = {"all": True, "filters": {"label": ["a=b"]}, "left": None}
        await client.request("POST", "/x", query=query, json={"key": 1})
    assert seen.startswith(b"POST /x?all=1&filters=%7B%22label%22%3A%5B%22a%3Db%22%5D%7D HTTP/1.1\r\n")
    assert seen.endswith(b'\r\n\r\n{"key":1}')


async def test_a_body_that_is_made_on_the_way_is_sent_in_chunks(tmp_path: Path) -> None:
    async def serve(_head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent)

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        yield b""
        yield b"two"

    async with server(tmp_path, serve) as client:
        answer = await client.request("PUT", "/x", body=body())
    assert answer.body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_a_refusal_that_comes_while_the_body_is_sent_is_the_answer(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)

    async with server(tmp_path, answers(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno")) as client:
        answer = await client.request("PUT", "/x", body=endless())
    assert (answer.status, answer.body) == (413, b"no")


async def test_lines_come_one_by_one_wherever_the_pieces_are_cut(tmp_path: Path) -> None:
    raw = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n9\r\n1}\n{"b":2\r\n2\r\n}\n\r\n0\r\n\r\n'
    async with server(tmp_path, answers(raw)) as client, client.stream("GET", "/x") as answer:
        assert [line async for line in answer.lines()] == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nshort",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{",
    ],
    ids=["nothing", "not HTTP", "cut short", "bad chunk", "cut chunk", "long head", "negative length"],
)
async def test_what_is_no_answer_is_an_error(tmp_path: Path, raw: bytes) -> None:
    async with server(tmp_path, answers(raw)) as client:
        with pytest.raises(HttpError):
            (await client.request("GET", "/x")).json(dict[str, int])


async def test_one_who_never_answers_is_given_up_by_the_deadline(tmp_path: Path) -> None:
    async def hang(_head: bytes, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(tmp_path, hang) as client:
        with pytest.raises(NoAnswer, match=r"0\.05 s"):
            await client.request("GET", "/x", timeout_s=0.05)
        with pytest.raises(NoAnswer):
            async with client.stream("GET", "/x", timeout_s=0.05):
                pass


async def test_where_nobody_listens_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="No such file"):
        await HttpClient(f"unix://{tmp_path}/none").request("GET", "/x")


async def test_a_request_cannot_smuggle_a_second_one(tmp_path: Path) -> None:
    with pytest.raises(HttpError, match="characters"):
        await HttpClient(f"unix://{tmp_path}/none").request("GET", "/x HTTP/1.1\r\nHost: a\r\n\r\nDELETE /y")


async def test_an_upgrade_gives_the_connection_and_what_came_early(tmp_path: Path) -> None:
    async def serve(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"Upgrade: tcp" in head
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\nearly")
        writer.write(await reader.readexactly(4))
        await writer.drain()

    async with server(tmp_path, serve) as client:
        fd, early = await client.upgrade("POST", "/x", json={})
        try:
            os.set_blocking(fd, True)
            await asyncio.to_thread(os.write, fd, b"late")
            came = early
            while len(came) < 9:
                came += await asyncio.to_thread(os.read, fd, 100)
            assert came == b"earlylate"
        finally:
            os.close(fd)


async def test_an_upgrade_that_is_refused_tells_why(tmp_path: Path) -> None:
    async with server(tmp_path, answers(b"HTTP/1.1 409 Conflict\r\nContent-Length: 3\r\n\r\nwhy")) as client:
        with pytest.raises(Refused) as caught:
            await client.upgrade("POST", "/x", json={})
    assert (caught.value.answer.status, caught.value.answer.body) == (409, b"why")


async def test_an_answer_in_tiny_chunks_does_not_multiply_memory(tmp_path: Path) -> None:
    """A piece of two bytes costs Python about fifty."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    count = 50_000
    async with server(tmp_path, answers(head + b"2\r\nab\r\n" * count + b"0\r\n\r\n")) as client:
        tracemalloc.start()
        try:
            answer = await client.request("GET", "/x", timeout_s=50)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert answer.body == b"ab" * count
    assert peak < 20 * count


async def test_what_fails_for_whoever_reads_an_answer_is_not_the_daemons_silence(tmp_path: Path) -> None:
    async with server(tmp_path, answers(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as client:

        async def read() -> None:
            async with client.stream("GET", "/x") as answer:
                async for _ in answer:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(OSError, match="No space left"):
            await read()


async def test_an_answer_that_breaks_off_is_told_while_it_is_read(tmp_path: Path) -> None:
    async with server(tmp_path, answers(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")) as client:
        with pytest.raises(HttpError, match="does not answer as HTTP"):
            async with client.stream("GET", "/x") as answer:
                [piece async for piece in answer]
