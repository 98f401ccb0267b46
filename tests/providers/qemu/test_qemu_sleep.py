"""Machines that sleep: memory, registers and disks in files, and nothing of them runs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from providers.qemu import sleep_victim
from providers.qemu.host import Make, left_of, machines_in, wardens_in

from skerry.errors import AgentUnreachable, Conflict, WrongState
from skerry.model.spec import Spec, new_id
from skerry.providers.base import BoxState
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm.folder import VmFolder

pytestmark = pytest.mark.timeout(240)

TESTS = Path(__file__).parents[2]

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"


async def _counting(sandbox: AsyncSandbox) -> None:
    await sandbox.start(COUNTER, background=True)
    await _above(sandbox, 2)


async def _above(sandbox: AsyncSandbox, least: int) -> int:
    """The counter, once it is above that; the guest looks itself."""
    script = f"until [ -e count ] && [ $(cat count) -gt {least} ]; do sleep 0.05; done; cat count"
    return int((await sandbox.exec(script, timeout_s=60)).text)


async def _state(qemu: Qemu, sandbox: AsyncSandbox) -> BoxState:
    return (await qemu.discover())[sandbox.id].state


async def test_a_box_that_sleeps_has_no_process_and_goes_on_where_it_was(
    make: Make, qemu: Qemu, state_dir: Path
) -> None:
    sandbox = await make()
    await _counting(sandbox)
    boot = (await sandbox.files.read_text("/proc/sys/kernel/random/boot_id"), (await sandbox.exec("hostname")).text)
    await sandbox.close()
    await qemu.sleep(sandbox.id)
    assert machines_in(state_dir) + wardens_in(state_dir) == []
    assert await _state(qemu, sandbox) is BoxState.ASLEEP
    await qemu.sleep(sandbox.id)
    with pytest.raises(AgentUnreachable, match="sleeps"):
        await qemu.dial(sandbox.id)
    with pytest.raises(WrongState, match="sleeps"):
        await qemu.start(sandbox.id, sandbox.spec)
    await qemu.resume(sandbox.id)
    assert await _state(qemu, sandbox) is BoxState.RUNNING
    count = int(await sandbox.files.read_text("count"))
    assert await _above(sandbox, count + 3) > count
    away = abs(float((await sandbox.exec("date +%s")).text) - time.time())
    assert away < 5, "its clock is the host's again"
    again = (await sandbox.files.read_text("/proc/sys/kernel/random/boot_id"), (await sandbox.exec("hostname")).text)
    assert again == boot, "it is the same machine in the same boot"
    assert not MachineBox(state_dir, sandbox.id).asleep.exists()
    await sandbox.close()
    for _ in range(2):  # and as often as it is asked for
        await qemu.sleep(sandbox.id)
        await qemu.resume(sandbox.id)
    assert await _above(sandbox, count + 4) > count


async def test_what_was_written_is_there_after_a_sleep_and_if_its_memory_is_given_up(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "one")
    await sandbox.close()
    await qemu.sleep(sandbox.id)
    await qemu.snapshot(sandbox.id, "of-a-sleeper")
    assert await _state(qemu, sandbox) is BoxState.ASLEEP
    await qemu.stop(sandbox.id)
    assert await _state(qemu, sandbox) is BoxState.STOPPED
    await qemu.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "one"
    copy = await make(snapshot="of-a-sleeper")
    assert await copy.files.read_text("kept") == "one"
    await copy.destroy()
    await qemu.remove_snapshot("of-a-sleeper")


async def test_a_box_that_is_paused_sleeps_and_runs_when_it_is_resumed(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    await _counting(sandbox)
    await sandbox.close()
    await qemu.pause(sandbox.id)
    await qemu.sleep(sandbox.id)
    await qemu.resume(sandbox.id)
    await sandbox.files.write("more", "x")
    count = int(await sandbox.files.read_text("count"))
    assert await _above(sandbox, count + 1) > count


async def test_a_box_that_booted_from_its_kernel_sleeps_too(config: QemuConfig) -> None:
    import msgspec

    qemu = Qemu(msgspec.structs.replace(config, template=False))
    sandbox = await AsyncSandbox.create(Spec.of(provider="qemu", data=True), qemu)
    try:
        await sandbox.files.write("/.data/f", "data")
        await _counting(sandbox)
        await sandbox.close()
        await qemu.sleep(sandbox.id)
        await qemu.resume(sandbox.id)
        count = int(await sandbox.files.read_text("count"))
        assert await _above(sandbox, count + 1) > count
        assert await sandbox.files.read_text("/.data/f") == "data"
    finally:
        await sandbox.destroy(volumes=True)
        await qemu.aclose()


async def test_a_sleeping_box_outlives_the_hosts_end_and_is_destroyed(
    make: Make, qemu: Qemu, config: QemuConfig, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a boot of the host no note of a process counts."""
    sandbox = await make()
    await _counting(sandbox)
    await sandbox.close()
    await qemu.sleep(sandbox.id)
    with monkeypatch.context() as patched:
        patched.setattr("skerry.vm.folder.boot_id", lambda: "another boot")
        patched.setattr("skerry.clock.boot_id", lambda: "another boot")
        after = Qemu(config)
        assert await _state(after, sandbox) is BoxState.ASLEEP
        await after.resume(sandbox.id)
        stream = await after.dial(sandbox.id)
        stream.close()
        await after.sleep(sandbox.id)
        await after.destroy(sandbox.id)
        await after.aclose()
    assert not left_of(state_dir)


async def _run(argv: list[str | Path]) -> None:
    assert await (await asyncio.create_subprocess_exec(*argv)).wait() == 0


def _flip(path: Path, at: int) -> None:
    before = path.stat()
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)


_DAMAGE: dict[str, Callable[[Path], None]] = {
    "in the middle of the memory": lambda folder: _flip(folder / "memory", 16 << 20),
    "a memory that is cut": lambda folder: _cut(folder / "memory"),
    "in the state": lambda folder: _flip(folder / "state", 5000),
    "a state that is cut": lambda folder: _cut(folder / "state"),
    "a note that is cut": lambda folder: _cut(folder / "kept.json"),
    "no memory": lambda folder: (folder / "memory").unlink(),
}


@asynccontextmanager
async def _asleep(make: Make, qemu: Qemu) -> AsyncIterator[AsyncSandbox]:
    sandbox = await make()
    await sandbox.files.write("kept", "one")
    await sandbox.close()
    await qemu.sleep(sandbox.id)
    yield sandbox
    assert await _state(qemu, sandbox) is BoxState.ASLEEP
    await qemu.stop(sandbox.id)
    await qemu.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "one"


async def test_a_damaged_memory_is_refused_and_its_files_are_not_lost(make: Make, qemu: Qemu, state_dir: Path) -> None:
    async with _asleep(make, qemu) as sandbox:
        asleep = MachineBox(state_dir, sandbox.id).asleep
        whole = asleep.with_name("aside")
        asleep.rename(whole)
        for what, damage in _DAMAGE.items():
            await _run(["cp", "-a", "--sparse=always", whole, asleep])
            damage(asleep)
            with pytest.raises(Conflict, match=r"cannot wake.*stop it and start it"):
                await qemu.resume(sandbox.id)
            assert machines_in(state_dir) == [], what
            assert await _state(qemu, sandbox) is BoxState.ASLEEP
            await _run(["rm", "-r", asleep])
        whole.rename(asleep)


async def test_the_memory_of_another_box_or_of_another_version_is_refused(
    make: Make, qemu: Qemu, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _asleep(make, qemu) as one, _asleep(make, qemu) as other:
        asleep = [MachineBox(state_dir, each.id).asleep for each in (one, other)]
        aside = asleep[0].rename(asleep[0].with_name("aside"))
        await _run(["cp", "-a", asleep[1], asleep[0]])
        with pytest.raises(Conflict, match=f"another box, {other.id}"):
            await qemu.resume(one.id)
        await _run(["rm", "-r", asleep[0]])
        aside.rename(asleep[0])
        with monkeypatch.context() as patched:
            patched.setattr(qemu._hypervisor, "_version", "99.0")
            with pytest.raises(Conflict, match=r"saved by QEMU .* and this is 99\.0"):
                await qemu.resume(one.id)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", sleep_victim.POINTS)
async def test_a_killed_manager_leaves_a_box_that_runs_or_is_paused_or_sleeps(
    make: Make, qemu: Qemu, config: QemuConfig, state_dir: Path, point: str, after: bool
) -> None:
    sandbox = await make()
    await _counting(sandbox)
    await sandbox.close()
    when = "after" if after else "before"
    argv = [sys.executable, "-m", sleep_victim.__name__, config.state_dir, config.cache_dir, sandbox.id, point, when]
    victim = await asyncio.create_subprocess_exec(*argv, cwd=TESTS)
    assert await victim.wait() == -9
    state = await _state(qemu, sandbox)
    assert state in (BoxState.RUNNING, BoxState.PAUSED, BoxState.ASLEEP)
    if state is BoxState.ASLEEP:
        assert machines_in(state_dir) + wardens_in(state_dir) == []
    if state is not BoxState.RUNNING:
        await qemu.resume(sandbox.id)
    assert await _state(qemu, sandbox) is BoxState.RUNNING
    count = int(await sandbox.files.read_text("count"))
    assert await _above(sandbox, count + 1) > count
    assert {path.name for path in (state_dir / sandbox.id).iterdir()} >= {"vm", "meta.json"}


async def test_a_sleep_that_fails_leaves_a_box_that_runs(
    make: Make, qemu: Qemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make()
    await _counting(sandbox)
    await sandbox.close()

    async def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(qemu._hypervisor, "copy_memory", fail)
        with pytest.raises(OSError, match="No space"):
            await qemu.sleep(sandbox.id)
    assert await _state(qemu, sandbox) is BoxState.RUNNING
    count = int(await sandbox.files.read_text("count"))
    assert await _above(sandbox, count + 1) > count


async def test_a_box_that_is_gone_or_stopped_does_not_sleep(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    await qemu.stop(sandbox.id)
    with pytest.raises(WrongState, match="does not run"):
        await qemu.sleep(sandbox.id)
    assert VmFolder(MachineBox(qemu._state_dir, new_id()).path).read() is None
