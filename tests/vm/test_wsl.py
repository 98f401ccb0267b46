"""Distributions of WSL2 as machines, as far as that can be seen elsewhere: what wsl.exe is told, and what it says."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.errors import ProviderError, ProviderUnavailable, Unsupported
from skerry.providers.base import Isolation
from skerry.providers.wsl import Wsl as WslProvider
from skerry.vm.base import Drive, Kernel, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.wsl import Wsl, commands
from skerry.vm.wsl.hypervisor import import_distribution

LISTING = "  NAME        STATE    VERSION\r\n* Ubuntu      Running  2\r\n  skerry-one  Stopped  2\r\n"

STAND_IN = """#!PYTHON -IS
import os, shutil, subprocess, sys
here = os.path.join(os.path.dirname(sys.argv[0]), "distributions")
os.makedirs(here, exist_ok=True)
verb, rest = sys.argv[1], sys.argv[2:]
if verb == "--import":
    os.mkdir(os.path.join(here, rest[0]))
    sys.exit(subprocess.run(["tar", "-x", "-C", os.path.join(here, rest[0])]).returncode)
elif verb == "--unregister":
    shutil.rmtree(os.path.join(here, rest[0]))
elif verb == "--list":
    lines = ["  NAME  STATE  VERSION", "* Ubuntu  Running  2"] + [f"  {name}  Stopped  2" for name in os.listdir(here)]
    sys.stdout.buffer.write("\\r\\n".join(lines).encode("utf-16-le"))
elif verb != "--terminate":
    sys.exit("Invalid command line argument: " + verb)
"""
"""It keeps distributions as folders, and runs nothing."""


@pytest.fixture
def program(tmp_path: Path) -> str:
    program = tmp_path / "wsl.exe"
    program.write_text(STAND_IN.replace("PYTHON", sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_a_distribution_is_imported_run_and_removed_by_these_commands() -> None:
    assert commands.import_from_stdin("wsl.exe", "skerry-one", "C:\\skerry\\") == [
        *("wsl.exe", "--import", "skerry-one", "C:\\skerry\\skerry-one", "-", "--version", "2"),
    ]
    assert commands.terminate("wsl.exe", "skerry-one") == ["wsl.exe", "--terminate", "skerry-one"]
    assert commands.unregister("wsl.exe", "skerry-one") == ["wsl.exe", "--unregister", "skerry-one"]
    argv = commands.run("wsl.exe", "skerry-one")
    words = argv[argv.index("wsl.exe") :]
    assert words[1:8] == ["--distribution", "skerry-one", "--user", "root", "--cd", "/", "--exec"]
    assert words[8:17] == ["unshare", "-m", "-u", "-i", "-n", "-p", "-f", "--mount-proc", "/.skerry/python/lib/ld.so"]
    assert words[-3:] == ["/.skerry/agent/machine.py", "skerry.channel=fd:0", "skerry.drives=none"]


def test_the_channel_is_the_standard_input_and_output_of_what_runs() -> None:
    ours, its = os.pipe()
    argv = commands.run("/bin/echo", "name")
    with open(ours, "rb") as heard:
        action = [(os.POSIX_SPAWN_DUP2, its, 3)]
        pid = os.posix_spawn(argv[0], argv, {"PATH": os.defpath}, file_actions=action)
        os.close(its)
        assert heard.read().startswith(b"--distribution name --user root")
    assert os.waitpid(pid, 0)[1] == 0


def test_standard_input_and_output_become_one_descriptor() -> None:
    echo = "import socket; one = socket.socket(fileno=0); one.send(one.recv(9).upper())"
    argv = [sys.executable, "-I", "-S", "-c", commands.JOIN, sys.executable, "-c", echo]
    assert subprocess.run(argv, input=b"there", capture_output=True, timeout=30).stdout == b"THERE"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-8"])
def test_the_registered_distributions_are_read_in_the_encodings_of_wsl(encoding: str) -> None:
    assert commands.registered(LISTING.encode(encoding)) == {"Ubuntu", "skerry-one"}


def test_its_version_is_read_in_any_language() -> None:
    assert commands.version_of("WSL-Version: 2.0.9.0\r\nKernelversion: 5.15".encode("utf-16-le")) == "2.0.9.0"
    with pytest.raises(ProviderError, match="wsl --update"):
        commands.version_of(b"Invalid command line option: --version")


def test_only_the_second_wsl_will_do() -> None:
    assert commands.is_wsl2("5.15.133.1-microsoft-standard-WSL2")
    assert not commands.is_wsl2("4.4.0-19041-Microsoft")
    assert not commands.is_wsl2("6.1.0-18-amd64")


@pytest.mark.skipif(commands.is_wsl2(platform.release()), reason="it is about other systems")
async def test_another_system_is_refused_with_what_to_use_there() -> None:
    provider = WslProvider()
    with pytest.raises(ProviderUnavailable, match="needs WSL2") as refused:
        await provider.check()
    assert "wsl --install" in refused.value.fix
    assert provider.isolation is Isolation.NAMESPACE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount images")
async def test_a_distribution_is_image_and_runtime_in_one_and_closed_to_windows(tmp_path: Path, program: str) -> None:
    files = {"etc/hostname": "box", "etc/wsl.conf": "[interop]\nenabled=true\n", ".skerry": None}
    root = image(tmp_path / "root", files)
    runtime = image(tmp_path / "runtime", {"agent/machine.py": "code"})
    wsl, folder = Wsl("C:\\skerry", program), VmFolder(tmp_path / "one/vm")
    drives = [Drive(name=path.stem, path=str(path), read_only=True) for path in (root, runtime)]
    import_distribution(program, "skerry-one", "C:\\skerry", drives)
    made = tmp_path / "distributions/skerry-one"
    assert (made / "etc/hostname").read_text() == "box"
    assert (made / ".skerry/agent/machine.py").read_text() == "code"
    assert (made / "etc/wsl.conf").read_text() == commands.CONF
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    await wsl.forget(folder)
    await wsl.forget(folder)
    assert not made.exists()


async def test_what_wsl_refuses_is_told(tmp_path: Path, program: str) -> None:
    folder = VmFolder(tmp_path / "one/vm")
    with pytest.raises(Unsupported, match="cannot pause"):
        await Wsl("C:\\skerry", program).pause(folder)
    with pytest.raises(Unsupported, match="starts anew"):
        await Wsl("C:\\skerry", program).save(folder, tmp_path)
    kernel = Kernel(key="", version="", own=False, vmlinuz=tmp_path, vmlinux=tmp_path, initrd=tmp_path)
    with pytest.raises(Unsupported, match="reaches this host"):
        await Wsl("C:\\skerry", program).boot(folder, Machine(kernel=kernel, drives=(), network="user"), None)


def image(path: Path, files: dict[str, str | None]) -> Path:
    """A small ext4 file system with these files; a folder where there is no text."""
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (path / name).mkdir()
        else:
            (path / name).write_text(text)
    made = path.with_suffix(".ext4")
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", path, made, "4M"], check=True, capture_output=True)
    return made
