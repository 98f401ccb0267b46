"""What machines are made of: roots that can be changed, users, disks that grow, data, networks, images."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest
from engines.images import make_debian
from providers import packages
from providers.qemu.host import Make

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, Unsupported
from skerry.model.spec import Spec, new_id
from skerry.providers.base import BoxState
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm import launch
from skerry.vm.base import EMULATED, Capabilities, Kernel
from skerry.vm.qemu.hypervisor import QemuHypervisor

pytestmark = pytest.mark.timeout(240)


async def test_a_machine_in_software_says_that_it_is_no_boundary(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    accelerator = (await qemu._can()).accelerator
    told = sandbox.enforced["isolation"]
    assert EMULATED in told.why_not if accelerator == "tcg" else "KVM" in told.by


async def test_a_machine_is_killed_before_its_warden_when_the_hosts_memory_runs_out(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    vm = MachineBox(qemu._state_dir, sandbox.id).vm.read()
    assert vm is not None
    assert vm.vmm is not None
    assert vm.warden is not None
    scores = [int(Path(f"/proc/{each.pid}/oom_score_adj").read_text()) for each in (vm.vmm, vm.warden)]
    assert scores[0] == 1000 > scores[1]


async def test_a_writable_root_is_changed_and_keeps_that(make: Make, qemu: Qemu) -> None:
    sandbox = await make(writable_root=True, user="root")
    assert (await sandbox.exec("echo new > /etc/new && rm /etc/passwd && echo x > ~/f")).ok
    await qemu.snapshot(sandbox.id, "changed")
    await qemu.stop(sandbox.id)
    await qemu.start(sandbox.id, sandbox.spec)
    look = "cat /etc/new; ls /etc/passwd"
    assert (await sandbox.exec(look)).stdout == b"new\n"
    await sandbox.destroy()
    with pytest.raises(InvalidSpec, match="writable_root"):
        await make(snapshot="changed")
    copy = await make(snapshot="changed", writable_root=True, user="root")
    assert (await copy.exec(look)).stdout == b"new\n"
    await copy.destroy()
    plain = await make(user="root")
    assert not (await plain.exec("echo x > /etc/new")).ok
    await qemu.remove_snapshot("changed")


@pytest.fixture
def files_of_others(tmp_path: Path, vm_cache: Path, vm_kernel: Kernel) -> tuple[Path, Path]:
    """A kernel with its modules, and a root file system with little more than a shell, in folders of a user's."""
    for name in ("boot", "lib/modules", "root/bin", "root/etc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/modules" / vm_kernel.version).symlink_to(vm_cache / "kernels" / vm_kernel.key / "modules")
    shutil.copyfile(vm_kernel.vmlinuz, tmp_path / "boot/vmlinuz")
    shutil.copy2(shutil.which("busybox") or "busybox", tmp_path / "root/bin/busybox")
    for name in ("sh", "cat", "uname"):
        (tmp_path / "root/bin" / name).symlink_to("busybox")
    (tmp_path / "root/etc/motd").write_text("made elsewhere\n")
    root = tmp_path / "rootfs.ext4"
    subprocess.run(["/sbin/mke2fs", "-q", "-t", "ext4", "-d", tmp_path / "root", root, "16M"], check=True, timeout=30)
    return tmp_path / "boot/vmlinuz", root


async def test_a_machine_boots_a_kernel_and_a_root_file_system_by_their_paths(
    config: QemuConfig, files_of_others: tuple[Path, Path], tmp_path: Path, vm_kernel: Kernel
) -> None:
    """Neither is changed, though the root lacks what machines mount over and the box may write to all of it."""
    kernel, root = files_of_others
    before = root.read_bytes()
    mine = msgspec.structs.replace(config, cache_dir=str(tmp_path / "cache"), kernel=str(kernel), template=False)
    provider = Qemu(mine)
    spec = Spec.of(provider="qemu", image=str(root), data=False)
    for writable in (False, True):
        sandbox = await AsyncSandbox.create(spec.but(writable_root=writable, user="root"), provider)
        try:
            said = (await sandbox.exec("cat /etc/motd; uname -r; echo mine > /etc/motd && cat /etc/motd")).text
            assert said.splitlines() == ["made elsewhere", vm_kernel.version, *(["mine"] if writable else [])]
        finally:
            await sandbox.destroy()
    assert root.read_bytes() == before
    assert [image.names for image in await provider.images()] == [(str(root),)]
    await provider.aclose()


async def test_a_box_of_a_snapshot_may_have_a_larger_disk(make: Make, qemu: Qemu) -> None:
    small = await make(disk="16M")
    await small.files.write("kept", "x")
    await qemu.snapshot(small.id, "small")
    await small.destroy()
    large = await make(snapshot="small", disk="128M")
    assert await large.files.read_text("kept") == "x"
    await large.files.write("more", bytes(20 << 20))
    await large.destroy()
    await qemu.remove_snapshot("small")


async def test_commands_run_as_the_user_that_is_asked_for(make: Make) -> None:
    sandbox = await make()
    ids = [(await sandbox.exec("id -u; id -g", user=user)).text for user in (None, "root", "1234:77", "user")]
    assert ids == ["1000\n1000\n", "0\n0\n", "1234\n77\n", "1000\n1000\n"]
    with pytest.raises(InvalidSpec, match="nobody-there"):
        await sandbox.exec("id", user="nobody-there")
    numbered = await make(user="2000")
    assert (await numbered.exec("id -u; touch ~/mine && echo made")).text == "2000\nmade\n"


async def test_root_does_what_package_managers_and_servers_do(make: Make) -> None:
    sandbox = await make(user="root", writable_root=True)
    script = "echo x > /usr/f && chown 33:44 /usr/f && chmod 600 /usr/f && cat /usr/f && stat -c %u:%g /usr/f"
    assert (await sandbox.exec(script)).text == "x\n33:44\n"


async def test_another_process_starts_a_box_on_what_its_kernel_was_found_to_run_on(
    make: Make, qemu: Qemu, config: QemuConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kernel to try it with, KVM would count as not there."""
    sandbox = await make()
    await qemu.stop(sandbox.id)
    tried: list[Kernel | None] = []
    probe = QemuHypervisor.probe

    async def noted(hypervisor: QemuHypervisor) -> Capabilities:
        tried.append(hypervisor._any_kernel())
        return await probe(hypervisor)

    monkeypatch.setattr(QemuHypervisor, "probe", noted)
    another = Qemu(config)
    await another.start(sandbox.id, sandbox.spec)
    await another.aclose()
    assert tried
    assert None not in tried


async def test_data_has_one_user_at_a_time(make: Make, qemu: Qemu) -> None:
    first = await make(data=True, name="work")
    with pytest.raises(Conflict, match=first.id):
        await make(data=True, name="work")
    assert set(await qemu.discover()) == {first.id}
    await first.ping()


async def test_a_paused_box_leaves_its_data_whole_for_the_next(make: Make, qemu: Qemu) -> None:
    first = await make(data=True, name="work")
    await first.files.write("/.data/f", "kept")
    await qemu.pause(first.id)
    await first.destroy(volumes=False)
    second = await make(data=True, name="work")
    assert await second.files.read_text("/.data/f") == "kept"


async def test_a_snapshot_of_a_paused_and_of_a_stopped_box_has_all_that_was_written(make: Make, qemu: Qemu) -> None:
    sandbox = await make()
    await sandbox.files.write("f", "one")
    await qemu.pause(sandbox.id)
    await qemu.snapshot(sandbox.id, "paused")
    assert (await qemu.discover())[sandbox.id].state is BoxState.PAUSED
    await qemu.resume(sandbox.id)
    await sandbox.files.write("f", "two")
    await qemu.stop(sandbox.id)
    await qemu.snapshot(sandbox.id, "stopped")
    await sandbox.destroy()
    for name, text in (("paused", "one"), ("stopped", "two")):
        copy = await make(snapshot=name)
        assert await copy.files.read_text("f") == text
        await copy.destroy()
        await qemu.remove_snapshot(name)


@pytest.mark.skipif(launch.why_no_network() is not None, reason=str(launch.why_no_network()))
async def test_a_network_leads_out_and_not_to_the_hosts_own_services(make: Make) -> None:
    sandbox = await make(network="bridge")
    with socket.socket() as local, socket.socket() as open_to_all:
        local.bind(("127.0.0.1", 0))
        open_to_all.bind(("0.0.0.0", 0))
        for listener in (local, open_to_all):
            listener.listen()
            listener.setblocking(False)
        own, shared = local.getsockname()[1], open_to_all.getsockname()[1]
        tries = [f"nc -w 2 {to} {port} & " for to in ("127.0.0.1", "10.0.2.2", "10.0.3.2") for port in (own, shared)]
        await sandbox.exec("".join(tries) + "wait", timeout_s=5)
        for listener in (local, open_to_all):
            with pytest.raises(BlockingIOError):
                listener.accept()
        if (address := _address_of_host()) is not None:
            await sandbox.exec(f"echo x | nc -w 5 {address} {shared}", timeout_s=20)
            connection, _ = open_to_all.accept()
            connection.close()


def _address_of_host() -> str | None:
    """By which the host is known outside; None if it is not."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


async def test_without_slirp4netns_a_network_is_refused_with_the_fix(
    qemu: Qemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(Unsupported, match=r"slirp4netns|root"):
        await qemu.enforcement(Spec.of(provider="qemu", network="bridge"))


async def test_without_an_image_the_error_says_how_to_make_one(config: QemuConfig, tmp_path: Path) -> None:
    provider = Qemu(msgspec.structs.replace(config, cache_dir=str(tmp_path)))
    with pytest.raises(ImageNotFound, match="image build --vm --recipe minimal"):
        await AsyncSandbox.create(Spec(provider="qemu"), provider)
    told = await provider.describe()
    assert "image build" in told["image"].why_not
    await provider.aclose()


async def test_stop_start_and_logs_of_what_is_not_there_is_not_found(qemu: Qemu) -> None:
    id = new_id()
    for attempt in (qemu.stop(id), qemu.start(id, Spec()), qemu.pause(id), qemu.resume(id), qemu.snapshot(id, "x")):
        with pytest.raises(NotFound):
            await attempt
    with pytest.raises(NotFound):
        await anext(qemu.logs(id))


async def test_machines_without_templates_boot_and_are_the_same(make: Make, config: QemuConfig) -> None:
    cold = Qemu(msgspec.structs.replace(config, template=False))
    sandbox = await AsyncSandbox.create(Spec(provider="qemu", data=False, env={"A": "1"}), cold)
    assert (await sandbox.exec('echo "$A"; id -u')).text == "1\n1000\n"
    await sandbox.destroy()
    await cold.aclose()


async def test_the_environment_of_a_box_is_nowhere_on_the_hosts_disk(make: Make, state_dir: Path) -> None:
    secret = b"s3cret-" + os.urandom(8).hex().encode()
    sandbox = await make(env={"TOKEN": secret.decode()})
    assert (await sandbox.exec('echo "$TOKEN"')).stdout.strip() == secret

    def holds(path: Path) -> bool:
        return path.is_file() and path.stat().st_size < 64 << 20 and secret in path.read_bytes()

    found = await asyncio.to_thread(lambda: [path for path in state_dir.rglob("*") if holds(path)])
    assert found == []


async def test_an_admin_of_a_machine_installs_a_package(make: Make, qemu: Qemu, tmp_path: Path) -> None:
    await qemu.import_image(make_debian(), "skerry-test-debian", lambda _: None)
    try:
        sandbox = await make(image="skerry-test-debian", admin=True, memory="256M")
        assert sandbox.enforced["admin"].by == "root of a kernel of its own"
        await packages.check_capabilities(sandbox, 10, 29)  # NET_BIND_SERVICE and AUDIT_WRITE, as every root there has
        await packages.check_root_can_install(sandbox, packages.make(tmp_path))
        await sandbox.destroy()
        plain = await make(image="skerry-test-debian")
        await packages.check_scratch(plain)
        assert (await plain.exec("grep NoNewPrivs /proc/self/status")).text.split()[1] == "1"
        await plain.destroy()
    finally:
        await qemu.remove_image("skerry-test-debian")  # others may have it under a name of theirs
