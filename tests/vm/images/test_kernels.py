"""Kernels and what they start with."""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from skerry.errors import ConfigError, InvalidSpec, NotFound, ProviderError
from skerry.vm.base import Kernel
from skerry.vm.images import boot, tree
from skerry.vm.images.debian import Modules
from skerry.vm.images.kernels import KernelStore
from skerry.vm.images.store import ImageStore


def boot_file(payload: bytes, *, length: int | None = None) -> bytes:
    """A kernel as boot loaders take it: a header of one sector and the rest."""
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 64, len(payload) if length is None else length)
    return bytes(head) + bytes(64) + payload


ELF = b"\x7fELF" + os.urandom(5000)
SIZE = struct.pack("<I", len(ELF))


@pytest.mark.parametrize(
    "payload",
    [
        gzip.compress(ELF),
        lzma.compress(ELF) + SIZE,
        subprocess.run(["lz4", "-lc"], input=ELF, capture_output=True).stdout + SIZE,
        subprocess.run(["zstd", "-qc"], input=ELF, capture_output=True).stdout + SIZE,
    ],
    ids=["gzip", "xz", "lz4", "zstd"],
)
def test_a_kernel_is_taken_out_of_its_boot_file(payload: bytes) -> None:
    assert boot.extract_vmlinux(boot_file(payload)) == ELF


def test_a_kernel_that_is_one_already_stays_as_it_is() -> None:
    assert boot.extract_vmlinux(ELF) == ELF


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"no kernel at all" * 100,
        boot_file(gzip.compress(ELF), length=1 << 20),
        boot_file(gzip.compress(ELF)[:-3000]),
        boot_file(gzip.compress(b"not an ELF file")),
        boot_file(b"unknown" * 10),
        boot_file(b"\xfd7zXZ\x00" + bytes(100)),
    ],
)
def test_a_damaged_kernel_is_told(damaged: bytes) -> None:
    with pytest.raises(ProviderError):
        boot.extract_vmlinux(damaged)


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    items = [
        tree.folder_entry("bin"),
        tree.file_entry("bin/program", b"12345", 0o755),
        tree.link_entry("bin/other", "program"),
        tree.file_entry("empty", b""),
    ]
    made = boot.archive(items)
    listed = subprocess.run(["busybox", "cpio", "-itv"], input=made, capture_output=True, check=True, timeout=10)
    lines = listed.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["drwxr-xr-x", "-rwxr-xr-x", "lrwxrwxrwx", "-rw-r--r--"]
    assert "other -> program" in lines[2]
    subprocess.run(["busybox", "cpio", "-idm"], input=made, cwd=tmp_path, check=True, timeout=10, capture_output=True)
    assert (tmp_path / "bin/other").read_bytes() == b"12345"
    assert made == boot.archive(items)


def module(needs: str) -> bytes:
    return b"\x7fELF" + bytes(60) + b"license=GPL\0depends=" + needs.encode() + b"\0name=x\0"


def test_modules_come_after_what_they_need_and_without_what_is_built_in(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/low.ko").write_bytes(module(""))
    (tmp_path / "kernel/middle-one.ko.xz").write_bytes(lzma.compress(module("low,inside")))
    (tmp_path / "kernel/high.ko.gz").write_bytes(gzip.compress(module("middle_one,low")))
    (tmp_path / "modules.builtin").write_text("kernel/inside.ko\n")
    found = Modules(tmp_path).in_load_order(["high", "inside"])
    assert list(found) == ["low", "middle_one", "high"]
    assert found["high"] == module("middle_one,low")
    with pytest.raises(ProviderError, match="no module gone"):
        Modules(tmp_path).in_load_order(["gone"])


def test_modules_that_need_each_other_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_bytes(module("b"))
    (tmp_path / "b.ko").write_bytes(module("a"))
    with pytest.raises(ProviderError):
        Modules(tmp_path).in_load_order(["a"])


def test_the_first_file_system_has_a_shell_the_modules_and_a_script(vm_kernel: Kernel) -> None:
    content = vm_kernel.initrd.read_bytes()
    listed = subprocess.run(["busybox", "cpio", "-it"], input=content, capture_output=True, check=True, timeout=10)
    names = listed.stdout.decode().split()
    assert {"init", "bin/busybox", "bin/sh", "bin/switch_root", "dev/console", "root"} <= {*names}
    loaded = [name for name in names if name.startswith("modules/")]
    order = [loaded.index(f"modules/{name}.ko") for name in ("virtio_ring", "virtio_pci", "virtio_blk")]
    assert order == sorted(order)
    assert vm_kernel.vmlinux.read_bytes()[:4] == b"\x7fELF"
    assert vm_kernel.vmlinuz.stat().st_size > 1 << 20


def test_the_script_is_one_that_its_shell_understands() -> None:
    script = boot.init_script(["one", "two"])
    done = subprocess.run(["busybox", "sh", "-n"], input=script, capture_output=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"for name in one two;" in script
    assert b"@" not in script


def test_a_shell_that_needs_libraries_is_none_to_start_with() -> None:
    assert not boot.is_static(Path("/bin/sh").read_bytes())
    assert not boot.is_static(b"#!/bin/sh")


async def test_another_script_makes_another_kernel_without_fetching(
    vm_cache: Path, vm_kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelStore(tmp_path)
    place = tmp_path / "kernels" / vm_kernel.key
    place.parent.mkdir()
    shutil.copytree(vm_cache / "kernels" / vm_kernel.key, place)
    assert (await store.get()).key == vm_kernel.key
    monkeypatch.setattr(boot, "MODULES", boot.MODULES[:-1])
    anew = await store.get()
    assert anew.key != vm_kernel.key
    assert anew.vmlinuz.samefile(place / "vmlinuz")
    assert anew == await store.get()
    monkeypatch.undo()
    assert (await store.get()).key == vm_kernel.key


async def test_a_kernel_that_comes_out_the_same_is_not_made_anew_each_time(
    vm_cache: Path, vm_kernel: Kernel, tmp_path: Path
) -> None:
    store = KernelStore(tmp_path)
    place = tmp_path / "kernels" / vm_kernel.key
    place.parent.mkdir()
    shutil.copytree(vm_cache / "kernels" / vm_kernel.key, place)
    about = place / "kernel.json"
    about.write_bytes(about.read_bytes().replace(b'"started_by":"', b'"started_by":"other-'))
    assert "other-" in store.all()[0].started_by
    assert (await store.get()).key == vm_kernel.key
    assert "other-" not in store.all()[0].started_by


async def test_a_kernel_is_booted_by_its_path_with_the_modules_beside_it(
    vm_cache: Path, vm_kernel: Kernel, tmp_path: Path
) -> None:
    place, store = tmp_path / "boot" / "vmlinuz", KernelStore(tmp_path, "files")
    place.parent.mkdir()
    shutil.copyfile(vm_kernel.vmlinuz, place)
    bare = await store.from_file(place)
    (tmp_path / "lib/modules").mkdir(parents=True)
    (tmp_path / "lib/modules" / bare.version).symlink_to(vm_cache / "kernels" / vm_kernel.key / "modules")
    os.utime(place)
    whole = await store.from_file(place)
    assert (bare.version, bare.own) == (vm_kernel.version, vm_kernel.own)
    assert whole.initrd.read_bytes() == vm_kernel.initrd.read_bytes()
    assert len(bare.initrd.read_bytes()) < len(whole.initrd.read_bytes()), "without modules none are loaded"
    assert await store.from_file(place) == whole
    assert whole.vmlinuz.read_bytes() == place.read_bytes()
    assert not whole.vmlinuz.samefile(place)


async def test_a_path_that_leads_to_no_kernel_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no kernel")
    (tmp_path / "link").symlink_to("text")
    for name, told in {"text": "no kernel", "link": "it is a link", "missing": "No such file"}.items():
        with pytest.raises(InvalidSpec, match=told):
            await KernelStore(tmp_path).from_file(tmp_path / name)
        with pytest.raises(ConfigError, match="the setting kernel"):
            await ImageStore(tmp_path, tmp_path / name).kernel()


async def test_a_kernel_that_lost_a_file_is_told_and_removed(vm_cache: Path, vm_kernel: Kernel, tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    with pytest.raises(NotFound, match="kernel fetch"):
        await store.get()
    place = tmp_path / "kernels" / vm_kernel.key
    place.mkdir(parents=True)
    (place / "kernel.json").write_bytes((vm_cache / "kernels" / vm_kernel.key / "kernel.json").read_bytes())
    with pytest.raises(ProviderError, match="kernel rm"):
        await store.get()
    with pytest.raises(NotFound):
        store.remove("../" + vm_kernel.key)
    store.remove(vm_kernel.key[:8])
    assert store.all() == []
