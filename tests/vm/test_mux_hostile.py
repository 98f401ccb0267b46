"""A guest that says what it may not say, and a host that begins in the middle of what another has said."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.agent.guest.loop import Loop
from skerry.agent.guest.vm import multiplexer as frames
from skerry.agent.guest.vm.multiplexer import (
    ACCEPT,
    CLOSE,
    CREDIT,
    DATA,
    END,
    HELLO,
    MAGIC,
    NUMBER,
    OPEN,
    REFUSE,
    frame,
)
from skerry.agent.guest.vm.ports import GuestMux
from skerry.vm.warden.mux import HostMux

GREETING = len(frame(HELLO, 0, MAGIC + bytes(frames.NONCE_BYTES)))
WORKS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Host:
    """A host's end, whose guest is spoken by hand."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.told: list[str] = []
        ours, self.guest = socket.socketpair()
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "v.sock")
        self.listener.bind(self.path)
        self.listener.listen()
        self.guest.setblocking(False)
        self.mux = HostMux(self.loop, ours.detach(), self.listener, str(folder / "v.sock_1024"), self.told.append)
        self.greeting = self.guest.recv(1 << 20)[-GREETING:]

    def settle(self) -> None:
        for _ in range(2000):
            if not self.loop.turn(0):
                return
        raise AssertionError("it never comes to rest")

    def say(self, data: bytes) -> None:
        """From the guest; what a closed channel does not take is lost."""
        try:
            while data:
                data = data[self.guest.send(data) :]
                self.settle()
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass
        self.settle()

    def heard(self) -> bytes:
        try:
            return self.guest.recv(1 << 20)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def caller(self, port: int = 52) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        connection.setblocking(False)
        connection.sendall(b"CONNECT %d\n" % port)
        self.settle()
        return connection

    def close(self) -> None:
        self.mux.close()
        self.guest.close()


@contextmanager
def hosting() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        try:
            yield host
        finally:
            host.close()


def opened(host: Host) -> socket.socket:
    """A stream that the guest has accepted: number 1."""
    host.say(host.greeting)
    caller = host.caller()
    assert host.heard() == frame(OPEN, 1, NUMBER.pack(52))
    host.say(frame(ACCEPT, 1))
    assert caller.recv(100).startswith(b"OK ")
    return caller


@pytest.mark.parametrize(
    "wrong",
    [
        b"\0" * 8,
        b"\xff" * 8,
        frame(9, 1),
        frame(DATA, 1),
        frame(OPEN, 2),
        frame(ACCEPT, 1, b"x"),
        frame(ACCEPT, 1),
        frame(REFUSE, 1),
        frame(DATA, 3, b"a stream that never was"),
        frame(DATA, 2, b"nor this"),
        frame(OPEN, 3, NUMBER.pack(1024)),
        frame(OPEN, 0, NUMBER.pack(1024)),
        frame(OPEN, 4, NUMBER.pack(1024)) + frame(OPEN, 2, NUMBER.pack(1024)),
        frame(CREDIT, 1, NUMBER.pack(1)),
        frame(CREDIT, 1, NUMBER.pack(0xFFFFFFFF)),
        frame(END, 1) + frame(END, 1),
        frame(END, 1) + frame(DATA, 1, b"more"),
        frame(HELLO, 0, MAGIC + bytes(16)),
        frame(HELLO, 0, bytes(32)),
        frames.HEADER.pack(DATA, 0, frames.MAX_FRAME, 1) + bytes(frames.MAX_FRAME),
        frames.HEADER.pack(DATA, 1, 1, 1) + b"x",
    ],
)
def test_a_wrong_frame_ends_the_channel_and_its_streams_and_nothing_else(wrong: bytes) -> None:
    with hosting() as host, opened(host) as caller:
        host.say(wrong)
        assert len(host.told) == 1
        assert caller.recv(1) == b""
        assert not host.mux.streams
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
            late.connect(host.path)


def test_more_than_the_credit_is_not_kept() -> None:
    with hosting() as host, opened(host):
        for _ in range(40):
            host.say(frame(DATA, 1, bytes(10_000)))  # and the caller reads nothing
        assert len(host.told) == 1


def test_a_guest_that_asks_and_never_listens_is_cut_off() -> None:
    with hosting() as host:
        host.say(host.greeting)
        for first in range(2, 400_000, 2_000):
            host.say(b"".join(frame(OPEN, id, NUMBER.pack(7)) for id in range(first, first + 2_000, 2)))
        assert len(host.told) == 1


def test_frames_for_a_stream_that_has_ended_are_dropped() -> None:
    with hosting() as host:
        opened(host).close()
        host.settle()
        assert host.heard() == frame(END, 1)
        host.say(frame(DATA, 1, b"too late") + frame(CLOSE, 1) + frame(CREDIT, 1, NUMBER.pack(9)) + frame(END, 1))
        assert host.told == []


def test_a_guest_opens_no_port_of_the_host_but_one() -> None:
    with hosting() as host:
        host.say(host.greeting)
        for id, port in ((2, 51), (4, 0), (6, 1024)):
            host.say(frame(OPEN, id, NUMBER.pack(port)))
            assert host.heard() == frame(REFUSE, id)


def test_a_caller_that_leaves_before_the_answer_is_told_of_to_the_guest() -> None:
    with hosting() as host:
        host.say(host.greeting)
        host.caller().close()
        host.settle()
        assert host.heard() == frame(OPEN, 1, NUMBER.pack(52)) + frame(CLOSE, 1)
        host.say(frame(ACCEPT, 1))
        assert host.told == []


any_frame = st.builds(
    lambda kind, id, payload: frame(kind, id, payload),
    st.integers(0, 10),
    st.sampled_from([0, 1, 2, 3, 4, 0xFFFFFFFF]),
    st.one_of(st.binary(max_size=40), st.integers(0, 1 << 32).map(lambda n: NUMBER.pack(n % (1 << 32)))),
)


@WORKS
@given(st.lists(st.one_of(any_frame, st.binary(max_size=30)), max_size=12), st.booleans())
def test_whatever_a_guest_says_the_host_lives_on(said: list[bytes], is_open: bool) -> None:
    with hosting() as host:
        caller = opened(host) if is_open else host.caller()
        with caller:
            for each in said:
                host.say(each)
            if not host.told:
                assert host.loop.turn(0) is False


class Restored:
    """A guest that some host has left in the middle of a word."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = Loop()
        self.host_end, self.guest_end = socket.socketpair()
        self.guest = GuestMux(self.loop, self.guest_end.fileno())
        self.service = socket.socket(socket.AF_UNIX)
        self.service.bind(str(folder / "service"))
        self.service.listen()
        self.guest.ports[52] = str(folder / "service")

    def settle(self) -> None:
        while self.loop.turn(0):
            pass

    def close(self) -> None:
        self.guest.drop_all()
        for each in (self.host_end, self.guest_end, self.service):
            each.close()


@WORKS
@given(data=st.data())
def test_a_new_host_is_understood_wherever_the_old_one_stopped(data: st.DataObject) -> None:
    old = frame(HELLO, 0, MAGIC + os.urandom(16)) + frame(OPEN, 1, NUMBER.pack(52))
    old += frame(DATA, 1, bytes(range(256)) * 8) + frame(CREDIT, 1, NUMBER.pack(5)) + frame(OPEN, 3, NUMBER.pack(52))
    old += frame(DATA, 3, b"\x05" * frames.MAX_PAYLOAD)
    cut = data.draw(st.integers(0, len(old)))
    left_over = data.draw(st.binary(max_size=200))
    with tempfile.TemporaryDirectory() as folder:
        restored = Restored(Path(folder))
        try:
            restored.host_end.sendall(old[:cut])
            restored.settle()
            restored.host_end.setblocking(False)
            try:
                answered = restored.host_end.recv(1 << 20)
            except BlockingIOError:
                answered = b""
            restored.guest_end.sendall(answered[-50:] + left_over)  # the end of it is still under way
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/v.sock")
            listener.listen()
            told: list[str] = []
            host = HostMux(restored.loop, os.dup(restored.host_end.fileno()), listener, f"{folder}/r", told.append)
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(f"{folder}/v.sock")
                caller.sendall(b"CONNECT 52\nhello")
                restored.settle()
                assert caller.recv(100).startswith(b"OK ")
                assert told == []
                assert len(restored.guest.streams) == 1
            host.close()
        finally:
            restored.close()
