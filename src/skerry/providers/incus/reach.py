"""Streams to the agents: how each is opened, and the first one of a box, which whoever dials next is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.errors import AgentUnreachable, InvalidSpec, NotFound
from skerry.providers import layout, straight, users
from skerry.providers.first_streams import DIAL_S, FirstStreams, client_on
from skerry.providers.incus import instances, profile
from skerry.providers.incus.api import Api
from skerry.providers.incus.execs import through_exec
from skerry.providers.incus.info import Info
from skerry.providers.incus.pids import pid_of
from skerry.providers.incus.refusals import AsItWas, Frozen
from skerry.providers.incus.runtime import Runtime
from skerry.spec import SandboxId

_PAUSED = "the box is paused: let it go on first"
_LAST_ID = 65535
"""Incus gives each isolated container so many ids."""


class Reach:
    def __init__(self, api: Api, runtime: Runtime) -> None:
        self._api = api
        self._runtime = runtime
        self._first = FirstStreams()

    async def dial(self, id: SandboxId, info: Info) -> Stream:
        """The stream that the box was started through, if nobody has had it yet; else another."""
        return self._first.take(id) or await self._open(id, info, DIAL_S)

    @asynccontextmanager
    async def client(self, id: SandboxId, info: Info) -> AsyncIterator[AgentClient]:
        """Speak with an agent for a while."""
        async with client_on(await self._open(id, info, DIAL_S)) as client:
            yield client

    @asynccontextmanager
    async def first_client(self, id: SandboxId, info: Info, timeout_s: float) -> AsyncIterator[AgentClient]:
        """Speak with an agent that is just starting."""
        stream = await self._open(id, info, timeout_s)
        async with self._first.first_client(id, stream, timeout_s) as client:
            yield client

    async def as_user(self, id: SandboxId, user: str) -> Stream:
        """A stream to an agent of another user, which ends with it."""
        box = await instances.inspect(self._api, id)
        _check(box.status)
        await self._runtime.find()
        uid, gid = await self._numbers(id, user)
        config = users.agent_config(profile.agent_config_of(box.config))
        argv = [*self._runtime.argv, layout.START, id, config]
        return await through_exec(self._api, layout.container_name(id), argv, uid=uid, gid=gid)

    async def _numbers(self, id: SandboxId, user: str) -> tuple[int, int]:
        uid, _, gid = user.partition(":")
        if uid.isdecimal() and (gid or uid).isdecimal():
            numbers = int(uid), int(gid or uid)
            if max(numbers) > _LAST_ID:
                raise InvalidSpec(f"user: the box has no user {user}; it has those from 0 to {_LAST_ID}", field="user")
            return numbers
        with suppress(NotFound):
            passwd = await self._api.raw(f"{instances.path(id)}/files", query={"path": "/etc/passwd"})
            if found := users.numbers(passwd.decode(errors="replace"), uid):
                return found
        if uid == "root":
            return 0, 0
        raise InvalidSpec(f"user: no user is called {uid!r} in the box; give a UID or UID:GID", field="user")

    def forget(self, id: SandboxId) -> None:
        self._first.forget(id)

    def close(self) -> None:
        self._first.close()

    async def _open(self, id: SandboxId, info: Info, timeout_s: float) -> Stream:
        try:
            if info.is_local:
                with suppress(straight.NotShared):
                    return await straight.connect(await self._pid(id), timeout_s)
            await self._runtime.find()
            argv = [*self._runtime.argv, layout.RELAY, layout.SOCKET, f"{timeout_s:g}"]
            nobody = layout.DEFAULT_UID
            return await through_exec(self._api, layout.container_name(id), argv, uid=nobody, gid=nobody)
        except NotFound:
            raise NotFound(f"there is no box {id}") from None
        except Frozen as error:
            raise AgentUnreachable(_PAUSED) from error
        except AsItWas as error:
            raise AgentUnreachable(f"the box does not run: start it first ({error})") from error

    async def _pid(self, id: SandboxId) -> int:
        box = await instances.inspect(self._api, id)
        _check(box.status)
        found = pid_of(self._api.project, box.name)
        return (await instances.state_of(self._api, id)).pid if found is None else found


def _check(status: str) -> None:
    if status.lower() == "frozen":
        raise AgentUnreachable(_PAUSED)
    if status.lower() != "running":
        raise AgentUnreachable(f"the box is {status.lower()}: start it first")
