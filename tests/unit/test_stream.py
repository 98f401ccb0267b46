"""The stream on descriptors: order, backpressure, one end, nothing left open."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from skerry.net.stream import HIGH_WATER, FdStream


class Receiver:
    def __init__(self) -> None:
        self.data = bytearray()
        self.ends: list[Exception | None] = []
        self.ended = asyncio.Event()

    def received(self, data: memoryview) -> None:
        assert not self.ends
        self.data += data

    def closed(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 4  # the loop's own


def joined() -> tuple[FdStream, socket.socket]:
    near, far = socket.socketpair()
    far.settimeout(10)
    fd = near.detach()
    return FdStream(fd, fd), far


async def read_exactly(peer: socket.socket, size: int) -> bytes:
    def read() -> bytes:
        pieces = bytearray()
        while len(pieces) < size:
            data = peer.recv(1 << 20)
            assert data
            pieces += data
        return bytes(pieces)

    return await asyncio.to_thread(read)


async def test_bytes_arrive_in_order_both_ways() -> None:
    stream, peer = joined()
    receiver = Receiver()
    stream.start(receiver)
    parts = [os.urandom(size) for size in (0, 1, 5, 70_000, 3, 300_000)]
    stream.write(*parts[:3])
    stream.write(bytearray(parts[3]))
    stream.write(memoryview(parts[4]), parts[5])
    assert await read_exactly(peer, sum(map(len, parts))) == b"".join(parts)
    peer.sendall(b"answer")
    peer.close()
    await asyncio.wait_for(receiver.ended.wait(), 10)
    assert (receiver.data, receiver.ends) == (b"answer", [None])


async def test_what_is_written_before_the_start_is_sent_after_it() -> None:
    stream, peer = joined()
    stream.write(b"early ")
    stream.start(Receiver())
    stream.write(b"late")
    assert await read_exactly(peer, 10) == b"early late"
    stream.close()
    peer.close()


async def test_a_writer_waits_while_much_is_buffered() -> None:
    stream, peer = joined()
    stream.start(Receiver())
    await asyncio.wait_for(stream.drained(), 1)
    size = 4 * HIGH_WATER
    stream.write(b"x" * size)
    waiting = [asyncio.create_task(stream.drained()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    assert len(await read_exactly(peer, size)) == size
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    stream.close()
    peer.close()


async def test_a_close_wakes_who_waits_and_is_told_once() -> None:
    stream, peer = joined()
    receiver = Receiver()
    stream.start(receiver)
    stream.write(b"x" * (8 * HIGH_WATER))
    waiting = asyncio.create_task(stream.drained())
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    stream.write(b"into the void")
    await asyncio.wait_for(waiting, 10)
    await stream.drained()
    assert receiver.ends == [None]
    peer.close()


async def test_a_peer_that_goes_away_ends_the_stream_once() -> None:
    stream, peer = joined()
    receiver = Receiver()
    stream.start(receiver)
    peer.close()
    for _ in range(3):
        stream.write(b"x" * 1000)
    await asyncio.wait_for(receiver.ended.wait(), 10)
    assert len(receiver.ends) == 1


async def test_two_pipes_are_a_stream_too() -> None:
    (read_fd, their_write), (their_read, write_fd) = os.pipe(), os.pipe()
    stream = FdStream(read_fd, write_fd)
    receiver = Receiver()
    stream.start(receiver)
    stream.write(b"up")
    os.write(their_write, b"down")
    assert os.read(their_read, 10) == b"up"
    os.close(their_write)
    await asyncio.wait_for(receiver.ended.wait(), 10)
    assert receiver.data == b"down"
    os.close(their_read)


async def test_a_cancelled_waiter_does_not_disturb_the_others() -> None:
    stream, peer = joined()
    stream.start(Receiver())
    stream.write(b"x" * (2 * HIGH_WATER))
    first, second = (asyncio.create_task(stream.drained()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await read_exactly(peer, 2 * HIGH_WATER)
    await asyncio.wait_for(second, 10)
    stream.close()
    peer.close()
