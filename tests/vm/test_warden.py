"""What a warden does while its machine runs: the console, the sockets, and nothing that a guest could make grow."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry.agent.guest.loop import Loop
from skerry.vm import launch
from skerry.vm.folder import VmFolder
from skerry.vm.launch import Launch
from skerry.vm.warden.service import Console
from skerry.vm.warden.sockets import Published

from .standins import run, script, until, vm_folder

TIMEOUT_S = 20
START = Path(launch.__file__).parent / "warden" / "start.py"


@pytest.fixture
def folder() -> Iterator[VmFolder]:
    with vm_folder() as folder:
        yield folder


def test_all_that_a_machine_said_before_it_ended_is_kept(folder: VmFolder) -> None:
    said = run(folder, "echo one; echo two >&2; printf three; kill -9 $$")
    assert said == "one\ntwo\nthree"


def test_the_console_is_bounded_and_keeps_what_came_last(folder: VmFolder) -> None:
    run(
        folder,
        "i=0; while [ $i -lt 40000 ]; do echo line $i 0123456789012345678901234567890123456789; i=$((i+1)); done",
    )
    sizes = [os.stat(folder.file(name)).st_size for name in ("console.log", "console.log.1")]
    assert max(sizes) <= 512 * 1024
    assert sum(sizes) > 512 * 1024
    lines = folder.read_console().splitlines()[1:]
    assert [int(line.split()[1]) for line in lines] == list(range(40000 - len(lines), 40000))


def test_a_console_that_cannot_be_put_aside_begins_anew_and_its_machine_goes_on(folder: VmFolder) -> None:
    said = "i=0; while [ $i -lt 9000 ]; do echo line 0123456789012345678901234567890123456789012345; i=$((i+1)); done"
    launch.start(folder, script(f"mkdir console.log.1; {said}; {said}; echo last; sleep 60"), None)
    until(lambda: folder.read_console().endswith("last\n"))
    assert folder.is_running()
    assert folder.console.stat().st_size <= 512 * 1024


def test_a_console_file_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "console.log").symlink_to(victim)
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match="symbolic"):
            Console(read, str(tmp_path / "console.log"), 100)
    finally:
        os.close(read)
        os.close(write)
    assert victim.read_text() == "mine"


def test_a_warden_that_is_told_nothing_ends(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-I", "-S", START, tmp_path], stdin=subprocess.DEVNULL, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_socket_is_there_before_who_listens_on_it(folder: VmFolder) -> None:
    listening = "import socket; s = socket.socket(fileno=4); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    python = _python_for_all()
    launch.start(folder, Launch(argv=[python, "-I", "-S", "-c", listening], listen=("api.sock",)), None)
    with _connect(folder, "api.sock") as connection:
        assert connection.recv(100) == b"hello"


def test_the_channel_is_a_descriptor_of_the_hypervisor(folder: VmFolder) -> None:
    """Our end of it greets at once; what that says is not looked at here."""
    program = "import socket; s = socket.socket(fileno=3); print(len(s.recv(1)) == 1, flush=True); s.recv(1 << 20, 256)"
    launch.start(folder, Launch(argv=[_python_for_all(), "-I", "-S", "-c", program], channel=True), None)
    until(lambda: folder.read_console() == "True\n")
    with _connect(folder, "v.sock") as connection:
        connection.sendall(b"nonsense\n")
        assert connection.recv(1) == b""


def test_a_published_socket_leads_to_the_guests_port(folder: VmFolder) -> None:
    """With a hypervisor that serves the channel's socket itself."""
    serving = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('v.sock'); s.listen(); print('up', flush=True)\n"
        "c, _ = s.accept(); asked = c.recv(100); c.sendall(b'OK 1\\n' + asked); c.recv(1)"
    )
    what = Launch(argv=[_python_for_all(), "-I", "-S", "-c", serving], publish={"docker.sock": 2375})
    launch.start(folder, what, None)
    until(lambda: folder.read_console() == "up\n")
    with _connect(folder, "docker.sock") as connection:
        assert connection.recv(100) == b"CONNECT 2375\n"


class Relays:
    """A published socket in this process, and a guest's side that does as a test says."""

    def __init__(self, folder: Path) -> None:
        self._loop = Loop()
        self._path = str(folder / "published.sock")
        self.guest = _listener(str(folder / "v.sock"))
        self._listener = _listener(self._path)
        Published(self._loop, self._listener, str(folder / "v.sock"), 80)
        self._wake, self._stop = os.pipe()
        self._loop.watch(self._wake, select.EPOLLIN, lambda _events: self._loop.stop())
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(TIMEOUT_S)
        client.connect(self._path)
        return client

    def accept(self, answer: bytes = b"OK 5\n") -> socket.socket:
        guest, _ = self.guest.accept()
        guest.settimeout(TIMEOUT_S)
        assert guest.recv(100) == b"CONNECT 80\n"
        if answer:
            guest.sendall(answer)
        return guest

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        for fd in (self._wake, self._stop):
            os.close(fd)
        self.guest.close()
        self._listener.close()


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[Relays]:
    relays = Relays(tmp_path)
    yield relays
    relays.close()


def test_what_one_side_says_the_other_hears(relays: Relays) -> None:
    with relays.connect() as client:
        client.sendall(b"early ")
        with relays.accept(b"OK 5\nbanner") as guest:
            assert client.recv(100) == b"banner"
            assert guest.recv(100) == b"early "
            client.sendall(b"question")
            assert guest.recv(100) == b"question"
            guest.sendall(b"answer")
            assert client.recv(100) == b"answer"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's warden reaches more than its machine")
def test_a_link_of_roots_leads_to_the_guest_and_one_of_the_machines_nowhere(relays: Relays, tmp_path: Path) -> None:
    (tmp_path / "v.sock").rename(tmp_path / "jailed.sock")
    (tmp_path / "v.sock").symlink_to("jailed.sock")
    with relays.connect() as client, relays.accept() as guest:
        guest.sendall(b"here")
        assert client.recv(100) == b"here"
    os.lchown(tmp_path / "v.sock", 4711, 4711)
    with relays.connect() as client:
        assert client.recv(100) == b""


def test_half_an_end_is_passed_on_and_the_other_half_goes_on(relays: Relays) -> None:
    with relays.connect() as client, relays.accept() as guest:
        client.shutdown(socket.SHUT_WR)
        assert guest.recv(100) == b""
        guest.sendall(b"still there")
        assert client.recv(100) == b"still there"
        guest.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""


@pytest.mark.parametrize("who", ["client", "guest"])
def test_who_hangs_up_is_heard_to_the_last_byte(relays: Relays, who: str) -> None:
    client, guest = relays.connect(), relays.accept()
    gone, left = (client, guest) if who == "client" else (guest, client)
    sending = threading.Thread(target=lambda: (gone.sendall(bytes(3 << 20)), gone.close()))
    sending.start()
    count = sum(len(piece) for piece in iter(lambda: left.recv(1 << 16), b""))
    sending.join()
    left.close()
    assert count == 3 << 20


@pytest.mark.parametrize("answer", [b"", b"NO\n", b"OK " + b"9" * 100])
def test_a_guest_that_refuses_ends_the_connection(relays: Relays, answer: bytes) -> None:
    with relays.connect() as client, relays.accept(answer) as guest:
        guest.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""


def test_a_client_that_leaves_before_the_guest_answers_is_forgotten(relays: Relays) -> None:
    relays.connect().close()
    with relays.accept(b"") as guest:
        assert guest.recv(100) == b""


def test_a_client_is_turned_away_while_nobody_serves_the_channel(relays: Relays) -> None:
    relays.guest.close()
    with relays.connect() as client:
        assert client.recv(100) == b""


def test_a_stalled_stream_does_not_hold_up_another(relays: Relays) -> None:
    with relays.connect() as stalled, relays.accept() as silent:
        stalled.setblocking(False)
        _send_until_full(stalled.send)
        with relays.connect() as client, relays.accept() as guest:
            client.sendall(b"through")
            assert guest.recv(100) == b"through"
        assert silent.recv(10) == bytes(10)


def _send_until_full(send: Callable[[bytes], int]) -> None:
    try:
        while True:
            send(bytes(1 << 16))
    except BlockingIOError:
        return


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.settimeout(TIMEOUT_S)
    return listener


def _connect(folder: VmFolder, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    with folder.short() as short:
        connection.connect(f"{short}/{name}")
    return connection


def _python_for_all() -> str:
    """An interpreter that a machine's user may run, too."""
    for path in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        if os.access(path, os.X_OK) and all(os.stat(parent).st_mode & 1 for parent in Path(path).parents):
            return path
    pytest.skip("there is no interpreter that another user may run")
