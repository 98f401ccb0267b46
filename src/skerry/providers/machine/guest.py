"""The host's way to the first process of a machine: to see it come up, and to tell it what the machine is to be."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.errors import CreateFailed
from skerry.vm.base import CONTROL_PORT, Hypervisor, Limits, Machine
from skerry.vm.folder import VmFolder

_ENTROPY = 64
_FOR_EVER_S = 1e9


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine becomes, once it is up."""

    user: str | None = None
    home: str
    cwd: str
    env: dict[str, str] = {}
    mount_disk: bool = True
    mount_data: bool = False
    writable_root: bool = False
    lifetime_s: float | None = None
    idle_s: float | None = None
    memory: int | None = None
    pids: int | None = None
    cpus: float | None = None
    tmp: int | None = None
    shm: int | None = None
    rlimits: dict[str, int] = {}
    network: Mapping[str, str] | None = None
    services: Sequence[Sequence[str]] = ()
    forwards: Mapping[str, str] = {}


async def boot(hypervisor: Hypervisor, folder: VmFolder, machine: Machine, limits: Limits | None) -> None:
    """Start a machine and wait until its first process says that it is up. Raises CreateFailed if it ends before; the
    caller has the deadline."""
    with contextlib.closing(folder.ready_listener()) as listener:
        await hypervisor.boot(folder, machine, limits)
        up = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
        end = asyncio.ensure_future(folder.wait(_FOR_EVER_S))
        try:
            await asyncio.wait([up, end], return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                raise CreateFailed("the machine ended before it was up")
            up.result()[0].close()
        finally:
            up.cancel()
            end.cancel()
            await asyncio.gather(up, end, return_exceptions=True)


async def greet(folder: VmFolder, timeout_s: float) -> AgentClient:
    """The first process of a guest that is up; the caller closes the client."""
    return await AgentClient.greet(await folder.dial(CONTROL_PORT, timeout_s), timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def control(folder: VmFolder, timeout_s: float) -> AsyncIterator[AgentClient]:
    """Speak with the first process of a guest for a while."""
    client = await greet(folder, timeout_s)
    try:
        yield client
    finally:
        client.close()


async def reseed(client: AgentClient, hostname: str, machine_id: str) -> None:
    """Make it itself: random numbers, clock and names that no other clone has. The first call after every start."""
    await client.call("reseed", _seed(hostname, machine_id), type=dict[str, Any])


async def prepare(client: AgentClient, preparation: Preparation, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
    """Make it what it is to be; its agent listens then, and its services were started."""
    params = msgspec.to_builtins(preparation)
    await client.call("prepare", params, type=dict[str, Any], timeout_s=timeout_s)


async def become(client: AgentClient, hostname: str, machine_id: str, preparation: Preparation) -> None:
    """Both of these, told in one breath: the first process does one thing after the other."""
    told = {"reseed": _seed(hostname, machine_id), "prepare": msgspec.to_builtins(preparation)}
    calls = [client.open(method, params) for method, params in told.items()]
    for call in calls:
        await call.result(dict[str, Any], CONTROL_TIMEOUT_S)


def _seed(hostname: str, machine_id: str) -> dict[str, Any]:
    entropy = secrets.token_hex(_ENTROPY)
    return {"entropy": entropy, "time": time.time(), "hostname": hostname, "machine_id": machine_id}


async def sync_clock(client: AgentClient) -> None:
    await client.call("sync_clock", {"time": time.time()}, type=dict[str, Any])


async def warm(folder: VmFolder, timeout_s: float) -> None:
    """Let a machine do once what every clone of it does first, so that none of them has to load it."""
    async with control(folder, timeout_s) as client:
        await reseed(client, "template", "0" * 32)
        await client.call("exec", {"argv": ["true"]}, type=dict[str, Any])
