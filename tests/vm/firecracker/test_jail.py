"""What is in a jail, whose it is, and what the jailer is told."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import InvalidSpec, ProviderError
from skerry.host import uids
from skerry.vm.base import Drive, Kernel, Machine
from skerry.vm.firecracker import jail
from skerry.vm.firecracker.jail import Jail
from skerry.vm.firecracker.probe import Programs
from skerry.vm.folder import VmFolder
from vm.firecracker.installing import StandIns
from vm.firecracker.world import World

_UID = 0x70000001

needs_root = pytest.mark.skipif(not uids.are_available(), reason="only root can give files away")


@pytest.fixture
def made(tmp_path: Path) -> Jail:
    found = Jail(tmp_path, "vm-1", Path("/opt/firecracker-v1.16.1-x86_64"))
    found.make()
    return found


def test_the_jailer_is_told_who_where_and_what(made: Jail, tmp_path: Path) -> None:
    """And of control groups, on every host, the version with which it leaves its own alone."""
    assert made.argv(Path("/opt/jailer"), _UID, ["--api-sock", "api.sock"]) == [
        "/opt/jailer",
        *("--id", "vm-1", "--uid", str(_UID), "--gid", str(_UID)),
        *("--exec-file", "/opt/firecracker-v1.16.1-x86_64", "--chroot-base-dir", str(tmp_path / "jail")),
        *("--cgroup-version", "1", "--new-pid-ns", "--", "--api-sock", "api.sock"),
    ]
    assert made.root == tmp_path / "jail/firecracker-v1.16.1-x86_64/vm-1/root"
    assert tmp_path / made.pid_file == made.root / "firecracker-v1.16.1-x86_64.pid"


@pytest.mark.parametrize("id", ["", "a" * 65, "a/b", "..", "a_b", "ä"])
def test_an_id_that_the_jailer_does_not_take_is_refused(tmp_path: Path, id: str) -> None:
    with pytest.raises(InvalidSpec):
        Jail(tmp_path, id, Path("/opt/firecracker"))


def test_what_is_shared_is_linked_and_stays_as_it_is(made: Jail, tmp_path: Path) -> None:
    shared = tmp_path / "rootfs"
    shared.write_bytes(b"shared")
    shared.chmod(0o644)
    before = shared.stat()
    made.link("drive-root", shared)
    after = (made.root / "drive-root").stat()
    assert (after.st_ino, after.st_uid, after.st_mode) == (before.st_ino, before.st_uid, before.st_mode)


def test_what_others_may_not_read_is_copied_not_opened_to_all(made: Jail, tmp_path: Path) -> None:
    secret = tmp_path / "rootfs"
    secret.write_bytes(b"ours")
    secret.chmod(0o600)
    made.link("drive-root", secret)
    copy = made.root / "drive-root"
    assert copy.read_bytes() == b"ours"
    assert copy.stat().st_ino != secret.stat().st_ino
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_what_is_on_another_file_system_is_copied(made: Jail) -> None:
    elsewhere = Path("/dev/shm/skerry-test-jail")
    elsewhere.write_bytes(b"far away")
    try:
        if elsewhere.stat().st_dev == made.root.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system")
        elsewhere.chmod(0o644)
        made.link("kernel", elsewhere)
    finally:
        elsewhere.unlink()
    assert (made.root / "kernel").read_bytes() == b"far away"


@needs_root
def test_what_a_machine_writes_to_is_the_same_file_and_its_own(made: Jail, tmp_path: Path) -> None:
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"disk")
    made.link_own("drive-disk", disk, _UID)
    found = (made.root / "drive-disk").stat()
    assert (found.st_ino, found.st_uid, found.st_gid) == (disk.stat().st_ino, _UID, _UID)
    assert stat.S_IMODE(found.st_mode) == 0o600


@needs_root
def test_a_drive_that_a_machine_made_into_a_link_is_not_followed(made: Jail, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.touch()
    (tmp_path / "disk.raw").symlink_to(ours)
    with pytest.raises(ProviderError, match="no file"):
        made.link_own("drive-disk", tmp_path / "disk.raw", _UID)
    assert ours.stat().st_uid == 0


def test_a_socket_of_ours_is_reached_from_the_jail_and_one_of_the_jail_from_its_folder(made: Jail) -> None:
    folder = made.base.parent
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        here = os.open(folder, os.O_PATH)
        try:
            listener.bind(f"/proc/self/fd/{here}/v.sock_1024")
            listener.listen()
            made.let_in("v.sock_1024")
            made.show("v.sock")
        finally:
            os.close(here)
        inside = os.open(made.root, os.O_PATH)
        try:
            client.connect(f"/proc/self/fd/{inside}/v.sock_1024")
        finally:
            os.close(inside)
    assert (folder / "v.sock").readlink() == (made.root / "v.sock").relative_to(folder)
    made.let_in("nobody-listens")


def test_nothing_is_left_of_a_jail_and_what_was_linked_stays(made: Jail, tmp_path: Path) -> None:
    shared = tmp_path / "rootfs"
    shared.touch(0o644)
    made.link("drive-root", shared)
    (made.root / "evil").symlink_to(tmp_path)
    jail.clear(VmFolder(tmp_path))
    jail.clear(VmFolder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rootfs"]


def _machine(folder: Path) -> Machine:
    for name in ("kernel-file", "initrd-file", "root.ext4"):
        (folder / name).touch(0o644)
    kernel = Kernel(
        key="k",
        version="6.12",
        own=True,
        vmlinuz=folder / "none",
        vmlinux=folder / "kernel-file",
        initrd=folder / "initrd-file",
    )
    drives = (Drive(name="root", path=str(folder / "root.ext4"), read_only=True), Drive(name="disk", path="disk.raw"))
    return Machine(kernel=kernel, drives=drives)


@pytest.fixture
def prepare(tmp_path: Path, stand_ins: StandIns) -> Callable[..., tuple[VmFolder, Any]]:
    def prepared(*, jailer: Path | None) -> tuple[VmFolder, Any]:
        folder = VmFolder(tmp_path / "vm")
        folder.make()
        folder.file("disk.raw").touch()
        programs = Programs(firecracker=stand_ins.firecracker, jailer=jailer, version="1.17.0")
        machine = _machine(tmp_path)
        files = {"kernel": machine.kernel.vmlinux, "initrd": machine.kernel.initrd}
        return folder, jail.prepare(folder, machine, files, programs)

    return prepared


def test_without_a_jail_the_same_names_lead_to_the_same_files(prepare: Any, tmp_path: Path) -> None:
    folder, (launch, home) = prepare(jailer=None)
    assert home == "."
    assert launch.jail is None
    links = {path.name: str(path.readlink()) for path in folder.path.iterdir() if path.is_symlink()}
    assert links.pop("drive-disk") == "disk.raw"
    wanted = {"kernel": "kernel-file", "initrd": "initrd-file", "drive-root": "root.ext4"}
    inherited = {f"/proc/self/fd/{10 + index}": path for index, path in enumerate(launch.files)}
    assert {name: inherited[link] for name, link in links.items()} == {k: tmp_path / v for k, v in wanted.items()}
    assert launch.own == ("disk.raw",)
    jail.clear(folder)
    assert {path.name for path in folder.path.iterdir() if path.is_symlink()} == set()


@needs_root
def test_in_a_jail_are_the_same_names(prepare: Any, stand_ins: StandIns) -> None:
    folder, (launch, home) = prepare(jailer=stand_ins.jailer)
    assert launch.jail is not None
    assert launch.argv[0] == str(stand_ins.jailer)
    (root,) = (folder.path / "jail").glob("*/*/root")
    assert folder.file(home) == root
    assert {path.name for path in root.iterdir()} == {"kernel", "initrd", "drive-root", "drive-disk"}
    assert launch.files == ()


@contextlib.contextmanager
def mounted(place: Path, option: str) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=64m,mode=755,{option}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@needs_root
@pytest.mark.parametrize(("option", "lack"), [("nodev", "has no devices"), ("noexec", "runs no programs")])
async def test_where_the_jailer_could_not_make_what_is_in_a_jail_machines_run_without_one(
    short_folder: Path, stand_ins: StandIns, option: str, lack: str
) -> None:
    place = short_folder / "place"
    programs = Programs(firecracker=stand_ins.firecracker, jailer=stand_ins.jailer, version="1.17.0")
    with mounted(place, option):
        assert jail.why_no_jail(place / "never/made", programs) == f"{place} is on a file system that {lack}"
        world = World(place, stand_ins, jailed=True)
        assert (await world.booted()).is_running()
        await world.end()
        assert stand_ins.jailed() == []
    assert jail.why_no_jail(short_folder, programs) == jail.why_not_there(short_folder)
