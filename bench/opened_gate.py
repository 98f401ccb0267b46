"""`python opened_gate.py FOLDER host`, or `... FOLDER gate PORT`: a TLS server, or a gate before it, as a process of
its own. It prints its ports (the gate's: opened, and passed on as it is) and ends with its standard input."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from skerry.gate.authority import Authority
from skerry.gate.base import Duplex, Meter, Policy
from skerry.gate.opener import TlsOpener
from skerry.gate.secrets import Vault
from skerry.model.rules import Rules
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId

NAME = "api.example.org"
BOX = SandboxId("00000000-0000-4000-8000-000000000000")
BODY = b"x" * 1000
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


class _Streams:
    """A duplex on asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(1 << 18)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close_write(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()


class _Gate:
    """Both ways through the gate."""

    def __init__(self, folder: Path, port: int) -> None:
        vault = Vault(folder / "gate")
        vault.provide(BOX, {"TOKEN": "v" * 40})
        self._opener = TlsOpener(folder / "gate", vault, ca=str(folder / "host.pem"))
        self._policy = Policy(id=BOX, rules=Rules(), secrets={"TOKEN": Secret(hosts=(NAME,))})
        self._port = port

    async def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._opener.serve(self._policy, NAME, 443, _Streams(reader, writer), self._dial, Meter())

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client, host = _Streams(reader, writer), await self._dial()
        await asyncio.gather(_pass_on(client, host), _pass_on(host, client))

    async def _dial(self) -> Duplex:
        return _Streams(*await asyncio.open_connection("127.0.0.1", self._port))


async def _pass_on(source: Duplex, target: Duplex) -> None:
    with suppress(OSError):
        while data := await source.read():
            await target.write(data)
    await target.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, OSError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(_ANSWER)
    writer.close()


async def main(folder: Path, role: str, port: int) -> None:
    if role == "host":
        servers = [await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=Authority(folder / "host").context(NAME))]
    else:
        gate = _Gate(folder, port)
        servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in (gate.open, gate.relay)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0))
