"""Tunnels to real servers, both ways at once, half closed, and refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from loopback import served

from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import Conflict, InvalidSpec, NotFound
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest, wait_until

SIZE = 10_000_000


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hash what comes to its end, while SIZE bytes go the other way; then tell the hash."""

    async def send() -> None:
        for _ in range(SIZE // 100_000):
            writer.write(b"s" * 100_000)
            await writer.drain()

    digest = hashlib.sha256()
    with contextlib.suppress(OSError, ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            while data := await reader.read(1 << 16):
                digest.update(data)
        writer.write(digest.digest())
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with served(serve) as port:
        yield port


async def read_all(tunnel: AsyncTunnel) -> bytes:
    pieces = []
    while data := await tunnel.read():
        pieces.append(data)
    return b"".join(pieces)


async def test_ten_megabytes_go_both_ways_and_each_side_ends_by_itself(sandbox: AsyncSandbox, port: int) -> None:
    content = os.urandom(SIZE)
    async with await sandbox.connect(port) as tunnel:

        async def write() -> None:
            await tunnel.write(content)
            await tunnel.close_write()

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(write())
            reading = group.create_task(read_all(tunnel))
    received = reading.result()
    assert len(received) == SIZE + 32
    assert received[-32:] == hashlib.sha256(content).digest()


async def test_nothing_on_the_port_is_not_found(sandbox: AsyncSandbox) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        tunnel = await sandbox.connect(unused.getsockname()[1])
        with pytest.raises(NotFound):
            await tunnel.read()


def test_only_the_boxs_own_loopback_is_reached(guest: Guest) -> None:
    with guest.wire() as wire:
        hosts = ["10.0.0.1", "0.0.0.0", "169.254.169.254", "example.com", "127.0.0.2", "", 5]
        for id, host in enumerate(hosts, start=1):
            answer = wire.call(id, "connect", port=80, host=host)
            assert answer["error"]["data"]["kind"] in ("denied", "invalid"), host
        for id, port in enumerate([0, -1, 65536, "80", None, 1.5, True], start=50):
            assert wire.call(id, "connect", port=port)["error"]["data"]["kind"] == "invalid", port


async def test_a_forward_is_a_port_like_any_other(sandbox: AsyncSandbox, port: int) -> None:
    async with sandbox.forward(port) as forward:
        address = forward.address
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*forward.address)
            writer.write(b"hello")
            writer.write_eof()
            async with asyncio.timeout(20):
                received = await reader.read()
            assert received[-32:] == hashlib.sha256(b"hello").digest()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        reader, writer = await asyncio.open_connection(*forward.address)
        await reader.read(1)
    async with asyncio.timeout(5):
        await reader.read()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_forward_to_nothing_closes_its_connections(sandbox: AsyncSandbox) -> None:
    async with sandbox.forward(1) as forward, asyncio.timeout(8):
        reader, writer = await asyncio.open_connection(*forward.address)
        assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_peer_that_resets_does_not_make_the_agent_spin(guest: Guest, sandbox: AsyncSandbox) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        tunnel = await sandbox.connect(server.getsockname()[1])
        await tunnel.write(b"never read")
        peer, _ = await asyncio.to_thread(server.accept)
        peer.shutdown(socket.SHUT_WR)
        assert await tunnel.read() == b""
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        before = guest.cpu_s()
        await asyncio.sleep(0.5)
        assert guest.cpu_s() - before < 0.3
        await tunnel.close()


async def test_a_closed_tunnel_closes_the_connection_in_the_box(sandbox: AsyncSandbox, guest: Guest) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(10)
        await sandbox.ping()
        before = len(guest.fds())
        tunnel = await sandbox.connect(server.getsockname()[1])
        peer, _ = await asyncio.to_thread(server.accept)
        peer.settimeout(10)
        await tunnel.close()
        assert await asyncio.to_thread(peer.recv, 1) == b""
        wait_until(lambda: len(guest.fds()) <= before, "the agent let go of it")
        peer.close()


async def fetch(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write_eof()
    data = await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return data


async def test_an_exposed_port_has_one_address_until_the_sandbox_is_closed(sandbox: AsyncSandbox, port: int) -> None:
    address = await sandbox.expose(port)
    assert address.startswith("127.0.0.1:")
    assert await asyncio.gather(*(sandbox.expose(port) for _ in range(5))) == [address] * 5
    other = await sandbox.expose(1)
    assert other != address
    for _ in range(2):
        assert len(await fetch(address)) == SIZE + 32
    await sandbox.close()
    for closed in (address, other):
        with pytest.raises(ConnectionRefusedError):
            await fetch(closed)
    assert len(await fetch(await sandbox.expose(port))) == SIZE + 32


async def test_an_exposed_port_is_where_it_was_asked_to_be(sandbox: AsyncSandbox, port: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        local = free.getsockname()[1]
    assert await sandbox.expose(port, local) == f"127.0.0.1:{local}"
    assert await sandbox.expose(port) == f"127.0.0.1:{local}"
    with pytest.raises(Conflict, match=f"at 127.0.0.1:{local} already"):
        await sandbox.expose(port, local + 1)


async def test_a_port_that_cannot_be_had_is_refused(sandbox: AsyncSandbox, port: int) -> None:
    with pytest.raises(Conflict, match="in use"):
        await sandbox.expose(80, port)
    for inside, outside in ((0, 0), (65536, 0), (80, 65536), (80, -1)):
        with pytest.raises(InvalidSpec, match="port"):
            await sandbox.expose(inside, outside)
