from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .conftest import PROGRAM, Run

pytestmark = pytest.mark.usefixtures("box")

ECHO = """
import socketserver, threading
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"you said " + self.rfile.readline())
servers = [socketserver.TCPServer(("127.0.0.1", port), Echo) for port in (8000, 8001)]
threading.Thread(target=servers[0].serve_forever).start()
servers[1].serve_forever()
"""


@pytest.fixture
def server(skerry: Run, box: str) -> None:
    """A server in the box, on its ports 8000 and 8001."""
    assert skerry("exec", "-d", box, "--", "python3", "-c", ECHO).returncode == 0


@contextmanager
def open_ports(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*PROGRAM, "port", *args], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().rstrip("\n")


def say(address: str, text: bytes) -> bytes:
    """What the server in the box answers; it may still be starting."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 20
    while True:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(text)
            with connection.makefile("rb") as answer:
                try:
                    if line := answer.readline():
                        return line
                except ConnectionResetError:
                    pass
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("server")
def test_ports_are_open_until_ctrl_c() -> None:
    with open_ports("box", "8000", "8001") as process:
        opened = dict(line_of(process).split(" -> ")[::-1] for _ in range(2))
        assert opened.keys() == {"8000", "8001"}
        for address in opened.values():
            assert address.startswith("127.0.0.1:")
            assert say(address, b"hello\n") == b"you said hello\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    for address in opened.values():
        with pytest.raises(ConnectionRefusedError):
            say(address, b"hello\n")


@pytest.mark.usefixtures("server")
def test_a_port_of_one_s_own_choice_and_json() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        local = free.getsockname()[1]
    with open_ports("--json", "box", f"{local}:8000") as process:
        assert json.loads(line_of(process)) == {"port": 8000, "address": f"127.0.0.1:{local}"}
        assert say(f"127.0.0.1:{local}", b"json\n") == b"you said json\n"
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_port_that_is_taken_is_told_and_nothing_stays_open(skerry: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = skerry("port", "box", "8001", f"{taken.getsockname()[1]}:8000")
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"in use" in done.stderr


@pytest.mark.parametrize("args", [("box",), ("box", "http"), ("box", "80:"), ("box", "1:2:3"), ("box", "70000")])
def test_what_is_no_port_is_refused(skerry: Run, args: tuple[str, ...]) -> None:
    done = skerry("port", *args)
    assert (done.returncode, done.stdout) == (125, b"")
    assert done.stderr


def test_a_sandbox_that_is_not_there_is_told(skerry: Run) -> None:
    assert skerry("port", "nobody", "80").returncode == 125
