"""What happened, told in order; waiting for it; forgetting it."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import (
    NotFound,
    SkerryError,
)
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Event
from skerry.model.states import State
from skerry.providers.mock import Mock

from .world import ENDED


async def test_events_are_replayed_and_then_followed(manager: AsyncSandboxManager) -> None:
    first = await manager.create()
    seen: list[Event] = []
    began = asyncio.Event()

    async def follow() -> None:
        async for event in manager.events(follow=True):
            seen.append(event)
            began.set()
            if event.kind == "destroyed":
                return

    following = asyncio.create_task(follow())
    await began.wait()
    second = await manager.create()
    await manager.destroy(second.id)
    async with asyncio.timeout(5):
        await following
    assert [(event.sandbox, event.kind) for event in seen] == [
        (first.id, "created"),
        (first.id, "ready"),
        (second.id, "created"),
        (second.id, "ready"),
        (second.id, "doomed"),
        (second.id, "destroyed"),
    ]
    assert [event.seq for event in seen] == sorted({event.seq for event in seen})
    replay = [event async for event in manager.events(after=seen[3].seq)]
    assert replay == seen[4:]
    assert seen[-1].cause is Cause.USER


async def test_waiting_ends_with_the_sandbox(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    waiting = asyncio.create_task(manager.wait(sandbox.id))
    await manager.destroy(sandbox.id)
    async with asyncio.timeout(5):
        assert (await waiting).cause is Cause.USER
        assert (await manager.wait(sandbox.id)).state is State.DESTROYED
        with pytest.raises(NotFound):
            await manager.wait(sandbox.id, {State.READY})


async def test_waiting_notices_a_box_that_died(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    waiting = asyncio.create_task(manager.wait(sandbox.id))
    await asyncio.sleep(0)
    mock.faults.dead_box(sandbox.id)
    async with asyncio.timeout(5):
        assert (await waiting).cause is Cause.BOX_DIED


async def test_waiting_has_a_deadline(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    with pytest.raises((TimeoutError, SkerryError)):
        await manager.wait(sandbox.id, timeout_s=0.05)
    assert await manager.is_healthy(sandbox.id)


async def test_what_ended_is_forgotten_when_asked_and_no_sooner(manager: AsyncSandboxManager) -> None:
    kept, gone = await manager.create(), await manager.create()
    await manager.destroy(gone.id)
    assert await manager.prune() == 0
    assert await manager.prune(older_s=0) == 1
    assert [record.id for record in await manager.list(ENDED)] == [kept.id]
