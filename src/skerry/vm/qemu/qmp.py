"""QEMU's control socket: one question at a time, each with a deadline; and the state of its devices, out and in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import ProviderError, printable
from skerry.net.dial import connect_unix
from skerry.vm.qemu.ram import MemoryReader

_TIMEOUT_S = 10.0
_MAX_LINE = 1 << 20
_MAX_EVENTS = 1024
"""Events that QEMU may tell before it answers, or tells of what is waited for; the last few are kept."""
_KEPT_EVENTS = 16
_TOO_MUCH = "QEMU says more than it should"
_CAPABILITIES = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
_FD = "state"
_MIGRATION_S = 30
_MAX_STATE = 256 << 20
_MEMORY_S = 300
_MEMORY_PIECE = 1 << 20
_AT_ONCE = {"max-bandwidth": 1 << 40, "downtime-limit": 2_000_000}
"""Of a machine that stands still all is sent in one go."""


class QmpError(ProviderError):
    """Refusal of QEMU, with its reason."""


class QmpGone(ProviderError):
    """No QEMU answers."""


class Qmp:
    """Connection to a QEMU; `greet` comes first."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._received = b""
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)

    async def execute(self, command: str, arguments: Mapping[str, object] = {}, *, fd: int | None = None) -> Any:
        """Ask for a command and return its answer; a descriptor goes along. Raises QmpError, QmpGone, ProviderError."""
        question = msgspec.json.encode({"execute": command, "arguments": arguments})
        async with self._deadline(command):
            if fd is None:
                await asyncio.get_running_loop().sock_sendall(self._sock, question)
            elif socket.send_fds(self._sock, [question], [fd]) != len(question):
                raise ProviderError(f"QEMU does not take {command}")
            for _ in range(_MAX_EVENTS):
                message = await self._read()
                if "event" in message:
                    self._events.append(message)
                elif "error" in message:
                    raise QmpError(f"QEMU refuses {command}: {_reason(message['error'])}")
                else:
                    return message.get("return")
            raise ProviderError(_TOO_MUCH)

    async def event(self, name: str, data: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
        """Wait for the next event of that name in which each field has one of these values; returns its data."""
        async with self._deadline(name):
            for _ in range(_MAX_EVENTS):
                message = self._events.popleft() if self._events else await self._read()
                data_of: Any = message.get("data")
                found: dict[str, Any] = data_of if isinstance(data_of, dict) else {}
                if message.get("event") == name and all(found.get(field) in values for field, values in data.items()):
                    return found
            raise ProviderError(_TOO_MUCH)

    async def _read(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE:
                raise ProviderError(_TOO_MUCH)
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
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProviderError(f"QEMU does not speak its own protocol: {error}") from error

    async def greet(self) -> None:
        """Take its greeting. Raises QmpGone, ProviderError."""
        async with self._deadline("the greeting"):
            await self._read()
        await self.execute("qmp_capabilities")


def _reason(error: object) -> str:
    reason = error.get("desc") if isinstance(error, dict) else None
    return printable(str(reason or "it does not say why"))


@contextlib.asynccontextmanager
async def connect(path: str | os.PathLike[str], timeout_s: float = _TIMEOUT_S) -> AsyncIterator[Qmp]:
    """Connect to a QEMU, which serves one at a time: the next waits. Raises QmpGone."""
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


async def send_state(control: Qmp) -> bytes:
    """State of the devices of a machine that was stopped. Raises ProviderError."""
    async with asyncio.timeout(_MIGRATION_S):
        with await _state_socket(control) as ours:
            await control.execute("migrate", {"uri": f"fd:{_FD}"})
            state = bytearray()
            while piece := await asyncio.get_running_loop().sock_recv(ours, 1 << 18):
                state += piece
                if len(state) > _MAX_STATE:
                    raise ProviderError("the state of the machine has no end")
        await _finish(control)
    return bytes(state)


async def send_memory(control: Qmp, memory: Path, size: int) -> bytes:
    """The same of one whose memory is its own: that goes to a sparse file of that size. Raises ProviderError."""
    async with asyncio.timeout(_MEMORY_S):
        await control.execute("migrate-set-parameters", _AT_ONCE)
        with await _state_socket(control) as ours:
            await control.execute("migrate", {"uri": f"fd:{_FD}"})
            ours.settimeout(_MIGRATION_S)
            try:
                state = await asyncio.to_thread(_receive_memory, ours, memory, size)
            except OSError as error:
                raise ProviderError(f"the machine's memory cannot be kept: {error}") from error
            finally:
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)  # for a thread that nobody waits for any more
        await _finish(control)
    return state


def _receive_memory(sock: socket.socket, memory: Path, size: int) -> bytes:
    fd = os.open(memory, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0):
        reader = MemoryReader(fd, size)
        while piece := sock.recv(_MEMORY_PIECE):
            reader.feed(piece)
    return reader.finish()


async def receive_state(control: Qmp, state: bytes) -> None:
    """Give the state of its devices to a machine that waits for it. Raises ProviderError."""
    async with asyncio.timeout(_MIGRATION_S):
        with await _state_socket(control) as ours:
            await control.execute("migrate-incoming", {"uri": f"fd:{_FD}"})
            try:
                await asyncio.get_running_loop().sock_sendall(ours, state)
            except OSError as error:
                raise ProviderError(f"QEMU does not take the state: {error.strerror}") from error
        await _finish(control)


async def _state_socket(control: Qmp) -> socket.socket:
    """Our end of a socket pair; QEMU may open nothing, so it is given the other."""
    await control.execute("migrate-set-capabilities", {"capabilities": _CAPABILITIES})
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        try:
            await control.execute("getfd", {"fdname": _FD}, fd=theirs.fileno())
        except BaseException:
            ours.close()
            raise
    return ours


async def _finish(control: Qmp) -> None:
    end = await control.event("MIGRATION", {"status": ("completed", "failed")})
    if end["status"] == "failed":
        why = (await control.execute("query-migrate")).get("error-desc", "it does not say why")
        raise ProviderError(f"QEMU failed to move the machine's state: {why}")
