"""The bridge to the kernel's vsock, with unix sockets in the place of the guest's ports."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.agent.guest.loop import Loop
from skerry.vm.warden.sockets import VsockBridge

TIMEOUT_S = 20


class Bridge(VsockBridge):
    def new_socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def address(self, port: int) -> tuple[int, int] | str:
        return f"guest-{port}"


def listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    listener.settimeout(TIMEOUT_S)
    return listener


def connect(port: int | bytes) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(TIMEOUT_S)
    client.connect("v.sock")
    client.sendall(b"CONNECT %d\n" % port if isinstance(port, int) else port)
    return client


def accept(listener: socket.socket) -> socket.socket:
    guest, _ = listener.accept()
    guest.settimeout(TIMEOUT_S)
    return guest


@pytest.fixture(autouse=True)
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    listener = listen("v.sock")
    Bridge(loop, 3, listener, "v.sock_1024")
    wake, stop = os.pipe()
    loop.watch(wake, select.EPOLLIN, lambda _events: loop.stop())
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield
    os.write(stop, b"x")
    thread.join()
    os.close(wake)
    os.close(stop)
    listener.close()


def test_who_waits_is_told_when_the_guest_is_up_and_served_then() -> None:
    with listen("v.sock_1024") as ready, listen("guest-52") as agent, connect(52) as client:
        with listen("guest-51") as control:
            accept(control).close()
            accept(ready).close()
        with accept(agent) as guest:
            assert client.recv(100) == b"OK 1073741824\n"
            client.sendall(b"question")
            assert guest.recv(100) == b"question"
            guest.sendall(b"answer")
            guest.close()
            assert client.recv(100) == b"answer"
            assert client.recv(100) == b""


def test_a_port_where_nobody_listens_is_refused_once_the_guest_is_up() -> None:
    with listen("guest-51") as control:
        accept(control).close()
        with connect(99) as client:
            assert client.recv(100) == b""


@pytest.mark.parametrize("line", [b"HELLO\n", b"CONNECT x\n", b"CONNECT " + b"1" * 100, b"CONNECT \n"])
def test_what_is_no_question_ends_the_connection(line: bytes) -> None:
    with connect(line) as client, contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    with listen("guest-52") as agent:
        connect(52).close()
        with listen("guest-51") as control:
            accept(control).close()
            with accept(agent) as guest:
                assert guest.recv(100) == b""
