"""Ways out of a machine, and ways to harm the host from one, judged from the host."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
from escape import host
from escape.escapes import CatalogueCases
from escape.strangers import StrangerCases
from escape.takeover import TakeoverCases
from providers.qemu.host import Make, in_guest, machines_in, wardens_in

from skerry.errors import SkerryError
from skerry.model.spec import SpecOptions
from skerry.providers.qemu import Qemu

pytestmark = pytest.mark.timeout(240)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each machine a uid of its own")
MIB = 1 << 20
OUR_PYTHON = "/.skerry/python/lib/ld.so --library-path /.skerry/python/lib /.skerry/python/bin/python3 -I -S -B"


class TestQemu(CatalogueCases, TakeoverCases):
    column = "qemu"
    python = tuple(OUR_PYTHON.split())
    options: ClassVar[SpecOptions] = {"provider": "qemu", "data": False}

    @pytest.fixture
    def provider(self, qemu: Qemu) -> Qemu:
        return qemu


async def as_uid(uid: int, *argv: str | Path, cwd: Path | None = None) -> int:
    """The code of a command that whoever has taken a hypervisor over could run on the host."""
    run = functools.partial(subprocess.run, argv, cwd=cwd, user=uid, group=uid, extra_groups=[], capture_output=True)
    return (await asyncio.to_thread(run)).returncode


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@AS_ROOT
async def test_whoever_breaks_out_of_a_machine_is_nobody_on_the_host(make: Make, state_dir: Path) -> None:
    await asyncio.gather(make(), make())
    pids = machines_in(state_dir)
    uids = set()
    for pid in (*pids, *wardens_in(state_dir)):
        status = status_of(pid)
        assert status["NoNewPrivs"] == "1"
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        for namespace in ("net", "ipc"):
            assert os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")
        uids.add(status["Uid"])
        assert len(set(status["Uid"].split())) == 1
        assert not set(status["Uid"].split()) & {"0", str(os.getuid())}
    assert len(pids) == len(uids) == 2
    for pid in pids:
        assert status_of(pid)["Seccomp"] == "2"
        cards = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        assert {card.partition(":")[0].strip() for card in cards} <= {"lo", "tunl0", "sit0", "ip6tnl0"}


async def test_a_hypervisor_has_no_file_open_but_its_own_and_what_is_shared(
    make: Make, state_dir: Path, qemu_cache: Path
) -> None:
    sandbox = await make()
    own, base = str(state_dir / sandbox.id / "vm"), str(state_dir / sandbox.id / "base.ext4")
    for pid in machines_in(state_dir):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/dev/", own)):
                continue
            assert target.startswith((str(qemu_cache / "vm"), base)), target
            flags = int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2].split()[0], 8)
            is_memory = target.endswith("/memory")  # older versions open it for writing, and never write
            assert is_memory or flags & os.O_ACCMODE == os.O_RDONLY or flags & 0o10000000, target


@AS_ROOT
async def test_a_uid_of_a_machine_reaches_nothing_of_another_nor_of_ours(
    make: Make, state_dir: Path, qemu_cache: Path
) -> None:
    first, second = await asyncio.gather(make(), make())
    uid = os.stat(state_dir / first.id / "vm" / "disk.qcow2").st_uid
    wanted = [
        state_dir / second.id / "vm/disk.qcow2",
        state_dir / second.id / "vm/v.sock",
        state_dir / second.id / "vm/qmp.sock",
        state_dir / first.id / "meta.json",
        state_dir / "volumes",
        *(qemu_cache / "vm/templates").glob("[!.]*/memory"),
    ]
    for path in wanted:
        assert await as_uid(uid, "test", "-r", path), path
    for path in (state_dir, state_dir / first.id, qemu_cache / "vm/images", qemu_cache / "vm/kernels"):
        assert await as_uid(uid, "test", "-w", path), path


async def test_nothing_of_the_host_is_in_the_machine(
    make: Make, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / f"of-the-host-{os.getpid()}"
    secret.write_text("x")
    monkeypatch.setenv("PASSWORD_OF_THE_MANAGER", "qwertz-12345")
    before = host.state()
    sandbox = await make()
    for user in (None, "root"):
        found = await sandbox.exec(f"find / -xdev -name {secret.name}; ls {secret} {state_dir}", user=user)
        assert found.stdout == b""
        said = (
            await sandbox.exec("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/cmdline; env", user=user)
        ).stdout
        assert b"PATH" in said
        for word in (b"qwertz", os.fsencode(state_dir), os.uname().nodename.encode()):
            assert word not in said
    assert host.state() == before


@pytest.mark.parametrize(("user", "capabilities"), [(None, "0000000000000000"), ("root", "00000000a00004fb")])
async def test_no_user_of_a_machine_rules_it(make: Make, user: str | None, capabilities: str) -> None:
    sandbox = await make(**({} if user is None else {"user": user}))
    status = (await sandbox.exec("cat /proc/self/status")).text
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert f"{kind}:\t{capabilities}" in status
    assert "NoNewPrivs:\t1" in status
    attempts = {
        "the disks": "cat /dev/vd*",
        "the channel": "cat /dev/vport* /dev/virtio-ports/*",
        "the console": "test -c /dev/ttyS0 && echo x > /dev/ttyS0",
        "memory": "cat /dev/mem",
        "the kernel's log": "cat /dev/kmsg",
        "the first process": "ls /proc/1/root/run/skerry",
        "a mount": "mount -t tmpfs none /tmp",
        "a kernel setting": "echo 1 > /proc/sys/kernel/panic",
        "a panic": "echo c > /proc/sysrq-trigger",
        "the image": "echo x > /bin/x",
        "the agent": "echo x > /.skerry/agent/x",
        "its limits": "echo max > /sys/fs/cgroup/*/pids.max",
        "the clock": "date -s 2001-01-01; test $(date +%Y) = 2001",
        "an end": "reboot -f",
    }
    for what, attempt in attempts.items():
        done = await sandbox.exec(attempt, timeout_s=20)
        assert not done.ok, what
    await sandbox.exec("kill -9 1; kill -9 -1", timeout_s=20)
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_root_of_a_box_cannot_reach_its_limits_through_a_namespace(make: Make) -> None:
    sandbox = await make(user="root")
    lift = """
import ctypes, os
call = ctypes.CDLL(None).unshare, ctypes.CDLL(None).mount
made = call[0](0x10000000 | 0x20000 | 0x2000000), call[1](b"none", b"/tmp", b"cgroup2", 0, None)
print(made, os.path.exists("/tmp/pids.max"))
"""
    await sandbox.files.write("lift.py", lift)
    done = await sandbox.exec(f"{OUR_PYTHON} lift.py", timeout_s=20)
    assert done.text == "(-1, -1) False\n", done


@pytest.mark.parametrize("user", [None, "root"])
async def test_nobody_in_a_machine_has_a_namespace_in_which_to_mount(make: Make, user: str | None) -> None:
    sandbox = await make(**({} if user is None else {"user": user}))
    done = await sandbox.exec("unshare -U -r -m mount -t tmpfs none /tmp", timeout_s=20)
    assert not done.ok
    assert b"No space left" in done.stderr or b"not permitted" in done.stderr, done


async def test_a_fork_bomb_stops_at_the_limit(make: Make, state_dir: Path) -> None:
    sandbox = await make(pids=40)
    done = await sandbox.exec("for i in $(seq 200); do sleep 60 & done; echo all", timeout_s=30)
    assert done.stdout != b"all\n" or done.stderr
    assert all(len(os.listdir(f"/proc/{pid}/task")) < 20 for pid in machines_in(state_dir))
    await sandbox.ping()


async def test_a_memory_hog_takes_no_more_of_the_host_than_its_machine_has(make: Make, state_dir: Path) -> None:
    sandbox = await make(memory="64M")
    try:
        done = await sandbox.exec("head -c 150000000 /dev/zero | tail -n 1 | wc -c", timeout_s=60)
        assert done.text.strip() != "300000000"
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    except SkerryError:
        """The whole machine may have ended: the limit held too."""
    for pid in machines_in(state_dir):
        resident = int(status_of(pid)["VmRSS"].split()[0]) * 1024
        assert resident < 512 * MIB


async def test_a_disk_that_is_filled_takes_no_more_of_the_host_than_was_given(make: Make, state_dir: Path) -> None:
    sandbox = await make(disk="32M")
    for _ in range(3):
        done = await sandbox.exec("dd if=/dev/urandom of=big bs=1M count=60 2>&1; rm big", timeout_s=100)
        assert b"No space left" in done.stdout
    used = os.stat(state_dir / sandbox.id / "vm/disk.qcow2").st_blocks * 512
    assert used < 40 * MIB


async def test_memory_that_is_filled_by_files_is_limited_and_the_machine_lives_on(make: Make) -> None:
    sandbox = await make(memory="128M")
    for place in ("/tmp", "/dev/shm"):
        done = await sandbox.exec(f"dd if=/dev/zero of={place}/big bs=1M count=600 2>&1", timeout_s=60)
        assert b"No space left" in done.stdout
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    assert sandbox.enforced["tmp"].by == "a tmpfs of 64M"


async def test_a_flood_on_the_console_is_bounded(make: Make, state_dir: Path, qemu: Qemu) -> None:
    sandbox = await make()
    await in_guest(qemu, sandbox.id, "yes floods-the-console | head -c 1500000 > /dev/ttyS0")
    folder = state_dir / sandbox.id / "vm"
    logs = [path for path in folder.iterdir() if path.name.startswith("console.log")]
    assert sum(path.stat().st_size for path in logs) <= 1.1 * MIB
    said = b"".join([chunk async for chunk in qemu.logs(sandbox.id, tail=3)])
    assert said.count(b"\n") <= 3
    assert b"floods" in said
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@AS_ROOT
async def test_what_a_hypervisor_puts_into_its_folder_is_not_followed(make: Make, state_dir: Path, qemu: Qemu) -> None:
    sandbox = await make()
    folder = state_dir / sandbox.id / "vm"
    uid = os.stat(folder / "disk.qcow2").st_uid
    secret = state_dir / "secret"
    secret.write_text("of the host")
    assert await as_uid(uid, "rm", "-f", "console.log", cwd=folder) == 0
    assert await as_uid(uid, "ln", "-s", secret, "console.log", cwd=folder) == 0
    assert b"of the host" not in b"".join([chunk async for chunk in qemu.logs(sandbox.id)])
    assert await as_uid(uid, "rm", "-f", "vm.json", cwd=folder) != 0
    assert await as_uid(uid, "mv", "disk.qcow2", "elsewhere", cwd=folder) == 0
    assert await as_uid(uid, "ln", "-s", secret, "disk.qcow2", cwd=folder) == 0
    with pytest.raises((SkerryError, OSError)):
        await qemu.snapshot(sandbox.id, "stolen")
    assert await qemu.snapshots() == []


class TestStrangers(StrangerCases):
    options: ClassVar[SpecOptions] = {"provider": "qemu", "data": False}
    has_mounts = False

    @pytest.fixture
    def provider(self, qemu: Qemu) -> Qemu:
        return qemu

    @pytest.fixture
    def places(self, state_dir: Path) -> tuple[Path, ...]:
        return (state_dir,)
