"""`python -m skerry.manager.forwarder ID`: process that serves the addresses of a sandbox for as long as that lives,
whoever else runs. Its task is JSON on stdin. It dials the agent as any program does, and only while somebody is
connected; it ends with the sandbox, or when its note is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from skerry.agent.client import AgentClient
    from skerry.manager.addresses import Task
    from skerry.model.records import Record
    from skerry.providers.base import Provider
    from skerry.sandbox.ports import AsyncForward

_MOST_LINKS = 256
"""Connections at once, to all ports together; more are closed as they come."""
_WINDOW = 1 << 18
_TICK_S = 5.0
_DOUBT_S = 1.0
"""The least between two looks after connections that failed."""
_LOOK_S = 30.0
"""Seconds between two looks at the registry, where nobody tells us the end."""
_GREETING_S = 10.0
_log = logging.getLogger("skerry.manager")


class Forwarder:
    def __init__(self, task: Task, provider: Provider) -> None:
        self._task = task
        self._provider = provider
        self._client: AgentClient | None = None
        self._dialling = asyncio.Lock()
        self._over = asyncio.Event()
        self._is_doubtful = False
        """Whether somebody could not be connected, so that the sandbox may have ended."""

    async def serve(self) -> None:
        """Serve until the sandbox has ended, somebody ends us, or another has taken our place."""
        from skerry.sandbox.ports import AsyncForward

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._over.set)
        forwards = [(AsyncForward(self._connect, port), fd) for fd, port in self._task.listeners.items()]
        try:
            if await self._has_ended():
                return
            for forward, fd in forwards:
                most = max(1, _MOST_LINKS // len(forwards))
                await forward.serve(socket.socket(fileno=fd), most=most, window=_WINDOW)
            await self._keep_watch([forward for forward, _ in forwards])
        finally:
            for forward, _ in forwards:
                await forward.close()
            if self._client is not None:
                self._client.close()

    async def _keep_watch(self, forwards: list[AsyncForward]) -> None:
        looked_at = time.monotonic()
        while not self._over.is_set() and self._is_ours():
            since_s = time.monotonic() - looked_at
            if since_s >= (_DOUBT_S if self._is_doubtful else _LOOK_S):
                if await self._has_ended():
                    return
                looked_at = time.monotonic()
            if self._client is not None and not any(forward.links for forward in forwards):
                self._client.close()  # what nobody uses is not kept open: some providers pay for it with a process
                self._client = None
            with suppress(TimeoutError):
                async with asyncio.timeout(_DOUBT_S if self._is_doubtful else _TICK_S):
                    await self._over.wait()

    def _is_ours(self) -> bool:
        from skerry.host import locks

        return locks.is_in_place(self._task.lock_fd, Path(self._task.note))

    async def _connect(self) -> AgentClient:
        """The stream to the agent. A box that cannot be reached may have ended: that is looked at."""
        from skerry.agent.client import AgentClient
        from skerry.errors import SkerryError
        from skerry.model.states import State
        from skerry.sandbox import service

        async with self._dialling:
            if self._client is None or not self._client.is_open:
                try:
                    stream = await self._provider.dial(self._task.id)
                    client = await AgentClient.greet(stream, timeout_s=_GREETING_S)
                    self._client = client
                    record = await self._record()
                    if record is None or record.state is not State.READY:
                        self._is_doubtful = True
                    elif not record.is_being_set_up:  # an engine or a person may have started it again
                        await service.begin(client, record.spec)
                except (SkerryError, OSError):
                    self._is_doubtful = True
                    raise
            return self._client

    async def _record(self) -> Record | None:
        from skerry.errors import NotFound
        from skerry.store import Store

        store = await Store.open(self._task.config.database)
        try:
            return await store.get(self._task.id)
        except NotFound:
            return None
        finally:
            await store.aclose()

    async def _has_ended(self) -> bool:
        """Look what became of the sandbox; while nobody can tell, it lives. One that nobody reaches, or whose time is
        over, is compared with the host, as by any other program."""
        from skerry.errors import NotFound, SkerryError
        from skerry.manager.decide import LATE_S
        from skerry.manager.manager import AsyncSandboxManager

        if not self._is_ours():
            return True
        is_doubtful, self._is_doubtful = self._is_doubtful, False
        try:
            async with AsyncSandboxManager(self._task.config, reconcile=False) as manager:
                record = await manager.store.get(self._task.id)
                if record.is_live and (is_doubtful or record.is_over(manager.store.now(), LATE_S)):
                    record = await manager.look_after(record.id)
                return record.doomed or not record.is_live
        except NotFound:
            return True
        except (SkerryError, OSError) as error:
            _log.debug("nothing is known of sandbox %s: %s", self._task.id, error)
        return False


async def _run(task: Task) -> None:
    provider = task.config.load_provider(task.provider)
    try:
        await Forwarder(task, provider).serve()
    finally:
        await provider.aclose()


def main() -> None:
    from skerry.host import background

    text = background.detach()
    from skerry.manager.addresses import Task

    task = msgspec.json.decode(text, type=Task)
    task = msgspec.structs.replace(task, config=msgspec.structs.replace(task.config, tool="forwarder"))
    for number in task.listeners:
        os.set_inheritable(number, False)
    with background.holding(Path(task.note), task.lock_fd):
        asyncio.run(_run(task))


if __name__ == "__main__":
    main()
