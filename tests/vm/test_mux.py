"""Many streams over one channel: both ends, for real, without a machine between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from skerry.errors import AgentUnreachable
from skerry.net import dial

from .mux_pair import Pair

PATIENCE_S = 20
BIG = 3 << 20
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def serving(path: Path, serve: Serve) -> AsyncIterator[str]:
    """A service of the guest."""

    running: set[asyncio.Task[None] | None] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            try:
                await serve(reader, writer)
            except asyncio.CancelledError:
                writer.transport.abort()
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_unix_server(guarded, path, backlog=400):
        yield str(path)
        for task in running:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, running))


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Talks without end and listens to nobody."""
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


@contextlib.asynccontextmanager
async def connected(
    pair: Pair, port: int, begin: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(pair.path)
    try:
        writer.write(b"CONNECT %d\n" % port + begin)
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"OK ")
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def happens(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (it is another thread's doing)
            await asyncio.sleep(0.005)


async def send_all(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


async def is_echoed(pair: Pair, port: int, data: bytes) -> bool:
    async with connected(pair, port) as (reader, writer):
        sending = asyncio.create_task(send_all(writer, data))
        got = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        await sending
        return got == data


async def test_big_data_goes_both_ways_beside_streams_that_nobody_reads(pair: Pair, tmp_path: Path) -> None:
    data = os.urandom(BIG)
    async with serving(tmp_path / "echo", echo) as path, serving(tmp_path / "stall", stall) as stalled:
        pair.start_host()
        pair.start_guest(_52=path, _53=stalled)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(10):
                _, writer = await stack.enter_async_context(connected(pair, 53))
                writer.write(bytes(BIG))  # and it reads nothing
            assert all(await asyncio.gather(*(is_echoed(pair, 52, data[n:]) for n in range(10))))
    assert pair.told == []


async def test_hundreds_of_streams_after_each_other_leave_nothing_behind(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        for _ in range(20):
            assert all(await asyncio.gather(*(is_echoed(pair, 52, b"x" * 300) for _ in range(30))))
        assert pair.host is not None
        assert pair.guest is not None
        await happens(lambda: not pair.host.streams and not pair.guest.streams)


async def test_more_callers_than_streams_wait_for_their_turn(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        assert all(await asyncio.gather(*(is_echoed(pair, 52, b"x" * 30_000) for _ in range(300))))


async def test_the_agents_own_dialler_understands_the_answer(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        stream = await dial.firecracker(pair.path, 52)
        stream.close()


async def test_a_port_that_nobody_serves_is_refused(pair: Pair, tmp_path: Path) -> None:
    pair.start_host()
    pair.start_guest(_52=str(tmp_path / "nothing"))
    for port in (52, 53, 1024, 0xFFFFFFFF):
        with pytest.raises(AgentUnreachable, match="nothing listens there"):
            await dial.firecracker(pair.path, port)


@pytest.mark.parametrize("line", [b"HELLO\n", b"CONNECT\n", b"CONNECT 4294967296\n", b"CONNECT -1\n", b"C" * 40, b"\n"])
async def test_what_is_no_connect_is_closed_without_a_word(pair: Pair, line: bytes) -> None:
    pair.start_host()
    pair.start_guest()
    reader, writer = await asyncio.open_unix_connection(pair.path)
    writer.write(line)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()


async def test_a_request_may_follow_connect_at_once_or_come_in_pieces(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        async with connected(pair, 52, b"at once") as (reader, _):
            assert await asyncio.wait_for(reader.readexactly(7), PATIENCE_S) == b"at once"
        reader, writer = await asyncio.open_unix_connection(pair.path)
        for piece in (b"conn", b"ect 5", b"2\r\nin pieces"):
            writer.write(piece)
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"OK ")
        assert await asyncio.wait_for(reader.readexactly(9), PATIENCE_S) == b"in pieces"
        writer.close()


async def test_each_direction_ends_by_itself(pair: Pair, tmp_path: Path) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        writer.write(b"%d" % len(await reader.read(-1)))
        await writer.drain()

    async def talk_and_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await heard.put(await reader.read(-1))

    async with serving(tmp_path / "a", count) as counter, serving(tmp_path / "b", talk_and_end) as listener:
        pair.start_host()
        pair.start_guest(_52=counter, _53=listener)
        async with connected(pair, 52) as (reader, writer):
            await send_all(writer, bytes(BIG))
            assert await asyncio.wait_for(reader.read(-1), PATIENCE_S) == b"first%d" % BIG
        async with connected(pair, 53) as (reader, writer):
            assert await asyncio.wait_for(reader.read(-1), PATIENCE_S) == b""
            await send_all(writer, b"still heard")
            assert await asyncio.wait_for(heard.get(), PATIENCE_S) == b"still heard"


async def test_what_was_sent_before_a_full_close_still_arrives(pair: Pair, tmp_path: Path) -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def listen_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while data := await reader.read(4096):
            count += len(data)
            await asyncio.sleep(0)
        await heard.put(count)

    async with serving(tmp_path / "slow", listen_slowly) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        async with connected(pair, 52) as (_, writer):
            writer.transport.set_write_buffer_limits(0)
            writer.write(bytes(500_000))
            await writer.drain()
        assert await asyncio.wait_for(heard.get(), PATIENCE_S) == 500_000


async def test_a_service_that_goes_away_closes_its_stream(pair: Pair, tmp_path: Path) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with serving(tmp_path / "leave", leave) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        async with connected(pair, 52) as (reader, writer):
            writer.write(b"xyz")
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_streams_wait_for_a_guest_that_is_not_up(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        early = asyncio.create_task(is_echoed(pair, 52, b"early"))
        gone, writer = await asyncio.open_unix_connection(pair.path)
        writer.write(b"CONNECT 52\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        pair.from_guest(b"a boot loader's words")
        pair.start_guest(_52=path)
        assert await asyncio.wait_for(early, PATIENCE_S)
        assert await gone.read() == b""


async def test_whoever_waits_for_the_guest_is_told_each_time_it_comes_up(pair: Pair) -> None:
    seen = asyncio.Semaphore(0)

    async def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.release()
        writer.close()

    async with await asyncio.start_unix_server(note, pair.ready):
        pair.start_host()
        pair.start_guest()
        await asyncio.wait_for(seen.acquire(), PATIENCE_S)
        pair.replace_host()
        await asyncio.wait_for(seen.acquire(), PATIENCE_S)


async def test_the_channels_end_closes_every_stream(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path:
        pair.start_host()
        pair.start_guest(_52=path)
        async with connected(pair, 52) as (reader, _):
            pair.do(lambda: pair.host and pair.host.close())
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_a_new_host_starts_clean_where_an_old_one_left_off(pair: Pair, tmp_path: Path) -> None:
    async with serving(tmp_path / "echo", echo) as path, serving(tmp_path / "stall", stall) as stalled:
        pair.start_host()
        pair.start_guest(_52=path, _53=stalled)
        for _ in range(5):
            async with connected(pair, 53) as (old, writer), connected(pair, 52) as (other, _):
                writer.write(bytes(BIG))  # frames are under way both ways when the host goes
                assert await asyncio.wait_for(old.readexactly(1 << 16), PATIENCE_S)
                pair.replace_host()
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(old.read(), PATIENCE_S)
                    assert await asyncio.wait_for(other.read(), PATIENCE_S) == b""
            assert await is_echoed(pair, 52, os.urandom(200_000))
    assert pair.told == []
