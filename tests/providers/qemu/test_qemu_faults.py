"""Whoever dies, hangs or is damaged: what is left is told as it is, and is gone after a destroy."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from few_inodes import few_inodes, use_up_inodes
from providers.qemu import victim
from providers.qemu.host import Make, in_guest, left_of, machines_in, wardens_in

from skerry.errors import AgentUnreachable, CreateFailed, DiskFull, ProviderError, SkerryError
from skerry.host import sparse
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.providers.base import BoxState
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.machine.images import Source, Sources
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import eventually
from skerry.vm import guest, templates

pytestmark = pytest.mark.timeout(240)


async def ended(qemu: Qemu, id: SandboxId, state: BoxState = BoxState.DEAD) -> None:
    async def is_so() -> bool:
        return (await qemu.discover())[id].state is state

    await eventually(is_so, f"the box is {state}")


# parties that die


@pytest.mark.parametrize("party", ["hypervisor", "warden"])
async def test_a_machine_whose_processes_are_killed_can_be_started_again(
    make: Make, qemu: Qemu, state_dir: Path, party: str
) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "x" * 100_000)
    await sandbox.exec("sync")
    (pid,) = (machines_in if party == "hypervisor" else wardens_in)(state_dir)
    os.kill(pid, signal.SIGKILL)
    await ended(qemu, sandbox.id, BoxState.STOPPED)
    with pytest.raises(SkerryError):
        await sandbox.exec(["true"])
    await qemu.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "x" * 100_000


async def test_a_machine_that_went_down_with_its_host_can_be_started_again(
    make: Make, qemu: Qemu, state_dir: Path
) -> None:
    sandbox = await make()
    for pid in machines_in(state_dir):
        os.kill(pid, signal.SIGKILL)
    await ended(qemu, sandbox.id, BoxState.STOPPED)
    folder = MachineBox(state_dir, sandbox.id).vm
    vm = folder.read()
    assert vm is not None
    folder.write_file("vm.json", msgspec.json.encode(msgspec.structs.replace(vm, boot_id="another")))
    assert (await qemu.discover())[sandbox.id].state is BoxState.STOPPED
    await qemu.start(sandbox.id, sandbox.spec)
    await sandbox.ping()


async def test_a_machine_whose_kernel_fails_is_dead_and_says_so(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    with pytest.raises(SkerryError):
        await in_guest(qemu, sandbox.id, "echo c > /proc/sysrq-trigger")
    await ended(qemu, sandbox.id)
    said = b"".join([chunk async for chunk in qemu.logs(sandbox.id)])
    assert b"panic" in said


async def test_an_agent_that_is_killed_ends_its_machine(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    with suppress(SkerryError):  # the machine may end before the answer
        await in_guest(qemu, sandbox.id, "kill -9 $(grep -l '^Uid:.1000' /proc/[0-9]*/status | cut -d/ -f3)")
    await ended(qemu, sandbox.id)
    with pytest.raises(SkerryError):
        await sandbox.ping()


async def kill_maker(config: QemuConfig, id: SandboxId, point: str, when: str) -> None:
    command = [sys.executable, victim.__file__, config.state_dir, config.cache_dir, id, point, when]
    done = await asyncio.to_thread(subprocess.run, command, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("point", "when"), [*((point, "before") for point in victim.POINTS), ("restore", "after"), ("whole", "after")]
)
async def test_a_maker_that_is_killed_leaves_what_destroy_removes(
    qemu: Qemu, config: QemuConfig, state_dir: Path, point: str, when: str
) -> None:
    id = new_id()
    await kill_maker(config, id, point, when)
    before = set(state_dir.iterdir())
    status = (await qemu.discover()).get(id)
    assert set(state_dir.iterdir()) == before, "looking changes nothing"
    if status is not None:
        is_whole = (point, when) == ("whole", "after")
        assert (status.state is BoxState.RUNNING) == is_whole
    await qemu.destroy(id, volumes=True)
    assert left_of(state_dir) == set()
    assert await qemu.volumes() == []


async def test_a_maker_that_is_killed_while_it_makes_a_template_leaves_no_half_of_one(
    config: QemuConfig, empty_cache: Path, state_dir: Path
) -> None:
    config, id = msgspec.structs.replace(config, cache_dir=str(empty_cache)), new_id()
    await kill_maker(config, id, "template.save", "before")
    assert machines_in(state_dir)
    provider = Qemu(config)
    await provider.destroy(id, volumes=True)
    assert left_of(state_dir) == set()
    sandbox = await AsyncSandbox.create(Spec(provider="qemu", data=False), provider)
    assert (await sandbox.exec("echo up")).stdout == b"up\n"
    await sandbox.destroy()
    await provider.aclose()
    kept = [path for path in (empty_cache / "vm/templates").iterdir() if path.name != ".locks"]
    assert [path.name.startswith(".") for path in kept] == [False]


# what hangs


async def test_a_machine_that_hangs_is_told_by_a_deadline_and_destroyed(
    make: Make, qemu: Qemu, state_dir: Path
) -> None:
    sandbox = await make()
    (pid,) = machines_in(state_dir)
    os.kill(pid, signal.SIGSTOP)
    await sandbox.close()
    with pytest.raises(SkerryError):
        await sandbox.ping()
    assert (await qemu.discover())[sandbox.id].state is BoxState.RUNNING
    await sandbox.destroy()
    assert left_of(state_dir) == set()


async def test_a_machine_that_hangs_is_stopped_all_the_same(make: Make, qemu: Qemu, state_dir: Path) -> None:
    sandbox = await make()
    (pid,) = machines_in(state_dir)
    os.kill(pid, signal.SIGSTOP)
    await qemu.stop(sandbox.id)
    assert (await qemu.discover())[sandbox.id].state is BoxState.STOPPED
    assert machines_in(state_dir) == []
    await qemu.start(sandbox.id, sandbox.spec)
    await sandbox.ping()


async def test_a_guest_that_never_comes_up_is_given_up_with_its_last_words(
    qemu: Qemu, config: QemuConfig, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel finds no first program, and would wait for ever."""
    find = Sources.find

    async def without_initrd(self: Sources, name: str | None) -> Source:
        source = await find(self, name)
        empty = state_dir / "initrd"
        empty.write_bytes(b"")
        kernel = msgspec.structs.replace(source.image.kernel, key="other", initrd=empty)
        return msgspec.structs.replace(source, image=msgspec.structs.replace(source.image, kernel=kernel))

    monkeypatch.setattr(Sources, "find", without_initrd)
    with pytest.raises(CreateFailed) as failure:
        await AsyncSandbox.create(Spec(provider="qemu", data=False), qemu)
    assert "panic" in failure.value.log
    assert left_of(state_dir) == set()


async def test_a_wrong_kernel_file_is_an_error_that_says_so(
    qemu: Qemu, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Sources.find
    wrong = state_dir / "kernel"
    wrong.write_bytes(b"this is no kernel" * 1000)

    async def with_wrong_kernel(self: Sources, name: str | None) -> Source:
        source = await find(self, name)
        kernel = msgspec.structs.replace(source.image.kernel, key="wrong", vmlinuz=wrong, vmlinux=wrong)
        return msgspec.structs.replace(source, image=msgspec.structs.replace(source.image, kernel=kernel))

    monkeypatch.setattr(Sources, "find", with_wrong_kernel)
    with pytest.raises(CreateFailed, match="did not come up") as failure:
        await AsyncSandbox.create(Spec(provider="qemu", data=False), qemu)
    assert str(failure.value).count("the machine ended") == 1, "nothing is said twice"
    assert left_of(state_dir) == set()


# what is full or damaged


async def test_a_full_disk_in_the_guest_is_told_and_survived(make: Make, qemu: Qemu) -> None:
    sandbox = await make(disk="16M")
    with pytest.raises(DiskFull):
        await sandbox.files.write("big", bytes(32 << 20))
    await sandbox.exec("cat /dev/zero > full", timeout_s=60)
    with pytest.raises(DiskFull):
        await sandbox.files.write("more", bytes(1 << 20))
    await qemu.pause(sandbox.id)
    await qemu.resume(sandbox.id)
    await qemu.stop(sandbox.id)
    await qemu.start(sandbox.id, sandbox.spec)
    assert (await sandbox.files.stat("full")).size > 8 << 20


@pytest.fixture
def empty_cache(qemu_cache: Path, state_dir: Path) -> Path:
    """All of the shared one but its templates."""
    own = state_dir / "cache"
    ignore = shutil.ignore_patterns("templates")
    shutil.copytree(qemu_cache / "vm", own / "vm", copy_function=os.link, ignore=ignore)
    return own


@pytest.fixture
async def own_cache(qemu_cache: Path, empty_cache: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a copy of the template that boxes are made of now."""
    keys, key_of = [], templates.key_of

    def noted(*parts: Any) -> str:
        keys.append(key_of(*parts))
        return keys[-1]

    monkeypatch.setattr(templates, "key_of", noted)
    await (await make()).destroy()
    used = qemu_cache / "vm/templates" / keys[-1]
    own = empty_cache / "vm/templates" / used.name
    own.mkdir(parents=True)
    for file in used.iterdir():
        sparse.copy(file, own / file.name)
        shutil.copystat(file, own / file.name)
    return empty_cache


@pytest.mark.parametrize("damaged", ["memory", "state"])
async def test_a_damaged_template_is_made_anew(own_cache: Path, config: QemuConfig, damaged: str) -> None:
    """Also one whose files look as they did: then its clones do not come up."""
    (template,) = (own_cache / "vm/templates").glob("[!.]*")
    before = (template / damaged).stat()
    with open(template / damaged, "r+b") as file:
        file.write(b"\xff" * before.st_size)
    os.utime(template / damaged, ns=(before.st_atime_ns, before.st_mtime_ns))
    provider = Qemu(msgspec.structs.replace(config, cache_dir=str(own_cache)))
    sandbox = await AsyncSandbox.create(Spec(provider="qemu", data=False), provider)
    assert (await sandbox.exec("echo up")).stdout == b"up\n"
    await sandbox.destroy()
    await provider.aclose()
    assert (template / damaged).stat().st_mtime_ns != before.st_mtime_ns


async def test_a_damaged_snapshot_makes_no_box(make: Make, qemu: Qemu, state_dir: Path) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "x" * 100_000)
    await qemu.snapshot(sandbox.id, "one")
    await sandbox.destroy()
    disk = state_dir / "snapshots/one/disk.raw"
    with open(disk, "r+b") as file:
        file.seek(disk.stat().st_size // 2)
        file.write(b"other")
    with pytest.raises(ProviderError, match="damaged"):
        await make(snapshot="one")
    await qemu.remove_snapshot("one")
    assert left_of(state_dir) == set()


# what clones must not share


async def test_clones_share_neither_chance_nor_clock_nor_name(make: Make) -> None:
    boxes = await asyncio.gather(*(make() for _ in range(4)))
    look = "head -c 16 /dev/urandom | od -An -tx1; hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid"
    seen = [(await box.exec(look)).text.splitlines() for box in boxes]
    for facts in zip(*seen, strict=True):
        assert len(set(facts)) == len(boxes), facts
    for box in boxes:
        before = time.time()
        told = float((await box.exec(["date", "+%s"])).text)
        assert before - 2 < told < time.time() + 2


async def test_the_clock_is_right_after_a_pause(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    await qemu.pause(sandbox.id)
    await asyncio.sleep(2.5)  # time has to pass
    await qemu.resume(sandbox.id)
    before = time.time()
    told = float((await sandbox.exec(["date", "+%s"])).text)
    assert before - 1.5 < told < time.time() + 1.5


async def test_a_guest_that_is_not_heard_of_after_its_pause_is_an_error_and_the_next_try_may_succeed(
    make: Make, qemu: Qemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make()
    await qemu.pause(sandbox.id)
    with monkeypatch.context() as deaf:
        deaf.setattr(guest, "greet", _nobody_answers)
        with pytest.raises(ProviderError, match="its guest does not go on"):
            await qemu.resume(sandbox.id)
        for act in (qemu.pause(sandbox.id), qemu.snapshot(sandbox.id, "torn")):
            with pytest.raises(ProviderError, match="does not write out its files"):
                await act
    assert await qemu.snapshots() == []
    await qemu.resume(sandbox.id)
    assert (await sandbox.exec("echo on")).text == "on\n"


async def _nobody_answers(*_: object) -> None:
    raise AgentUnreachable("nobody answers")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_a_machine_is_destroyed_where_no_file_can_be_made(config: QemuConfig, state_dir: Path) -> None:
    with few_inodes(state_dir / "small"):
        provider = Qemu(msgspec.structs.replace(config, state_dir=str(state_dir / "small")))
        spec = Spec.of(provider="qemu", data=False)
        sandbox = await AsyncSandbox.create(spec, provider)
        use_up_inodes(state_dir / "small")
        try:
            with pytest.raises(ProviderError, match="No space left"):
                await AsyncSandbox.create(spec, provider)
        finally:
            await sandbox.destroy()
        assert await provider.discover() == {}
        await provider.aclose()
