"""What lies between a port of a machine and the service behind it, where the channel is vsock."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from vm.mux_pair import Running

from skerry.agent.guest.vm.socket_pair import SocketPair

PATIENCE_S = 10


class Pair:
    """A caller and a service that are joined."""

    def __init__(self, runner: Running) -> None:
        self.caller, one = socket.socketpair()
        self.service, other = socket.socketpair()
        for each in (self.caller, self.service):
            each.settimeout(PATIENCE_S)
        self.ended: list[SocketPair] = []
        runner.do(lambda: SocketPair(runner.loop, one, other, self.ended.append))  # type: ignore[arg-type]


@pytest.fixture
def runner() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def pair(runner: Running) -> Iterator[Pair]:
    made = Pair(runner)
    yield made
    made.caller.close()
    made.service.close()


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def test_each_direction_ends_by_itself(pair: Pair, runner: Running) -> None:
    pair.caller.sendall(b"question")
    pair.caller.shutdown(socket.SHUT_WR)
    assert read_all(pair.service) == b"question"
    answer = os.urandom(100_000)
    pair.service.sendall(answer)
    pair.service.close()
    assert read_all(pair.caller) == answer
    runner.do(lambda: None)
    assert len(pair.ended) == 1


def test_who_does_not_read_holds_up_the_sender_and_loses_nothing(pair: Pair) -> None:
    pair.caller.settimeout(0.2)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += pair.caller.send(bytes(1 << 16))
    pair.caller.shutdown(socket.SHUT_WR)
    assert len(read_all(pair.service)) == sent


def test_the_end_of_one_is_the_end_of_the_other(pair: Pair, runner: Running) -> None:
    pair.service.close()
    assert read_all(pair.caller) == b""
    pair.caller.close()
    runner.do(lambda: None)
