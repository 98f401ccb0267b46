"""Bringing machines up: as clones of one that was booted before, where that can be, else by booting them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from skerry.agent.client import AgentClient
from skerry.errors import AgentError, Conflict
from skerry.providers.machine import guest
from skerry.vm import sparse, templates
from skerry.vm.base import Drive, Hypervisor, Limits, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.templates import Template, TemplateStore

_TRIES = 2
_ANSWER_S = 20.0
"""How long a clone may take to answer before what it was cloned from counts as broken."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What the template of a machine needs beside the machine itself."""

    contents: tuple[str, ...]
    """The keys of what its read-only drives hold."""
    blank: Path
    """What its writable drives begin as; nothing looks at them before a clone has its own."""
    folder: VmFolder
    """Where it is booted: a place that whoever asked looks after, so that neither a failure nor a crash leaves it
    running for long."""


class Machinery:
    def __init__(
        self, hypervisor: Hypervisor, store: TemplateStore | None, timeout_s: float, flavour: str = ""
    ) -> None:
        self._hypervisor = hypervisor
        self._store = store
        self._timeout_s = timeout_s
        self._flavour = flavour

    @contextlib.asynccontextmanager
    async def started(
        self, folder: VmFolder, machine: Machine, limits: Limits, kind: Kind
    ) -> AsyncIterator[AgentClient]:
        """A machine whose first process answers, and has been told nothing yet."""
        client = await self._clone(folder, machine, limits, kind)
        if client is None:
            await guest.boot(self._hypervisor, folder, machine, limits)
            client = await guest.greet(folder, self._timeout_s)
        try:
            yield client
        finally:
            client.close()

    async def _clone(self, folder: VmFolder, machine: Machine, limits: Limits, kind: Kind) -> AgentClient | None:
        """None where machines cannot be saved, or none that was saved could be brought back."""
        can = await self._hypervisor.probe()
        if self._store is None or not can.snapshots:
            return None
        key = templates.key_of(self._hypervisor.name, can, machine, self._flavour, *kind.contents)
        for _ in range(_TRIES):
            template = self._store.get(key) or await self._make(key, machine, limits, kind)
            try:
                await self._hypervisor.restore(folder, machine, template.folder, limits)
                return await guest.greet(folder, min(_ANSWER_S, self._timeout_s / 2))
            except (Conflict, AgentError):
                await self._hypervisor.kill(folder)
                await self._store.discard(template, timeout_s=self._timeout_s)
        return None

    async def _make(self, key: str, machine: Machine, limits: Limits, kind: Kind) -> Template:
        assert self._store is not None

        async def build(into: Path) -> None:
            await self.clear(kind.folder)
            kind.folder.make()
            drives = tuple([await self._own(drive, kind) for drive in machine.drives])
            first = msgspec.structs.replace(machine, drives=drives, saveable=True)
            await guest.boot(self._hypervisor, kind.folder, first, limits)
            await guest.warm(kind.folder, self._timeout_s)
            await self._hypervisor.save(kind.folder, into)
            await self.clear(kind.folder)

        return await self._store.make(key, build, timeout_s=self._timeout_s)

    async def _own(self, drive: Drive, kind: Kind) -> Drive:
        if drive.read_only:
            return drive
        if drive.format == "raw":
            await asyncio.to_thread(sparse.copy, kind.blank, kind.folder.path / drive.name)
            return msgspec.structs.replace(drive, path=drive.name)
        return await self._hypervisor.make_disk(kind.folder, drive.name, base=kind.blank)

    async def clear(self, folder: VmFolder) -> None:
        """End what runs in a folder, and remove it; quiet if there is nothing."""
        if folder.path.exists():
            await self._hypervisor.kill(folder)
            await asyncio.to_thread(folder.remove)
