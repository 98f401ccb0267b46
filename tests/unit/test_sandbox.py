"""The handle of a sandbox: what it tells of itself, and where it can be used."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import skerry
from skerry.errors import InvalidSpec, WrongState
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.usefixtures("own_registry")


async def test_it_tells_when_it_was_made_and_whether_it_is_healthy() -> None:
    mock, before = Mock(), time.time()
    async with AsyncSandbox(provider_object=mock) as sandbox:
        assert sandbox.created_at is not None
        assert before <= sandbox.created_at <= time.time()
        assert await sandbox.is_healthy()
        mock.faults.dead_agent(sandbox.id)
        assert not await sandbox.is_healthy()
    assert not await sandbox.is_healthy()


def test_the_synchronous_one_does_too() -> None:
    with skerry.Sandbox(provider_object=Mock()) as sandbox:
        assert sandbox.created_at is not None
        assert sandbox.is_healthy()


async def test_an_ephemeral_one_that_no_with_holds_ends_with_its_program() -> None:
    sandbox = await AsyncSandbox.create(Spec(provider="mock"), ephemeral=True)
    try:
        async with AsyncSandboxManager() as manager:
            assert (await manager.record(sandbox.id)).ephemeral
    finally:
        await sandbox.destroy()


async def test_one_of_a_provider_object_cannot_be_ephemeral() -> None:
    mock = Mock()
    with pytest.raises(InvalidSpec, match="ephemeral"):
        await AsyncSandbox.create(Spec(provider="mock"), mock, ephemeral=True)
    assert not mock.host.boxes


def _begin(work: Coroutine[Any, Any, object]) -> None:
    """Run it to its first wait, as a loop that is not asyncio's does."""
    try:
        work.send(None)
    finally:
        work.close()


def test_a_program_that_ends_leaves_no_registry_open() -> None:
    program = """
import asyncio
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

async def main():
    async with AsyncSandbox(provider_object=Mock()):
        pass
    return await AsyncSandbox(provider_object=Mock()).__aenter__()

kept = asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", program], capture_output=True, timeout=30, check=True
    )
    assert b"unclosed database" not in done.stderr


def test_another_kind_of_event_loop_is_refused_with_what_to_do() -> None:
    for work in (
        lambda: AsyncSandbox(provider_object=Mock()).__aenter__(),
        lambda: AsyncSandbox.create(Spec(provider="mock")),
        lambda: AsyncSandbox.open("x"),
        lambda: AsyncSandboxManager().__aenter__(),
    ):
        with pytest.raises(WrongState, match=r"runs on asyncio.*to_thread"):
            _begin(work())


def test_it_is_refused_under_trio_and_works_in_a_thread_of_it() -> None:
    trio = pytest.importorskip("trio", reason="trio is not installed: the test before this one has no need of it")

    async def main() -> None:
        with pytest.raises(WrongState, match="trio"):
            await AsyncSandbox.create(Spec(provider="mock"))
        with skerry.Sandbox(provider_object=Mock()) as sandbox:
            assert (await trio.to_thread.run_sync(sandbox.exec, ["true"])).ok

    trio.run(main)
