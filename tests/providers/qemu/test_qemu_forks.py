"""Machines that branch: snapshots with memory, and many that go on from one moment, each as a machine of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from providers.qemu.host import Make, machines_in

from skerry.errors import Conflict, InvalidSpec
from skerry.model.spec import Spec
from skerry.providers.base import BoxState
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(240)

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"


async def _above(sandbox: AsyncSandbox, least: int) -> int:
    script = f"until [ -e count ] && [ $(cat count) -gt {least} ]; do sleep 0.05; done; cat count"
    return int((await sandbox.exec(script, timeout_s=60)).text)


async def test_what_ran_in_a_snapshot_goes_on_in_each_box_of_it(make: Make, qemu: Qemu, state_dir: Path) -> None:
    source = await make()
    await source.start(COUNTER, background=True)
    await source.files.write("/tmp/in-memory", "kept")
    await _above(source, 2)
    taken = await qemu.snapshot_memory(source.id, "running")
    assert taken.memory
    assert taken.size < 256 << 20, "what is zero takes no room"
    with pytest.raises(Conflict, match="running"):
        await qemu.snapshot_memory(source.id, "running")
    at = int(await source.files.read_text("count"))
    assert await _above(source, at + 2) > at, "the source goes on"
    first, second = await asyncio.gather(make(snapshot="running"), make(snapshot="running"))
    for fork in (first, second):
        assert await fork.files.read_text("/tmp/in-memory") == "kept"
        assert await _above(fork, at) > at
    await first.files.write("mine", "first")
    assert not await second.files.exists("mine")
    assert not await source.files.exists("mine")
    await source.destroy()
    assert await _above(first, at + 2) > at, "it does not depend on its source"
    with pytest.raises(Conflict, match="made of"):
        await qemu.remove_snapshot("running")
    await first.close()
    await qemu.sleep(first.id)
    await qemu.resume(first.id)
    assert await _above(first, at + 3) > at, "a fork sleeps as others do"
    await qemu.stop(second.id)
    await qemu.start(second.id, second.spec)
    assert await second.files.exists("count")
    await first.destroy()
    await second.destroy()
    assert machines_in(state_dir) == []
    await qemu.remove_snapshot("running")


async def test_forks_share_no_random_bytes_no_name_and_no_boot(make: Make, qemu: Qemu) -> None:
    """A process that waits in all of them draws as soon as each of them goes on."""
    source = await make()
    names = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id"
    before = (await source.exec(names)).text
    drawer = "head -c 32 /dev/urandom >/dev/null; until head -c 16 /proc/sys/kernel/random/boot_id > seen; do :; done; "
    draw = "while :; do head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; done > drawn"
    await source.start(drawer + draw, background=True)
    await source.exec("until [ -s drawn ]; do sleep 0.05; done")
    await qemu.snapshot_memory(source.id, "running")
    in_snapshot = set[str]()
    forks = await asyncio.gather(*(make(snapshot="running") for _ in range(3)))
    drawn = []
    for sandbox in (source, *forks):
        await sandbox.exec("sleep 0.5; pkill od; pkill head; true")
        drawn.append((await sandbox.files.read_text("drawn")).splitlines()[:-1])
    common = min(map(len, drawn))
    shared = next((at for at in range(common) if len({lines[at] for lines in drawn}) > 1), common)
    in_snapshot |= set(drawn[0][:shared])
    after = [set(lines[shared + 1 :]) for lines in drawn]  # one may have been on its way as the machine stood still
    assert all(len(each) > 1 for each in after)
    assert len(set().union(*after)) == sum(map(len, after)), "two machines drew the same"
    told = [(await each.exec(names)).text for each in forks]
    assert len({before, *told}) == 4
    for column in range(3):
        assert len({text.splitlines()[column] for text in (before, *told)}) == 4, column
    agents = [(await each.exec(["cat", "/proc/sys/kernel/random/uuid"])).text for each in (source, *forks)]
    assert len({*agents}) == 4
    for fork in forks:
        await fork.destroy()
    await qemu.remove_snapshot("running")


async def test_the_data_volume_belongs_to_the_memory(make: Make, qemu: Qemu) -> None:
    source = await make(data=True)
    await source.files.write("/.data/f", "one")
    await source.start("tail -f /.data/f", background=True)
    await qemu.snapshot_memory(source.id, "running")
    await source.files.write("/.data/f", "two")
    fork = await make(snapshot="running", data=True)
    assert await fork.files.read_text("/.data/f") == "one"
    await fork.files.write("/.data/f", "three")
    assert await source.files.read_text("/.data/f") == "two"
    without = await make(snapshot="running")
    assert await without.files.read_text("/.data/f") == "one"
    for each in (fork, without):
        await each.destroy(volumes=True)
    taken = await make(data=True, name="taken")
    await taken.destroy(volumes=False)
    with pytest.raises(Conflict, match="another sandbox"):
        await make(snapshot="running", data=True, name="taken")
    await qemu.remove_volume(next(each.name for each in await qemu.volumes() if not each.in_use))
    await source.destroy(volumes=True)
    await qemu.remove_snapshot("running")


async def test_what_runs_already_is_not_given_anything_else(make: Make, qemu: Qemu) -> None:
    source = await make(memory="192M")
    await qemu.snapshot_memory(source.id, "running")
    for options in ({"memory": "256M"}, {"user": "root"}, {"disk": "1G"}, {"pids": 99}, {"data": True}):
        with pytest.raises(InvalidSpec, match=next(iter(options))):
            await make(snapshot="running", **options)
    assert set(await qemu.discover()) == {source.id}
    fork = await make(snapshot="running", env={"MORE": "x"}, lifetime="1h")
    assert (await fork.exec('echo "$MORE"')).text == "x\n"
    assert 3500 < (await fork.call("set_lifetime"))["lifetime_s"] <= 3600
    await fork.destroy()
    await qemu.remove_snapshot("running")


async def test_a_box_that_is_paused_or_sleeps_is_branched_and_stays_so(make: Make, qemu: Qemu) -> None:
    source = await make()
    await source.start(COUNTER, background=True)
    at = await _above(source, 2)
    await source.close()
    for rest, state in ((qemu.pause, BoxState.PAUSED), (qemu.sleep, BoxState.ASLEEP)):
        await rest(source.id)
        await qemu.snapshot_memory(source.id, "resting")
        assert (await qemu.discover())[source.id].state is state
        fork = await make(snapshot="resting")
        assert await _above(fork, at + 1) > at
        await fork.destroy()
        await qemu.remove_snapshot("resting")
    await qemu.resume(source.id)
    assert await _above(source, at + 1) > at


async def test_a_damaged_memory_makes_no_box(make: Make, qemu: Qemu, config: QemuConfig, state_dir: Path) -> None:
    source = await make()
    await qemu.snapshot_memory(source.id, "running")
    memory = state_dir / "snapshots/running/memory/memory"
    before = memory.stat()
    memory.chmod(0o600)
    with open(memory, "r+b") as file:
        file.seek(16 << 20)
        file.write(b"damage")
    memory.chmod(before.st_mode & 0o777)
    os.utime(memory, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = Qemu(config)  # who has not just written it
    with pytest.raises(Conflict, match="damaged"):
        await AsyncSandbox.create(Spec.of(provider="qemu", data=False, snapshot="running"), after)
    await after.aclose()
    assert set(await qemu.discover()) == {source.id}
    assert len(machines_in(state_dir)) == 1
    await qemu.remove_snapshot("running")
