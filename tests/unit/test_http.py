"""The HTTP client against servers that answer well, badly, slowly, or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from skerry.net.http import HttpClient, HttpError, NoAnswer, UpgradeRefused
from skerry.testing.conformance.base import eventually

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


async def last(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        pass


async def test_a_flood_of_lines_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """There is always more to receive, so only a turn of the loop lets the deadline of whoever reads come."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def flood() -> None:
            connection, _ = listener.accept()
            with connection, suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b'{"status":"more"}\n' * 10_000)

        flooding = asyncio.create_task(asyncio.to_thread(flood))
        async with HttpClient(f"unix://{tmp_path / 's'}").stream("GET", "/x") as answer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(last(answer.lines()), 0.2)
        await flooding


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
        assert await echoed(client, 9) == b"earlylate"


class Heard:
    """Receiver that keeps all, until there is enough."""

    def __init__(self, data: bytes, enough: int) -> None:
        self.data, self._enough = data, enough
        self.is_enough = asyncio.get_running_loop().create_future()

    def received(self, data: memoryview) -> None:
        self.data += bytes(data)
        if len(self.data) >= self._enough and not self.is_enough.done():
            self.is_enough.set_result(None)

    def closed(self, error: Exception | None) -> None:
        return


async def echoed(client: HttpClient, count: int) -> bytes:
    """What comes over a connection that was upgraded, once we have said `late`."""
    stream, early = await client.upgrade("POST", "/x", json={})
    try:
        heard = Heard(early, count)
        stream.start(heard)
        stream.write(b"late")
        async with asyncio.timeout(5):
            await heard.is_enough
        return heard.data
    finally:
        stream.close()


async def test_an_upgrade_that_is_refused_tells_why(tmp_path: Path) -> None:
    async with server(tmp_path, answers(b"HTTP/1.1 409 Conflict\r\nContent-Length: 3\r\n\r\nwhy")) as client:
        with pytest.raises(UpgradeRefused) as caught:
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


async def test_every_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of this machine often mean ::1 first, where nothing may listen."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host = next(line for line in head.split(b"\r\n") if line.startswith(b"Host: "))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(host) + host)
        writer.close()

    loop = asyncio.get_running_loop()
    for family, name, host in (
        (socket.AF_INET, "127.0.0.1", "several.test"),
        (socket.AF_INET6, "::1", "several.test"),
        (socket.AF_INET6, "::1", "[::1]"),
    ):
        try:
            listening = await asyncio.start_server(serve, name, 0, family=family)
        except OSError:
            continue  # no IPv6 here
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            found = [(socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port))]
            answer = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in found]

            async def addresses(asked: str, *_: object, answer: list[Any] = answer, **__: object) -> list[Any]:
                return answer if asked == "several.test" else answer[:1]

            monkeypatch.setattr(loop, "getaddrinfo", addresses)
            told = await HttpClient(f"http://{host}:{port}").request("GET", "/x")
            assert told.body == f"Host: {host}:{port}".encode()


ANSWERS = r"""
import sys
head = b""
while not head.endswith(b"\r\n\r\n"):
    head += sys.stdin.buffer.read(1)
sys.stdout.buffer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
"""


async def test_a_process_can_be_the_way_and_ends_with_the_request() -> None:
    client = HttpClient("ssh://there", through=[sys.executable, "-c", ANSWERS], timeout_s=20)
    assert (await client.request("GET", "/x")).body == b"ok"
    says = "import sys; sys.exit('Host key verification failed.')"
    with pytest.raises(NoAnswer, match=r"there: Host key verification failed\."):
        await HttpClient("ssh://there", through=[sys.executable, "-c", says], timeout_s=20).request("GET", "/x")
    with pytest.raises(NoAnswer, match="No such file"):
        await HttpClient("ssh://there", through=["/nonexistent/ssh"], timeout_s=20).request("GET", "/x")
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(NoAnswer, match="did not answer"):
        await HttpClient("ssh://there", through=silent, timeout_s=0.5).request("GET", "/x")
    mine = Path(f"/proc/self/task/{os.getpid()}/children")

    async def are_gone() -> bool:
        return not any(b"sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in mine.read_text().split())

    await eventually(are_gone, "the process is gone")
