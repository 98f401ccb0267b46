"""`skerry exec` by a fork of a process that has the command line in its memory; `test_exec.py` runs both ways."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skerry import start
from skerry.cli import forkserver

from .conftest import Run
from .screen import INSTALLED, Screen

Program = tuple[str, ...]
NOBODY = 65534
PLAINLY = "click"
"""Module that who runs a command by itself has imported."""


def run(*args: str, wrapper: Sequence[str] = ()) -> tuple[int, set[str]]:
    """Run the program; its exit code, and the modules that it has imported itself."""
    argv = [*wrapper, INSTALLED[0], "-X", "importtime", *INSTALLED[1:], *args]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    return done.returncode, {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def server() -> int:
    """The pid of the process that forks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(start.address())
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_up(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == b"up\n"


def wait_until_nothing_runs(skerry: Run) -> None:
    deadline = time.monotonic() + 20
    while json.loads(skerry("top", "box", "--json").stdout):
        assert time.monotonic() < deadline


@pytest.fixture
def up(fork_server: Program, box: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs in the sandbox, by a fork."""
    command = [*fork_server, "exec", box, "sh", "-c", "echo up; sleep 60"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert is_up(process)
        yield process
        process.kill()


def test_a_command_is_run_by_a_fork(fork_server: Program, box: str) -> None:
    code, imported = run("exec", box, "sh", "-c", "exit 7")
    assert code == 7
    assert PLAINLY not in imported


def test_the_first_command_runs_by_itself_and_starts_the_server(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_TIME", f"C.{os.getpid()}")  # no server has that
    code, imported = run("exec", box, "sh", "-c", "exit 7")
    assert code == 7
    assert PLAINLY in imported


def test_it_is_not_used_where_it_is_switched_off(
    fork_server: Program, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_FORKSERVER", "off")
    code, imported = run("exec", box, "true")
    assert code == 0
    assert PLAINLY in imported


def test_a_signal_reaches_the_command_line(up: subprocess.Popen[bytes], skerry: Run) -> None:
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 128 + signal.SIGTERM
    wait_until_nothing_runs(skerry)


def test_a_command_ends_with_whoever_asked_for_it(up: subprocess.Popen[bytes], skerry: Run) -> None:
    up.kill()
    up.wait(20)
    wait_until_nothing_runs(skerry)


def test_a_fork_that_is_killed_is_told(up: subprocess.Popen[bytes], skerry: Run) -> None:
    forks = [
        child
        for child in children(server())
        if os.readlink(f"/proc/{child}/fd/1") == os.readlink(f"/proc/{up.pid}/fd/1")
    ]
    assert len(forks) == 1
    os.kill(forks[0], signal.SIGKILL)
    assert up.wait(20) == 128 + signal.SIGKILL
    wait_until_nothing_runs(skerry)


def test_a_terminal_is_one_for_the_command_too(fork_server: Program, box: str) -> None:
    screen = Screen("exec", "-it", box, "sh", program=fork_server)
    try:
        screen.type("stty size; tty -s && echo it is$((1))\r")
        screen.wait_for("30 100")
        screen.wait_for("it is1")
        assert screen.is_raw()
        screen.resize(20, 70)
        screen.type('sh -c "echo asleep$((1)); exec sleep 60"\r')
        screen.wait_for("asleep1")
        screen.type("\x03")
        screen.wait_for("$ ")
        screen.type("stty size; exit 9\r")
        screen.wait_for("20 70")
        assert screen.wait() == 9
        assert screen.mode() == screen.mode_before
    finally:
        screen.close()


def test_who_is_less_free_than_the_server_gets_nothing_from_it(fork_server: Program, box: str) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    code, imported = run("exec", box, "sh", "-c", "exit 7", wrapper=["setpriv", "--no-new-privs"])
    assert code == 7
    assert PLAINLY in imported


def test_where_the_kernel_does_not_tell_who_is_less_free_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"\0skerry-untold-%d" % os.getpid()
    monkeypatch.setattr(forkserver, "address", lambda: name)
    monkeypatch.setattr(forkserver, "_freedom", lambda pid: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.chdir("/")
    forkserver.serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, pytest.raises(ConnectionRefusedError):
        asking.connect(name)


def test_a_kernel_with_fewer_namespaces_tells_of_those_that_it_has() -> None:
    told = forkserver._freedom(os.getpid())
    assert told is not None
    assert {each for each in told if each.startswith(("mnt:", "user:", "net:", "pid:"))} == {
        os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "user", "net", "pid")
    }
    assert forkserver._freedom(1 << 30) is None


def test_a_server_that_stands_still_is_not_waited_for(fork_server: Program, box: str) -> None:
    pid = server()
    os.kill(pid, signal.SIGSTOP)
    try:
        code, imported = run("exec", box, "sh", "-c", "echo once >>count; wc -l <count; exit 7")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 7
    assert PLAINLY in imported
    done = subprocess.run([*fork_server, "exec", box, "cat", "count"], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"once\n"


def test_the_server_keeps_nothing_of_who_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_TIME", f"C.{os.getpid()}")
    monkeypatch.setenv("A_TOKEN", "secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        argv = [INSTALLED[0], "-c", "from skerry import start; start._start_server()"]
        monkeypatch.setattr(sys, "argv", argv)
        pid = os.posix_spawn(argv[0], argv, os.environ)
        os.waitpid(pid, 0)
        found = [each for each in Path("/proc").glob("[0-9]*") if _is_server_of(each, os.environb[b"LC_TIME"])]
        for each in found:
            try:
                assert b"secret" not in (each / "environ").read_bytes()
                assert str(tmp_path) not in " ".join(os.readlink(fd) for fd in (each / "fd").iterdir())
            except FileNotFoundError:
                pass  # another has the name, so it has ended


def _is_server_of(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes() and b"forkserver" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_code_that_has_changed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "that_changes.py"
    module.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("that_changes")
    try:
        before = forkserver._code()
        assert forkserver._code() == before
        os.utime(module, ns=(1, 1))
        assert forkserver._code() != before
        module.unlink()
        assert forkserver._code() != before
    finally:
        del sys.modules["that_changes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_nothing_is_told_to_another_user_who_has_taken_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"\0skerry-taken-%d" % os.getpid()
    script = f"""
import os, socket
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind({name!r})
listener.listen()
print("up", flush=True)
asking = listener.accept()[0]
asking.send(bytes.fromhex("{start.interpreter().hex()}"))
print(asking.recv(1 << 20), flush=True)
"""
    monkeypatch.setattr(start, "address", lambda: name)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert is_up(process)
        assert start._by_fork() is None
        assert process.stdout is not None
        assert process.stdout.readline() in (b"b''\n", b"")  # we had left before it sent anything
