"""Dials the agents in instances: at their sockets where this host sees them, else by the stdio of an exec."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from skerry.errors import AgentUnreachable, NotFound, ProviderError, UserNotFound
from skerry.host import uids
from skerry.model.spec import SandboxId
from skerry.net.stream import Buffer, Receiver, Stream
from skerry.net.websocket import WebSocket
from skerry.providers.base import log
from skerry.providers.incus import instances, profile
from skerry.providers.incus.api import AsItWas, Frozen, IncusApi
from skerry.providers.incus.info import IncusInfo
from skerry.providers.incus.volumes import IncusAgentVolume
from skerry.providers.shared import layout, proc_socket
from skerry.providers.shared.dialer import Dialer

_PAUSED = "the box is paused: let it go on first"
_LAST_ID = 65535
"""Incus gives each isolated container so many ids."""
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids")
"""Roots of groups on hosts with cgroup v2, with both, and with v1."""
_LAST_WORDS = 4096
_CHANNELS = ("0", "1", "2", "control")


class IncusDialer(Dialer[SandboxId]):
    def __init__(self, api: IncusApi, agent: IncusAgentVolume, info: Callable[[], Awaitable[IncusInfo]]) -> None:
        super().__init__()
        self._api = api
        self._agent = agent
        self._info = info

    async def find(self, id: SandboxId) -> SandboxId:
        return id

    async def as_user(self, id: SandboxId, user: str) -> Stream:
        """Open a stream to an agent of another user, which ends with it."""
        box = await instances.inspect(self._api, id)
        _check(box.status)
        uid, gid = await self._numbers(id, user)
        config = uids.agent_config(profile.agent_config_of(box.config))
        argv = [*await self._agent.argv(), layout.START, id, config]
        return await open_exec(self._api, layout.container_name(id), argv, uid=uid, gid=gid)

    async def _numbers(self, id: SandboxId, user: str) -> tuple[int, int]:
        uid, _, gid = user.partition(":")
        if uid.isdecimal() and (gid or uid).isdecimal():
            numbers = int(uid), int(gid or uid)
            if max(numbers) > _LAST_ID:
                raise UserNotFound(f"user: the box has no user {user}; it has those from 0 to {_LAST_ID}")
            return numbers
        with suppress(NotFound):
            passwd = await self._api.raw(f"{instances.path(id)}/files", query={"path": "/etc/passwd"})
            if found := uids.numbers(passwd.decode(errors="replace"), uid):
                return found
        if uid == "root":
            return 0, 0
        raise UserNotFound(f"user: no user is called {uid!r} in the box; give a UID or UID:GID")

    async def open(self, id: SandboxId, timeout_s: float) -> Stream:
        try:
            if (await self._info()).is_local:
                _check((await instances.inspect(self._api, id)).status)
                try:
                    return await proc_socket.connect(await self.pid(id), timeout_s)
                except proc_socket.NotShared as error:
                    log.debug("incus: sandbox %s is dialled by an exec: %s", id, error)
            argv = [*await self._agent.argv(), layout.RELAY, layout.SOCKET, f"{timeout_s:g}"]
            nobody = layout.DEFAULT_UID
            return await open_exec(self._api, layout.container_name(id), argv, uid=nobody, gid=nobody)
        except NotFound:
            raise NotFound(f"there is no box {id}") from None
        except Frozen as error:
            raise AgentUnreachable(_PAUSED) from error
        except AsItWas as error:
            raise AgentUnreachable(f"the box does not run: start it first ({error})") from error

    async def pid(self, id: SandboxId) -> int:
        """Find the first process of a box on this host, by its cgroup, which no box can forge: to ask Incus costs
        30 ms."""
        name, project = layout.container_name(id), self._api.project
        group = f"lxc.payload.{name if project == 'default' else f'{project}_{name}'}"
        for root in _CGROUPS:
            with suppress(OSError):
                if first := _first(Path(root, group, "cgroup.procs").read_text().split()):
                    return first
        return int((await self._api.get(f"{instances.path(id)}/state", dict[str, Any])).get("pid", 0))


def _first(pids: Iterable[str]) -> int | None:
    """Of a container's processes the one that is 1 in its namespace, as the kernel tells: others may have lower numbers
    on the host, where these begin anew. A namespace within it has a first process too, which has one number more."""
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it has just ended
            status = Path("/proc", pid, "status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
            if numbers[-1] == "1":
                found[len(numbers)] = int(pid)
    return found[min(found)] if found else None


def _check(status: str) -> None:
    if status.lower() == "frozen":
        raise AgentUnreachable(_PAUSED)
    if status.lower() != "running":
        raise AgentUnreachable(f"the box is {status.lower()}: start it first")


async def open_exec(api: IncusApi, instance: str, argv: list[str], *, uid: int, gid: int) -> Stream:
    """Start a command that ends with the stream. Incus begins it once all of its channels are taken."""
    wanted: dict[str, Any] = {"command": argv, "wait-for-websocket": True, "interactive": False}
    wanted |= {"user": uid, "group": gid, "cwd": "/"}
    begun = await api.begin("POST", f"/1.0/instances/{instance}/exec", json=wanted)
    secrets = (begun.metadata or {}).get("fds") or {}
    if any(name not in secrets for name in _CHANNELS):
        raise ProviderError("incus: an exec without channels")
    path = f"/1.0/operations/{begun.id}/websocket"
    opening = [asyncio.ensure_future(api.websocket(path, query={"secret": secrets[name]})) for name in _CHANNELS]
    try:
        stdin, stdout, stderr, control = await asyncio.gather(*opening)
    except BaseException:
        for each in opening:
            each.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(opened, WebSocket):
                opened.close()
        raise
    return IncusExecStream(stdin, stdout, stderr, control)


class _Words:
    """Keeps the end of what is said."""

    def __init__(self) -> None:
        self.last = b""

    def received(self, data: memoryview) -> None:
        self.last = (self.last + bytes(data))[-_LAST_WORDS:]

    def closed(self, error: Exception | None) -> None:
        return


class IncusExecStream(Stream):
    """The stdio of an exec. What it says on standard error is the reason of its end."""

    def __init__(self, stdin: WebSocket, stdout: WebSocket, stderr: WebSocket, control: WebSocket) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._others = (stderr, control, stdin)
        self._words = _Words()
        self._receiver: Receiver | None = None

    def start(self, receiver: Receiver) -> None:
        is_first, self._receiver = self._receiver is None, receiver
        if is_first:
            for each in self._others:
                each.start(self._words)
            self._stdout.start(self)

    def write(self, *parts: Buffer) -> None:
        if self.is_open:
            self._stdin.write(*parts)

    async def drained(self) -> None:
        await self._stdin.drained()

    def close(self) -> None:
        self._end(None)

    def received(self, data: memoryview) -> None:
        if self._receiver is not None:
            self._receiver.received(data)

    def closed(self, error: Exception | None) -> None:
        if words := self._words.last.decode(errors="replace").strip():
            error = AgentUnreachable(f"the way to the agent ended: {words}")
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for each in (*self._others, self._stdout):
            each.close()
        if self._receiver is not None:
            self._receiver.closed(error)
