"""An end has grace: processes are asked to end before they are killed, and nothing can make that last longer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from skerry.errors import SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.base import BoxState, Capability, Provider
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store
from skerry.testing.conformance.base import DEADLINE_S, Suite
from skerry.testing.conformance.execution import output_until

_LOOP = "while :; do sleep 0.05; done"
_HEEDS = f"trap 'echo child ended; exit' TERM; echo child ready; {_LOOP}"
_PARENT = f'env -i /bin/sh -c "$1" & trap "wait; echo parent ended; exit" TERM; {_LOOP}'
_STUBBORN = f"trap '' TERM HUP; echo ready; {_LOOP}"


async def _start_family(sandbox: AsyncSandbox) -> AsyncProcess:
    """A process and a child of it that bears no mark of ours, which both tell that they are asked to end."""
    process = await sandbox.start(["sh", "-c", _PARENT, "sh", _HEEDS])
    await output_until(process, b"child ready")
    return process


async def _rest_of(process: AsyncProcess) -> bytes:
    said = b""
    with suppress(SkerryError):  # it ends with its box
        async for _, data in process:
            said += data
    return said


class EndTests(Suite):
    @pytest.mark.needs_real_unix
    async def test_all_processes_are_asked_to_end_before_a_box_is_destroyed(self, provider: Provider) -> None:
        before = await self.on_host()
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        try:
            process = await _start_family(sandbox)
        finally:
            await sandbox.destroy(volumes=True, grace_s=DEADLINE_S)
        said = await _rest_of(process)
        assert b"child ended" in said
        assert b"parent ended" in said
        assert await self.on_host() == before

    @pytest.mark.needs_real_unix
    async def test_a_process_that_does_not_heed_it_is_killed_when_the_grace_is_over(self, provider: Provider) -> None:
        before = await self.on_host()
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        try:
            await output_until(await sandbox.start(["sh", "-c", _STUBBORN]), b"ready")
        finally:
            async with asyncio.timeout(DEADLINE_S):
                await sandbox.destroy(volumes=True, grace_s=0.2)
        assert await self.on_host() == before

    @pytest.mark.needs_real_unix
    async def test_all_processes_are_asked_to_end_before_a_box_is_stopped(self, provider: Provider) -> None:
        if Capability.STOP not in provider.capabilities:
            assert not hasattr(provider, "stop")
            return
        store = await Store.in_memory()
        manager = AsyncSandboxManager(store=store, providers={provider.name: provider}, reconcile=False)
        sandbox = await manager.create(self.spec(provider))
        try:
            process = await _start_family(sandbox)
            await manager.stop(sandbox.id, DEADLINE_S)
            said = await _rest_of(process)
            assert b"child ended" in said
            assert b"parent ended" in said
            assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
        finally:
            await manager.destroy(sandbox.id, volumes=True, grace_s=0)
            await manager.aclose()
            await store.aclose()
