"""A server with one real sandbox, programs that listen in it, and clients of its ports."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from manager.world import config_of
from surfaces.server.world import Served, serving

from skerry.aio import backoff
from skerry.config import ServerSettings
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.server.limits import Limits

MIRROR = """
import base64, hashlib, http.server, json, socketserver, struct

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): pass

    def answer(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.upgrade()
        length = self.headers.get("Content-Length")
        if self.headers.get("Transfer-Encoding"):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(length or 0))
        seen = {"method": self.command, "path": self.path, "headers": self.headers.items(), "size": len(body),
                "digest": hashlib.sha256(body).hexdigest()}
        data = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def upgrade(self):
        if self.path.startswith("/refused"):
            self.send_error(418)
            return
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "websocket")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        if "chat" in (self.headers.get("Sec-WebSocket-Protocol") or ""):
            self.send_header("Sec-WebSocket-Protocol", "chat")
        self.end_headers()
        self.send(1, json.dumps(self.headers.items()).encode())
        while True:
            opcode, data = self.read()
            if opcode == 8:
                self.send(8, data)
                self.close_connection = True
                return
            if data == b"garbage":
                self.wfile.write(b"\\xff" * 64)
            elif data == b"close":
                self.send(8, struct.pack("!H", 4321) + b"enough")
            elif data == b"large":
                self.send(2, b"x" * (5 << 20))
            else:
                self.send(opcode, data)

    def read(self):
        first, second = self.rfile.read(2)
        size = second & 127
        size = struct.unpack("!H", self.rfile.read(2))[0] if size == 126 else size
        size = struct.unpack("!Q", self.rfile.read(8))[0] if size == 127 else size
        mask = self.rfile.read(4)
        data = self.rfile.read(size)
        mask = (mask * (size // 4 + 1))[:size]
        return first & 15, (int.from_bytes(data, "big") ^ int.from_bytes(mask, "big")).to_bytes(size, "big")

    def send(self, opcode, data):
        size = len(data)
        small, middle, large = bytes([min(size, 125)]), ("!BH", 126, size), ("!BQ", 127, size)
        head = small if size < 126 else struct.pack(*(middle if size < 65536 else large))
        self.wfile.write(bytes([128 | opcode]) + head + data)

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

with Server(("127.0.0.1", 0), Handler) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""
"""Tells what reached it, or sends back each message of a WebSocket."""

SAYS = """
import socket, sys, threading

def serve(client):
    with client:
        head = b""
        while b"\\r\\n\\r\\n" not in head:
            piece = client.recv(65536)
            if not piece:
                return
            head += piece
        try:
            for _ in range(TIMES):
                client.sendall(DATA)
            HOLD and client.recv(1)
        except OSError:
            pass

with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""
"""Says one thing to everybody, whatever they ask for."""


class Box:
    """A sandbox whose ports are looked at."""

    def __init__(self, served: Served, api: httpx.AsyncClient, sandbox: AsyncSandbox) -> None:
        self.served = served
        self.api = api
        self.sandbox = sandbox
        self.id = sandbox.id
        self.path = f"/v1/sandboxes/{sandbox.id}/ports"

    async def run(self, program: str) -> int:
        """Start a program that prints its port; that."""
        process = await self.sandbox.start(["python3", "-u", "-c", program], background=True)
        async for _, data in process:
            return int(data)
        raise AssertionError((await process.wait()).stderr)

    async def mirror(self) -> int:
        return await self.run(MIRROR)

    async def says(self, data: bytes, *, times: int = 1, hold: bool = False) -> int:
        """A port that says one thing; with `hold` the connection stays open after it."""
        return await self.run(f"DATA, TIMES, HOLD = {data!r}, {times}, {hold}\n{SAYS}")

    async def link(self, port: int, **body: Any) -> str:
        """The URL of a new link."""
        answer = await self.api.post(f"{self.path}/{port}/link", json=body)
        assert answer.status_code == 201, answer.text
        url: str = answer.json()["url"]
        return url

    def host(self, port: int) -> str:
        return f"{port}-{self.id}.localhost:{urlsplit(self.served.url).port}"

    async def browser(self) -> httpx.AsyncClient:
        """A client that reaches names below localhost, keeps cookies and knows no token."""
        return await self.served.anonymous(transport=_Loopback(), follow_redirects=True)

    async def opened(self, port: int) -> httpx.AsyncClient:
        """A browser that has followed a link."""
        browser = await self.browser()
        browser.base_url = httpx.URL(f"http://{self.host(port)}")
        url = await self.link(port)
        answer = await browser.get(url, follow_redirects=False)
        assert answer.status_code == 303
        return browser

    async def cookie(self, port: int) -> str:
        """The cookie that a new link becomes, as it is sent."""
        answer = await (await self.browser()).get(await self.link(port), follow_redirects=False)
        return answer.headers["set-cookie"].partition(";")[0]

    def bound(self, **settings: int) -> None:
        """Have the server keep to other limits from now on, while time stands still for them."""
        options = ServerSettings(**settings)
        self.served.server.limits = Limits(lambda: options, lambda: 0.0)

    def connections(self) -> int:
        """How many connections to the sandbox are open."""
        callers = self.served.server.limits._callers
        return callers[name].calls if (name := f"ports:{self.id}") in callers else 0

    async def is_quiet(self) -> None:
        """Wait until no connection to the sandbox is open any more."""
        for delay_s in backoff(0.01, 0.1, 20.0):
            if not self.connections():
                return
            await asyncio.sleep(delay_s)
        raise AssertionError("a connection is open still")

    async def raw(self, data: bytes) -> bytes:
        """All that the server says to these bytes, until it closes or is silent after a whole answer."""
        return await raw(self.served, data)


class _Loopback(httpx.AsyncHTTPTransport):
    """Connects to 127.0.0.1 whatever the name is, as resolvers do with those below localhost."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url.copy_with(host="127.0.0.1")
        here = httpx.Request(
            request.method, url, headers=request.headers, stream=request.stream, extensions=request.extensions
        )
        return await super().handle_async_request(here)


async def raw(served: Served, data: bytes) -> bytes:
    """All that a server says to these bytes on one connection, until it closes it."""
    address = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    """The status of each answer in what a server said."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]


@asynccontextmanager
async def boxed(folder: Path, **settings: Any) -> AsyncIterator[Box]:
    """A server with a tenant `acme`, which has one sandbox of the `local` provider."""
    config = config_of(folder, provider="local", providers={"local": {"state_dir": str(folder / "local")}})
    async with serving(folder, config=config, **settings) as served:
        api = await served.client("acme")
        made = await api.post("/v1/sandboxes", json={})
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        try:
            yield Box(served, api, await served.server.manager.get(id))
        finally:
            await served.server.manager.destroy(id, grace_s=0)
