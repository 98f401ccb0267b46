"""Control of a machine through its first process: wait until it is up, make it itself, prepare it for a box."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient, digest_of
from skerry.errors import CreateFailed
from skerry.vm.base import CONTROL_PORT, Hypervisor, Machine, MachineLimits
from skerry.vm.folder import VmFolder

_ENTROPY = 64
_TOKEN = 32
_FOR_EVER_S = 1e9


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the call `prepare`: the box that a machine becomes."""

    user: str | None = None
    home: str
    cwd: str
    env: dict[str, str] = {}
    image_command: Sequence[str] | None = None
    mount_disk: bool = True
    mount_data: bool = False
    writable_root: bool = False
    admin: bool = False
    lifetime_s: float | None = None
    idle_s: float | None = None
    memory: int | None = None
    pids: int | None = None
    cpus: float | None = None
    tmp: int | None = None
    shm: int | None = None
    rlimits: dict[str, int] = {}
    network: Mapping[str, str] | None = None
    token_digest: str | None = None
    """Digest of the token that it demands from then on, where others can reach it too."""
    services: Sequence[Sequence[str]] = ()
    forwards: Mapping[str, str] = {}


async def boot(hypervisor: Hypervisor, folder: VmFolder, machine: Machine, limits: MachineLimits | None) -> None:
    """Start a machine and wait until its first process is up, however long. Raises CreateFailed if it ends before."""
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
    """Connect to the first process of a guest that is up; the caller closes the client."""
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
    """Give it random numbers, clock and names that no other clone has: the first call after every start."""
    await client.call("reseed", _seed(hostname, machine_id), type=dict[str, Any])


async def reseed_and_thaw(client: AgentClient, hostname: str, machine_id: str) -> None:
    """Give one that was held random numbers, clock and names of its own, and only then let it go on, in one round trip.
    A guest takes its calls in turn."""
    calls = [client.open("reseed", _seed(hostname, machine_id)), client.open("thaw", {})]
    for call in calls:
        await call.result(dict[str, Any], CONTROL_TIMEOUT_S)


async def become(
    client: AgentClient,
    hostname: str,
    machine_id: str,
    preparation: Preparation,
    timeout_s: float = CONTROL_TIMEOUT_S,
    *,
    folder: VmFolder | None = None,
) -> None:
    """Reseed it and prepare it for its box in one round trip; its agent listens then, and its services were started. If
    its folder has a token, which all clones of its template have, both take one of this machine alone."""
    token = None if folder is None or folder.read_token() is None else secrets.token_hex(_TOKEN)
    if token is not None:
        preparation = msgspec.structs.replace(preparation, token_digest=digest_of(token))
    told = {"reseed": _seed(hostname, machine_id), "prepare": msgspec.to_builtins(preparation)}
    calls = [client.open(method, params) for method, params in told.items()]
    for call in calls:
        await call.result(dict[str, Any], timeout_s)
    if folder is not None and token is not None:
        folder.write_token(token)


def new_token(folder: VmFolder) -> str:
    """Give a machine that is about to boot a token; returns its digest, for the kernel's command line."""
    token = secrets.token_hex(_TOKEN)
    folder.write_token(token)
    return digest_of(token)


def _seed(hostname: str, machine_id: str) -> dict[str, Any]:
    entropy = secrets.token_hex(_ENTROPY)
    return {"entropy": entropy, "time": time.time(), "hostname": hostname, "machine_id": machine_id}


async def call(folder: VmFolder, timeout_s: float, method: str, params: Mapping[str, Any] | None = None) -> None:
    """Connect to the first process of a guest for one call. Raises AgentError."""
    async with control(folder, timeout_s) as client:
        await client.call(method, params, type=dict[str, Any])


async def warm(folder: VmFolder, timeout_s: float) -> None:
    """Have a template do once what every clone does first, so that none of them has to load it."""
    async with control(folder, timeout_s) as client:
        await reseed(client, "template", "0" * 32)
        await client.call("exec", {"argv": ["true"]}, type=dict[str, Any])
