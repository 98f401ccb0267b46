"""TLS over a duplex, on either side of it."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from skerry.gate.base import Duplex

_RECORD = 1 << 14
_PIECE = 1 << 18
"""Bytes that are opened or sealed at once, so that many small records make few reads and writes."""


class TlsDuplex:
    """A duplex under TLS, which owns the one below. One task may read while another writes."""

    def __init__(self, below: Duplex, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """With `server_name` it is the client's side, and verifies that; without it is the server's."""
        self._below = below
        self._sealed_in, self._sealed_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_name is None
        self._tls = context.wrap_bio(self._sealed_in, self._sealed_out, is_server, server_name)
        self._writing = asyncio.Lock()
        self._is_at_end = False
        self._has_ended = False

    async def handshake(self) -> None:
        """Agree on keys. Raises ssl.SSLError, after the other side was told of it, OSError or SkerryError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._send()
                await self._receive()
            except ssl.SSLError:
                await self._send()
                raise
            else:
                await self._send()
                return

    async def read(self) -> bytes:
        """The next bytes; empty at the end, said or not: whoever knows its length sees what ends too early."""
        while not self._is_at_end:
            pieces: list[bytes] = []
            size = 0
            try:
                while size < _PIECE:
                    piece = self._tls.read(_RECORD)
                    if not piece:
                        raise ssl.SSLEOFError
                    pieces.append(piece)
                    size += len(piece)
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                self._is_at_end = True
            if pieces:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if not self._is_at_end:
                if not self._writing.locked():  # else whoever writes sends it
                    await self._send()
                await self._receive()
        return b""

    async def write(self, data: bytes) -> None:
        """Send, as fast as the other side takes it. Raises OSError or SkerryError."""
        async with self._writing:
            view = memoryview(data)
            while view:
                view = view[self._tls.write(view[:_PIECE]) :]
                await self._below.write(self._sealed_out.read())

    async def close_write(self) -> None:
        """Say that no more will be written; quiet the second time."""
        if self._has_ended:
            return
        self._has_ended = True
        async with self._writing:
            with suppress(ssl.SSLError):  # it wants to read the other side's end too
                self._tls.unwrap()
            await self._below.write(self._sealed_out.read())
            await self._below.close_write()

    async def close(self) -> None:
        """End it, both ways, without a word."""
        await self._below.close()

    async def _send(self) -> None:
        if self._sealed_out.pending:
            async with self._writing:
                await self._below.write(self._sealed_out.read())

    async def _receive(self) -> None:
        data = await self._below.read()
        if data:
            self._sealed_in.write(data)
        else:
            self._sealed_in.write_eof()
