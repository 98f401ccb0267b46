"""The control socket, of a QEMU without any machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.vm.qemu import qmp
from skerry.vm.qemu.qmp import Qmp, QmpError

PROGRAM = shutil.which("qemu-system-x86_64")


@pytest.fixture
def control_path(tmp_path: Path) -> Iterator[Path]:
    if PROGRAM is None:
        pytest.skip("QEMU is not installed")
    path = tmp_path / "qmp.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        argv = [
            PROGRAM,
            "-machine",
            "none",
            "-S",
            "-nodefaults",
            "-display",
            "none",
            "-mon",
            "chardev=qmp,mode=control",
        ]
        argv += ["-chardev", f"socket,id=qmp,fd={listener.fileno()},server=on,wait=off"]
        running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])
    yield path
    running.kill()
    running.wait()


@pytest.fixture
async def control(control_path: Path) -> AsyncIterator[Qmp]:
    async with qmp.connect(control_path) as control:
        yield control


async def test_a_question_is_answered(control: Qmp) -> None:
    assert (await control.execute("query-status"))["running"] is False
    assert {"name": "query-status"} in await control.execute("query-commands")


async def test_a_refusal_says_why_and_the_next_question_is_answered(control: Qmp) -> None:
    with pytest.raises(QmpError, match="no-such-thing"):
        await control.execute("no-such-thing")
    with pytest.raises(QmpError, match="nowhere"):
        await control.execute("block_resize", {"node-name": "nowhere", "size": 5})
    assert await control.execute("query-name") == {}


async def test_a_descriptor_goes_along(control: Qmp) -> None:
    read, write = os.pipe()
    try:
        await control.execute("getfd", {"fdname": "mine"}, fd=read)
        await control.execute("closefd", {"fdname": "mine"})
    finally:
        os.close(read)
        os.close(write)


async def test_an_event_is_kept_for_who_asks_for_it_later(control: Qmp) -> None:
    await control.execute("qom-list", {"path": "/"})
    await control.execute("quit")
    assert (await control.event("SHUTDOWN", {"reason": ("host-qmp-quit",)}))["guest"] is False


async def test_the_next_is_served_once_the_one_before_has_left(control_path: Path) -> None:
    async with qmp.connect(control_path) as first:
        second = asyncio.create_task(_status(control_path))
        assert await first.execute("query-status")
    assert (await second)["running"] is False


async def _status(path: Path) -> dict[str, bool]:
    async with qmp.connect(path) as control:
        answer: dict[str, bool] = await control.execute("query-status")
        return answer


async def test_a_qemu_that_has_ended_is_told_of(control: Qmp) -> None:
    await control.execute("quit")
    with pytest.raises(ProviderError):
        await control.event("NEVER", {})


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[socket.socket]:
    """What listens in QEMU's place; a connection waits there until it is accepted."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "qmp.sock"))
        listener.listen()
        yield listener


async def test_a_qemu_that_is_silent_is_given_up(impostor: socket.socket) -> None:
    with pytest.raises(ProviderError, match=r"does not answer the greeting within 0\.05 s"):
        async with qmp.connect(impostor.getsockname(), timeout_s=0.05):
            pass


@pytest.mark.parametrize("said", [b"[]\n", b"nonsense\n", b"x" * (2 << 20), b"", b"[" * 30_000 + b"\n"])
async def test_what_is_no_qemu_is_not_believed(impostor: socket.socket, said: bytes) -> None:
    def speak() -> None:
        connection, _ = impostor.accept()
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(said)

    speaking = asyncio.create_task(asyncio.to_thread(speak))
    with pytest.raises(ProviderError):
        async with qmp.connect(impostor.getsockname()):
            pass
    await speaking


@pytest.mark.parametrize("asked", ["a question", "an event"])
async def test_events_without_end_are_no_answer_and_are_not_kept(impostor: socket.socket, asked: str) -> None:
    """They are always there to be received, so no deadline would come to an end of them."""

    def speak() -> None:
        connection, _ = impostor.accept()
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b'{"QMP":{}}\n{"return":{}}\n')
            while True:
                connection.sendall(b'{"event":"MORE","data":"' + b"x" * 1000 + b'"}\n')

    speaking = asyncio.create_task(asyncio.to_thread(speak))
    with pytest.raises(ProviderError, match="more than it should"):
        async with qmp.connect(impostor.getsockname()) as control:
            await (control.execute("query-status") if asked == "a question" else control.event("NEVER", {}))
    assert len(control._events) <= qmp._KEPT_EVENTS
    await speaking


@pytest.mark.parametrize("answer", [b'{"error":[]}', b'{"error":{}}', b'{"error":null}', b'{"error":{"desc":5}}'])
async def test_a_refusal_without_a_reason_is_one(impostor: socket.socket, answer: bytes) -> None:
    def speak() -> None:
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(b'{"QMP":{}}\n{"return":{}}\n' + answer + b"\n")
            while connection.recv(1000):
                pass

    speaking = asyncio.create_task(asyncio.to_thread(speak))
    async with qmp.connect(impostor.getsockname()) as control:
        with pytest.raises(QmpError, match="refuses query-status"):
            await control.execute("query-status")
    await speaking


async def test_a_socket_that_nobody_serves_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"qmp\.sock cannot be reached"):
        async with qmp.connect(tmp_path / "qmp.sock"):
            pass
