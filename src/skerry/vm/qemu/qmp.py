"""QEMU's control socket: one question at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from skerry.agent.dial import connect_unix
from skerry.errors import ProviderError

_TIMEOUT_S = 10.0
_MAX_LINE = 1 << 20


class QmpError(ProviderError):
    """QEMU refused, and says why."""


class QmpGone(ProviderError):
    """Nobody is there to answer."""


class Qmp:
    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._received = b""
        self._events: list[dict[str, Any]] = []

    async def execute(self, command: str, arguments: Mapping[str, object] = {}, *, fd: int | None = None) -> Any:
        """The answer to a command; a descriptor goes along with it."""
        question = msgspec.json.encode({"execute": command, "arguments": arguments})
        async with self._deadline(command):
            if fd is None:
                await asyncio.get_running_loop().sock_sendall(self._sock, question)
            elif socket.send_fds(self._sock, [question], [fd]) != len(question):
                raise ProviderError(f"QEMU does not take {command}")
            while True:
                message = await self._read()
                if "event" in message:
                    self._events.append(message)
                elif "error" in message:
                    raise QmpError(f"QEMU refuses {command}: {message['error'].get('desc')}")
                else:
                    return message.get("return")

    async def event(self, name: str, data: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
        """The data of the next event of that name in which each field has one of these values."""
        async with self._deadline(name):
            while True:
                message = self._events.pop(0) if self._events else await self._read()
                found: dict[str, Any] = message.get("data") or {}
                if message.get("event") == name and all(found.get(field) in values for field, values in data.items()):
                    return found

    async def _read(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE:
                raise ProviderError("QEMU says more than it should")
            piece = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            if not piece:
                raise QmpGone("QEMU ended")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        message = msgspec.json.decode(line)
        if not isinstance(message, dict):
            raise ProviderError("QEMU does not speak its own protocol")
        return message

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise ProviderError(f"QEMU does not answer {what} within {self._timeout_s:g} s") from None
        except OSError as error:
            raise QmpGone(f"QEMU cannot be asked {what}: {error}") from error
        except msgspec.DecodeError as error:
            raise ProviderError(f"QEMU does not speak its own protocol: {error}") from error

    async def greet(self) -> None:
        async with self._deadline("the greeting"):
            await self._read()
        await self.execute("qmp_capabilities")


@contextlib.asynccontextmanager
async def connect(path: str | os.PathLike[str], timeout_s: float = _TIMEOUT_S) -> AsyncIterator[Qmp]:
    """A connection; QEMU serves one at a time, the next waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        qmp = Qmp(sock, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await connect_unix(sock, os.fspath(path))
        except OSError as error:
            raise QmpGone(f"QEMU's socket {os.fspath(path)} cannot be reached: {error}") from error
        await qmp.greet()
        yield qmp
