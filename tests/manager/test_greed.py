"""One box wants all that there is: on real boxes of `local`, neighbours and the host go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from providers.making import require

from skerry.config import AdmissionSettings
from skerry.host import room
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.store import Store

from . import racers
from .test_many import race
from .world import config_of, until

M = 1 << 20
EAT = """
import os
while os.fork() == 0: pass
taken = []
while True: taken.append(b"x" * (4 << 20))
"""
"""A parent and its children, each of which takes memory until it is killed."""


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[AsyncSandboxManager]:
    config = config_of(tmp_path, provider="local", min_free_memory=64 * M, providers={"local": {"zygote": "off"}})
    async with AsyncSandboxManager(config) as manager:
        local = manager.provider("local")
        await require(local)
        if not (await local.enforcement(Spec()))["memory"].by:
            pytest.skip("no limit of memory is held here")
        yield manager
        await manager.destroy_all(grace_s=0)


async def test_a_box_that_eats_to_its_limit_dies_of_it_alone(manager: AsyncSandboxManager) -> None:
    greedy, *neighbours = [await manager.create(memory="64M", pids=32) for _ in range(3)]
    children = [await each.exec("sleep 60 & echo $!") for each in neighbours]
    for _ in range(3):
        eating = asyncio.create_task(greedy.exec(["python3", "-c", EAT], timeout_s=20))
        while not eating.done():
            said = await asyncio.gather(*(each.exec(["echo", "here"], timeout_s=30) for each in neighbours))
            assert [each.stdout for each in said] == [b"here\n"] * len(neighbours)
            assert (await manager.handles.room()).memory_promised_bytes == 3 * 64 * M
        await asyncio.wait([eating])
        if eating.exception() is not None:
            break  # the whole box is gone: the limit was its own
        assert eating.result().exit_code != 0
    for each, child in zip(neighbours, children, strict=True):
        assert (await each.exec(["kill", "-0", child.stdout.decode().strip()])).ok, "no process of it was killed"
        assert (await manager.record(each.id)).state is State.READY
    assert (await (await manager.create(memory="64M")).exec("true")).ok


async def test_real_boxes_of_many_processes_do_not_pass_the_bound(tmp_path: Path, manager: AsyncSandboxManager) -> None:
    results = race("pass_the_real_promise", tmp_path, count=4)
    made = {id for result in results for id in result["made"]}
    assert len(made) == racers.SHARES
    assert sum(result["refused"] for result in results) == 16 - racers.SHARES
    assert {record.id for record in await manager.list()} == made
    assert set(await manager.provider("local").discover()) == made


async def test_a_create_beyond_the_bound_waits_for_the_end_of_another(
    tmp_path: Path, manager: AsyncSandboxManager
) -> None:
    total = room.look("/").memory_bytes
    assert total
    bounds = AdmissionSettings(overcommit=(96 * M) / total, wait_s=30.0)
    manager.set_limits(config_of(tmp_path, provider="local", min_free_memory=0, admission=bounds))
    first = await manager.create(memory="64M")
    second = asyncio.create_task(manager.create(memory="64M"))
    admission = manager._open.admission
    await until(lambda: admission._room.waiting == 1)
    assert not second.done()
    assert (await manager.handles.room()).waiting == 1
    await manager.destroy(first.id, grace_s=0)
    assert (await (await second).exec("true")).ok
    waiting = asyncio.create_task(manager.create(memory="64M"))
    await until(lambda: admission._room.waiting == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(await manager.list()) == 1
    assert not admission._room.waiting


async def test_what_was_promised_is_told_without_a_manager_too(tmp_path: Path, manager: AsyncSandboxManager) -> None:
    await manager.create(memory="64M")
    await manager.create()
    store = await Store.open(f"{tmp_path}/registry.db")
    try:
        assert await store.promised_memory() == (64 + 1024) * M
    finally:
        await store.aclose()
