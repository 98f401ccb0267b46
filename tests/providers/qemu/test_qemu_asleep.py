"""Sleeping machines in the registry: put to sleep by hand and for want of use, woken by the next call, and forked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from providers.qemu.host import in_guest, machines_in

from skerry.errors import InvalidSpec, Unsupported, WrongState
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter
from skerry.model.states import State
from skerry.providers.qemu import Qemu
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(240)

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"


async def _above(sandbox: AsyncSandbox, least: int) -> int:
    script = f"until [ -e count ] && [ $(cat count) -gt {least} ]; do sleep 0.05; done; cat count"
    return int((await sandbox.exec(script, timeout_s=60)).text)


async def test_a_sandbox_sleeps_until_it_is_resumed(manager: AsyncSandboxManager, state_dir: Path) -> None:
    sandbox = await manager.create(data=False, name="sleeper", lifetime="1h")
    await sandbox.start(COUNTER, background=True)
    at = await _above(sandbox, 2)
    await manager.pause("sleeper", save=True)
    assert (await manager.record("sleeper")).state is State.ASLEEP
    assert machines_in(state_dir) == []
    with pytest.raises(WrongState, match="asleep: unpause it"):
        await sandbox.exec("true")
    told = await manager.explain("sleeper")
    assert told.state is State.ASLEEP
    assert not told.reachable
    assert [verdict for verdict in await manager.reconcile() if verdict.id == sandbox.id] == []
    assert (await manager.look_after("sleeper")).state is State.ASLEEP
    await manager.resume("sleeper")
    assert (await manager.record("sleeper")).state is State.READY
    assert await _above(sandbox, at + 2) > at
    kinds = [event.kind async for event in manager.events(sandbox=sandbox.id)]
    assert kinds[-2:] == ["asleep", "ready"]
    await manager.pause("sleeper", save=True)
    await manager.stop("sleeper")
    assert (await manager.record("sleeper")).state is State.STOPPED
    await manager.start("sleeper")
    assert await sandbox.files.exists("count")
    await manager.pause("sleeper", save=True)
    await manager.destroy("sleeper")
    assert not await manager.exists("sleeper")


async def test_what_others_put_to_sleep_or_wake_is_followed(manager: AsyncSandboxManager, qemu: Qemu) -> None:
    sandbox = await manager.create(data=False)
    await sandbox.close()
    await qemu.sleep(sandbox.id)
    with pytest.raises(WrongState, match="asleep"):
        await sandbox.exec("true")
    assert (await manager.record(sandbox.id)).state is State.ASLEEP
    await qemu.resume(sandbox.id)
    assert (await sandbox.exec("echo on")).text == "on\n"
    assert (await manager.record(sandbox.id)).state is State.READY
    await manager.destroy(sandbox.id)


async def test_what_nobody_uses_sleeps_and_all_who_call_wake_it_once(
    manager: AsyncSandboxManager, qemu: Qemu, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await manager.create(data=False, sleep_after="2s")
    await sandbox.files.write("kept", "one")
    async with asyncio.timeout(60):
        await manager.wait(sandbox.id, {State.ASLEEP})
    assert machines_in(state_dir) == []
    provider, woken = manager.provider("qemu"), list[str]()
    original = type(provider).resume

    async def resume(self: Qemu, id: str) -> None:
        woken.append(id)
        await original(self, id)  # type: ignore[arg-type]

    monkeypatch.setattr(type(provider), "resume", resume)
    calls = [sandbox.files.read_text("kept") for _ in range(4)]
    assert await asyncio.gather(*calls, (await manager.get(sandbox.id)).files.read_text("kept")) == ["one"] * 5
    assert woken == [sandbox.id]
    assert (await manager.record(sandbox.id)).state is State.READY
    busy = await sandbox.start("sleep 6", background=True)
    async with asyncio.timeout(60):
        await manager.wait(sandbox.id, {State.ASLEEP})
    running = [each.process for each in await sandbox.processes.list() if each.running]
    assert busy.number not in running, "while a process runs it is used"
    await manager.destroy(sandbox.id)


async def test_providers_that_keep_no_memory_refuse_the_field(manager: AsyncSandboxManager) -> None:
    with pytest.raises(Unsupported, match="sleep_after"):
        await manager.create(provider="local", sleep_after="1h")
    assert await manager.list(Filter(include_ended=True)) == []


async def test_many_forks_of_one_moment_or_none(manager: AsyncSandboxManager, state_dir: Path) -> None:
    source = await manager.create(lifetime="1h")
    await source.start(COUNTER, background=True)
    await source.files.write("/.data/f", "mine")
    at = await _above(source, 2)
    forks = await manager.fork_many(source.id, 3, with_memory=True)
    assert len({each.id for each in forks}) == 3
    for fork in forks:
        assert await _above(fork, at) >= at
        assert await fork.files.read_text("/.data/f") == "mine"
    drawn = [(await each.exec("head -c 32 /dev/urandom | od -An -tx1")).text for each in (source, *forks)]
    assert len({*drawn}) == 4
    one = await manager.fork(source.id, with_memory=True, name="one")
    assert await _above(one, at) >= at
    with pytest.raises(InvalidSpec, match="count"):
        await manager.fork_many(source.id, 2, name="both")
    with pytest.raises(InvalidSpec, match="memory"):
        await manager.fork(source.id, with_memory=True, memory="300M")
    assert len(await manager.list()) == 5
    assert await manager.snapshots() == []
    for each in (*forks, one, source):
        await manager.destroy(each.id, volumes=True)
    await manager.reconcile()
    assert list((state_dir / "snapshots").glob("[!.]*")) == []


async def test_a_sandbox_without_a_data_volume_branches_into_one_without(
    manager: AsyncSandboxManager, qemu: Qemu
) -> None:
    source = await manager.create(ephemeral=True)  # one that ends with its program has none
    fork = await manager.fork(source.id, with_memory=True)
    assert (await fork.exec("echo here")).text == "here\n"
    assert await qemu.volumes() == []
    with pytest.raises(InvalidSpec, match="has no volume"):
        await manager.fork(source.id, with_memory=True, data=True)
    for each in (fork, source):
        await manager.destroy(each.id, volumes=True)


async def test_a_sandbox_goes_back_to_a_moment(manager: AsyncSandboxManager, qemu: Qemu) -> None:
    sandbox = await manager.create()
    await sandbox.start(COUNTER, background=True)
    await sandbox.files.write("/.data/f", "then")
    at = await _above(sandbox, 2)
    taken = await manager.snapshot(sandbox.id, "moment", with_memory=True)
    assert taken.memory
    await sandbox.files.write("/.data/f", "later")
    assert await _above(sandbox, at + 20) > at + 20
    sandbox = await manager.restore(sandbox.id, "moment")
    assert await sandbox.files.read_text("/.data/f") == "then"
    assert await _above(sandbox, at) > at
    await in_guest(qemu, sandbox.id, "true")
    await manager.destroy(sandbox.id, volumes=True)
    await manager.remove_snapshot("moment")
