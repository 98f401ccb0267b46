"""The state of a stopped machine's devices, out of QEMU and into another: its memory goes by its file."""

from __future__ import annotations

import asyncio
import socket

from skerry.errors import ProviderError
from skerry.vm.qemu.qmp import Qmp

_CAPABILITIES = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
_FD = "state"
_TIMEOUT_S = 30
_MAX_STATE = 256 << 20


async def send(control: Qmp) -> bytes:
    """The state of a machine that was stopped."""
    async with asyncio.timeout(_TIMEOUT_S):
        with await _connection(control) as ours:
            await control.execute("migrate", {"uri": f"fd:{_FD}"})
            state = bytearray()
            while piece := await asyncio.get_running_loop().sock_recv(ours, 1 << 18):
                state += piece
                if len(state) > _MAX_STATE:
                    raise ProviderError("the state of the machine has no end")
        await _see_through(control)
    return bytes(state)


async def receive(control: Qmp, state: bytes) -> None:
    """Fill a machine that waits for it."""
    async with asyncio.timeout(_TIMEOUT_S):
        with await _connection(control) as ours:
            await control.execute("migrate-incoming", {"uri": f"fd:{_FD}"})
            try:
                await asyncio.get_running_loop().sock_sendall(ours, state)
            except OSError as error:
                raise ProviderError(f"QEMU does not take the state: {error.strerror}") from error
        await _see_through(control)


async def _connection(control: Qmp) -> socket.socket:
    """Our end; QEMU may start nothing and open nothing for this, so it is given the other."""
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


async def _see_through(control: Qmp) -> None:
    end = await control.event("MIGRATION", {"status": ("completed", "failed")})
    if end["status"] == "failed":
        why = (await control.execute("query-migrate")).get("error-desc", "it does not say why")
        raise ProviderError(f"QEMU failed to move the machine's state: {why}")
