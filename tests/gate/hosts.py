"""Real hosts for the opener: TLS servers on loopback with a CA of their own, and an opener between them and clients."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from skerry.gate.authority import Authority
from skerry.gate.base import Duplex, Meter, Policy, Refused
from skerry.gate.ca import bundle, certificate
from skerry.gate.opener import TlsOpener
from skerry.gate.secrets import Vault, placeholder, seed_of
from skerry.model.rules import Rules
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId, new_id

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NAME = "api.example.org"


class StreamDuplex:
    """A duplex on asyncio's streams. As one through an agent, it is reset by `close`: what was not read yet is lost."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.is_closed = False

    async def read(self) -> bytes:
        return await self._reader.read(1 << 18)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close_write(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            sock = self._writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()


class World:
    """A real host, its CA, an opener, and a box with secrets whose connections the opener serves."""

    def __init__(self, folder: Path, handler: Handler, secrets: dict[str, Secret], port: int) -> None:
        self.handler = handler
        self.port = port
        self.folder = folder / "gate"
        self.host_ca = folder / "host"
        trusted = folder / "host.pem"
        trusted.write_text(certificate(self.host_ca))
        self.vault = Vault(self.folder)
        self.opener = TlsOpener(self.folder, self.vault, ca=str(trusted))
        self.id: SandboxId = new_id()
        self.policy = Policy(id=self.id, rules=Rules(), secrets=secrets, labels={"team": "blue"})
        self.bundle = folder / "bundle.pem"
        self.bundle.write_bytes(bundle(self.folder))
        self.meter = Meter()
        self.dials = 0
        self.host_name = NAME
        """The name in the certificate of the real host."""
        self.refusals: list[str] = []
        self.ended = asyncio.Event()
        """Set when a connection of the box has ended."""
        self._host_port = 0
        self.gate_port = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def placeholder(self, name: str, id: SandboxId | None = None) -> str:
        return placeholder(name, seed_of(self.folder, id or self.id))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        tls = Authority(self.host_ca).context(self.host_name) if self.port != 80 else None
        if tls is not None:
            tls.sni_callback = None
        host = await asyncio.start_server(self._kept(self._host), "127.0.0.1", 0, ssl=tls)
        gate = await asyncio.start_server(self._kept(self._serve), "127.0.0.1", 0)
        self._host_port = host.sockets[0].getsockname()[1]
        self.gate_port = gate.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            gate.close()
            host.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            for writer in self._writers:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    async def dial(self) -> Duplex:
        self.dials += 1
        return StreamDuplex(*await asyncio.open_connection("127.0.0.1", self._host_port))

    async def curl(self, path: str, *options: str) -> str:
        """What curl prints, over one connection; asserts that it succeeds."""
        scheme = "http" if self.port == 80 else "https"
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--max-time", "20", "--noproxy", "*", "--cacert", self.bundle),
            *("--connect-to", f"::127.0.0.1:{self.gate_port}", *options, f"{scheme}://{NAME}:{self.port}{path}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, complaint = await process.communicate()
        assert process.returncode == 0, complaint.decode()
        return printed.decode()

    async def connect(self, server_name: str | None = NAME) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of the box, under TLS."""
        context = ssl.create_default_context(cafile=str(self.bundle))
        context.check_hostname = server_name is not None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.gate_port, ssl=context, server_hostname=server_name or ""
        )
        self._writers.append(writer)
        return reader, writer

    async def ask(self, head: str, body: bytes = b"") -> bytes:
        """All that is answered to what a box sends, up to the end of the connection."""
        reader, writer = await self.connect()
        writer.write(head.replace("\n", "\r\n").encode() + body)
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
        writer.close()
        return answer

    def _kept(self, serve: Handler) -> Handler:
        async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(serve(reader, writer))
            self._connections.add(task)
            with suppress(asyncio.CancelledError):
                await task

        return kept

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = StreamDuplex(reader, writer)
        try:
            await self.opener.serve(self.policy, NAME, self.port, client, self.dial, self.meter)
        except Refused as error:
            self.refusals.append(str(error))
        finally:
            await client.close()
            self.ended.set()


async def read_head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    """The first line and the headers of a message."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    return first, [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]


async def read_body(reader: asyncio.StreamReader, headers: list[tuple[str, str]]) -> bytes:
    """A body by its length, or in chunks."""
    fields = dict(headers)
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return body


def answer(body: bytes, head: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {head}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Tell, in JSON, what was asked, until nothing more is."""
    while True:
        first, headers = await read_head(reader)
        if dict(headers).get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await read_body(reader, headers)
        told = {"first": first, "headers": headers, "body": body.decode("latin-1")}
        writer.write(answer(b"" if first.startswith("HEAD") else json.dumps(told).encode()))
        await writer.drain()
