"""Machines on macOS, as far as that can be seen elsewhere: what vfkit is told, and what it says."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from skerry.errors import AgentUnreachable, ProviderError, ProviderUnavailable, Unsupported, WrongState
from skerry.providers.vfkit import Vfkit as VfkitProvider
from skerry.vm.base import Drive, Kernel, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.vfkit.command import command
from skerry.vm.vfkit.folder import VfkitFolder, find, find_all
from skerry.vm.vfkit.hypervisor import VfkitHypervisor, version_of

KERNEL = Kernel(
    key="k", version="6.12", own=True, vmlinuz=Path("/k/vmlinuz"), vmlinux=Path("/k/Image"), initrd=Path("/k/initrd")
)
MACHINE = Machine(
    kernel=KERNEL,
    drives=(Drive(name="root", path="/images/root.ext4", read_only=True), Drive(name="disk", path="disk.raw")),
    vcpus=2,
    memory_mib=512,
    boot_args=("skerry.probe",),
    publish={"docker.sock": 2375},
)

STAND_IN = """#!PYTHON -IS
import http.server, json, os, socketserver, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["--memory"] == "13":
    sys.exit("13 MiB are too few")
open(arguments["--pidfile"], "w").write(str(os.getpid()))
state = "Running"
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self): return ""
    def log_message(self, *_): pass
    def do_GET(self):
        self.answer(json.dumps({"state": "VirtualMachineState" + state, "canStop": True}).encode())
    def do_POST(self):
        global state
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["state"]
        state = {"Pause": "Paused", "Resume": "Running"}[wanted]
        self.answer(b"")
    def answer(self, body):
        self.send_response(200 if body else 202)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
socketserver.UnixStreamServer(arguments["--restful-uri"][7:], Handler).serve_forever()
"""
"""It takes vfkit's options and speaks its API, and runs nothing."""


@pytest.fixture
async def folder() -> AsyncIterator[VmFolder]:
    """With a path that is short enough for vfkit."""
    folder = VmFolder(Path(mkdtemp(prefix="vfkit-")))
    yield folder
    await VfkitHypervisor().kill(folder)
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()


@pytest.fixture
def vfkit(tmp_path: Path) -> VfkitHypervisor:
    program = tmp_path / "vfkit"
    program.write_text(STAND_IN.replace("PYTHON", sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return VfkitHypervisor(str(program))


def test_the_command_line_has_all_of_a_machine() -> None:
    argv = command("vfkit", Path("/m"), MACHINE)
    assert argv == [
        *("vfkit", "--log-level", "error", "--pidfile", "/m/vfkit.pid", "--restful-uri", "unix:///m/api.sock"),
        *("--cpus", "2", "--memory", "512", "--kernel", "/k/Image", "--initrd", "/k/initrd"),
        *("--kernel-cmdline", "console=hvc0 quiet skerry.channel=vsock skerry.poweroff skerry.probe"),
        *("--device", "virtio-blk,path=/images/root.ext4,readonly"),
        *("--device", "virtio-blk,path=/m/disk.raw"),
        *("--device", "virtio-rng"),
        *("--device", "virtio-serial,logFilePath=/m/console.log"),
        *("--device", "virtio-vsock,port=51,socketURL=/m/port-51.sock,connect"),
        *("--device", "virtio-vsock,port=52,socketURL=/m/port-52.sock,connect"),
        *("--device", "virtio-vsock,port=2375,socketURL=/m/docker.sock,connect"),
        *("--device", "virtio-vsock,port=1024,socketURL=/m/v.sock_1024,listen"),
    ]


@pytest.mark.parametrize("folder", ["/with,comma", "/with space", '/with"quote', "/" + "long" * 30])
def test_a_path_that_it_would_misread_is_refused(folder: str) -> None:
    with pytest.raises(Unsupported, match="short path of plain letters"):
        command("vfkit", Path(folder), MACHINE)


def test_what_it_cannot_give_is_refused() -> None:
    thin = Machine(kernel=KERNEL, drives=(Drive(name="disk", path="disk", format="qcow2"),))
    with pytest.raises(Unsupported, match="raw images alone"):
        command("vfkit", Path("/m"), thin)
    with pytest.raises(Unsupported, match="reaches this host"):
        command("vfkit", Path("/m"), Machine(kernel=KERNEL, drives=(), network="user"))


def test_its_version_is_read() -> None:
    assert version_of("vfkit version: v0.6.1\n") == "0.6.1"
    with pytest.raises(ProviderError, match="does not tell its version"):
        version_of("who knows")


@pytest.mark.skipif(sys.platform == "darwin", reason="it is about other systems")
async def test_another_system_is_refused_with_what_to_use_there() -> None:
    with pytest.raises(ProviderUnavailable, match="needs macOS on Apple silicon") as refused:
        await VfkitProvider().check()
    assert "qemu" in refused.value.fix


async def test_a_machine_is_paused_resumed_and_killed_by_any_process(folder: VmFolder, vfkit: VfkitHypervisor) -> None:
    await vfkit.boot(folder, MACHINE, None)
    other = VfkitHypervisor()
    assert not await other.is_paused(folder)
    await other.pause(folder)
    await other.pause(folder)
    assert await vfkit.is_paused(folder)
    await other.resume(folder)
    await other.resume(folder)
    assert not await vfkit.is_paused(folder)
    await other.kill(folder)
    await other.kill(folder)
    assert find(folder.path) is None
    assert not list(folder.path.glob("*.sock"))


async def test_a_machine_that_has_not_noted_its_process_yet_is_killed_all_the_same(
    folder: VmFolder, vfkit: VfkitHypervisor
) -> None:
    await vfkit.boot(folder, MACHINE, None)
    folder.file("vfkit.pid").unlink()
    await vfkit.kill(folder)
    assert find_all(folder.path) == []


async def test_its_folder_tells_whether_it_runs_and_waits_for_its_end(folder: VmFolder, vfkit: VfkitHypervisor) -> None:
    there = VfkitFolder(folder.path)
    assert not there.is_running()
    assert await there.wait(5)
    await vfkit.boot(folder, MACHINE, None)
    assert there.is_running()
    assert not await there.wait(0.05)
    await vfkit.kill(folder)
    assert not there.is_running()
    assert await there.wait(5)
    with pytest.raises(AgentUnreachable, match="the machine is not running"):
        await there.dial(51, 5)


async def test_a_pid_that_is_anothers_by_now_is_left_alone(folder: VmFolder) -> None:
    folder.path.joinpath("vfkit.pid").write_text(str(os.getpid()))
    await VfkitHypervisor().kill(folder)


async def test_a_machine_that_does_not_start_tells_why(folder: VmFolder, vfkit: VfkitHypervisor) -> None:
    small = Machine(kernel=KERNEL, drives=(), memory_mib=13)
    with pytest.raises(ProviderError, match="13 MiB are too few"):
        await vfkit.boot(folder, small, None)


async def test_what_does_not_run_is_not_paused(folder: VmFolder) -> None:
    with pytest.raises(WrongState, match="does not run"):
        await VfkitHypervisor().pause(folder)


async def test_it_says_that_it_cannot_save_a_machine(folder: VmFolder) -> None:
    with pytest.raises(Unsupported, match="boots from its kernel"):
        await VfkitHypervisor().save(folder, folder.path)
    with pytest.raises(Unsupported, match="boots from its kernel"):
        await VfkitHypervisor().restore(folder, MACHINE, folder.path, None)
