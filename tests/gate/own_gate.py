"""An installation with a gate of its own, a server on the loopback that its sandboxes may reach, and how it is seen."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from loopback import served
from manager.world import config_of

from skerry.config import Config, NetworkConfig
from skerry.errors import NotFound
from skerry.host import processes
from skerry.host.processes import Process, wait_until_dead
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox

PATIENCE_S = 30.0
HOSTS = {"web.test": ("127.0.0.1",), "other.test": ("127.0.0.1",)}
MODULE = "skerry.gate"

FETCH = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if sys.argv[2] == "direct" else None))
print(opener.open(sys.argv[1], timeout=10).read().decode())
"""
HOLD = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
link.sendall(b"GET /hold HTTP/1.1\\r\\nHost: " + sys.argv[1].encode() + b"\\r\\n\\r\\n")
data = b""
while not data.endswith(b"hello\\r\\n"):
    data += link.recv(100)
print("hello", flush=True)
link.settimeout(None)
try:
    print("more" if link.recv(1) else "ended", flush=True)
except ConnectionError:
    print("ended", flush=True)
"""


def config_with_gate(folder: Path, **settings: Any) -> Config:
    """Settings under which the names of the tests are this host."""
    return config_of(folder, **{"provider": "local", "network": NetworkConfig(hosts=HOSTS), **settings})


def gates(folder: Path) -> list[Process]:
    """Processes that are the gate of an installation."""
    return list(processes.find_by_arguments((MODULE, str(folder)), 2))


def end_gates(folder: Path) -> None:
    """End what lingers, as anybody may."""
    for gate in gates(folder):
        os.kill(gate.pid, signal.SIGTERM)
        assert wait_until_dead([gate], PATIENCE_S)
    assert gates(folder) == []


def kill_gate(folder: Path) -> None:
    (gate,) = gates(folder)
    assert wait_until_dead([gate], PATIENCE_S, kill=True)


@asynccontextmanager
async def web() -> AsyncIterator[int]:
    """The port of a web server that says hello, and at /hold begins to and never ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/hold" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
            await writer.drain()

    async with served(serve) as port:
        yield port


async def fetch(sandbox: AsyncSandbox, url: str, how: str = "direct") -> str:
    """What code in the box gets from a URL, or the last line of its trouble."""
    done = await sandbox.exec(["python3", "-c", FETCH, url, how], timeout_s=PATIENCE_S)
    return done.stdout.decode().strip() if done.exit_code == 0 else done.stderr.decode().strip().splitlines()[-1]


class Held:
    """A process in the box with an open connection, which it tells the end of."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._chunks = aiter(process)

    async def says(self) -> str:
        """Its next line."""
        text = b""
        async with asyncio.timeout(PATIENCE_S):
            while not text.endswith(b"\n"):
                fd, data = await anext(self._chunks)
                assert fd == 1, data
                text += data
        return text.decode().strip()

    async def end(self) -> None:
        with suppress(NotFound):  # it has ended with its connection
            await self._process.kill()
        async for _ in self._chunks:
            pass


@asynccontextmanager
async def hold(sandbox: AsyncSandbox, name: str, port: int) -> AsyncIterator[Held]:
    """Connect from the box, and stay so."""
    held = Held(await sandbox.start(["python3", "-c", HOLD, name, str(port)]))
    assert await held.says() == "hello"
    try:
        yield held
    finally:
        await held.end()


async def eventually(is_so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)
