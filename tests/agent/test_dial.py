from __future__ import annotations

import asyncio
import os
import pty
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from skerry.errors import AgentUnreachable
from skerry.net import dial

from .collector import Collector

Talk = Callable[[socket.socket], None]


def echo(peer: socket.socket) -> None:
    while data := peer.recv(65536):
        peer.sendall(data)


@contextmanager
def listening(server: socket.socket, talk: Talk = echo) -> Iterator[None]:
    """Accepts one stream, talks, and closes."""

    def serve() -> None:
        with server.accept()[0] as peer, suppress(ConnectionError):
            talk(peer)

    with server:
        server.settimeout(5)
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(5)
        assert not thread.is_alive()


def unix_server(path: Path) -> socket.socket:
    """Bound to a path of any length."""
    server = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH)
    server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)
    return server


async def test_unix_stream_carries_bytes_both_ways(tmp_path: Path) -> None:
    with listening(unix_server(tmp_path / "a.sock")):
        stream = await dial.unix(tmp_path / "a.sock")
        collector = Collector(stream)
        stream.write(b"hello ", b"agent")
        await collector.wait_for(b"hello agent")
        stream.close()
        await collector.wait_for_end()
        assert collector.error is None


async def test_unix_path_may_be_longer_than_a_socket_address(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 150)
    folder.mkdir()
    with listening(unix_server(folder / "a.sock")):
        stream = await dial.unix(folder / "a.sock")
        collector = Collector(stream)
        stream.write(b"x")
        await collector.wait_for(b"x")
        stream.close()


async def test_missing_and_dead_sockets_are_unreachable_at_once(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match="No such file"):
        await dial.unix(tmp_path / "none.sock")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "dead.sock"))
    with pytest.raises(AgentUnreachable, match="refused"):
        await dial.unix(tmp_path / "dead.sock")


async def test_full_backlog_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        first = await dial.unix(path)
        with pytest.raises(AgentUnreachable, match=r"no answer in 0\.1 s"):
            await dial.unix(path, timeout_s=0.1)
        waiting = asyncio.ensure_future(dial.unix(path))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        server.accept()[0].close()
        (await waiting).close()
        first.close()


async def test_a_cancelled_dial_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / ("f" * 120) / "full.sock"
    path.parent.mkdir()
    with unix_server(path) as server:
        server.listen(0)
        first = await dial.unix(path)
        before = os.listdir("/proc/self/fd")
        waiting = asyncio.ensure_future(dial.unix(path))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert set(os.listdir("/proc/self/fd")) <= set(before)
        first.close()


async def test_tcp_stream_carries_bytes_without_delay() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with listening(server):
        stream = await dial.tcp("localhost", port)
        collector = Collector(stream)
        stream.write(b"over tcp")
        await collector.wait_for(b"over tcp")
        stream.close()
    with pytest.raises(AgentUnreachable, match=f"127.0.0.1:{port}"):
        await dial.tcp("127.0.0.1", port)


async def test_tcp_dial_has_a_deadline() -> None:
    with socket.socket() as server, socket.socket() as filler:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        filler.connect(server.getsockname())
        with pytest.raises(AgentUnreachable, match=r"no answer in 0\.2 s"):
            await dial.tcp(*server.getsockname(), timeout_s=0.2)


async def test_unknown_host_is_unreachable() -> None:
    with pytest.raises(AgentUnreachable, match=r"nowhere\.invalid"):
        await dial.tcp("nowhere.invalid", 1)


def vsock_loopback_works() -> bool:
    try:
        with socket.socket(socket.AF_VSOCK) as server, socket.socket(socket.AF_VSOCK) as client:
            server.bind((socket.VMADDR_CID_ANY, 15200))
            server.listen()
            client.settimeout(0.3)
            client.connect((1, 15200))
            return True
    except OSError:
        return False


async def test_vsock_stream_carries_bytes() -> None:
    if not vsock_loopback_works():
        pytest.skip("vsock loopback (CID 1) does not work on this host")
    with socket.socket(socket.AF_VSOCK) as server:
        server.bind((socket.VMADDR_CID_ANY, 15201))
        server.listen()
        stream = await dial.vsock(1, 15201)
        collector = Collector(stream)
        with server.accept()[0] as peer:
            peer.sendall(b"from the guest")
            await collector.wait_for(b"from the guest")
        stream.close()


async def test_vsock_dial_to_nobody_is_unreachable_within_its_deadline() -> None:
    with pytest.raises(AgentUnreachable, match="vsock 1:52999"):
        await dial.vsock(1, 52999, timeout_s=0.2)


async def answer(path: Path, *parts: bytes, port: int = 52) -> bytes:
    """What a stream delivers first when Firecracker answers with `parts`, each sent on its own, and then closes."""

    def talk(peer: socket.socket) -> None:
        assert peer.recv(100) == b"CONNECT %d\n" % port
        for part in parts:
            peer.sendall(part)
            time.sleep(0.005)  # so that the parts arrive apart

    with listening(unix_server(path), talk):
        stream = await dial.firecracker(path, port, timeout_s=2)
        collector = Collector(stream)
        await collector.wait_for_end()
        return bytes(collector.data)


async def test_firecracker_handshake_gives_the_guests_bytes_and_not_its_own(tmp_path: Path) -> None:
    assert await answer(tmp_path / "1", b"OK 1073741824\n") == b""
    assert await answer(tmp_path / "2", b"O", b"K 10", b"73", b"\n", b"later") == b"later"
    assert await answer(tmp_path / "3", b"OK 5\nOK 6\n{}") == b"OK 6\n{}"
    assert await answer(tmp_path / "4", b"OK 7\n\0\xff", port=1024) == b"\0\xff"


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"OK\n",
        b"OK \n",
        b"OK 52",
        b"OK 5 \n",
        b"OK -5\n",
        b"OK \xd9\xa1\n",
        b"ok 52\n",
        b" OK 52\n",
        b"KO 52\n",
        b"OK 52\r\n",
        b"\n",
        b"OK " + b"1" * 1000,
    ],
)
async def test_any_other_firecracker_answer_is_unreachable(tmp_path: Path, wrong: bytes) -> None:
    with pytest.raises(AgentUnreachable, match="refused port 52"):
        await answer(tmp_path / "fc", wrong)


def silent(peer: socket.socket) -> None:
    while peer.recv(100):
        pass


async def test_firecracker_that_never_answers_meets_the_deadline(tmp_path: Path) -> None:
    no_answer = pytest.raises(AgentUnreachable, match=r"no answer in 0\.1 s")
    with listening(unix_server(tmp_path / "fc"), silent), no_answer:
        await dial.firecracker(tmp_path / "fc", timeout_s=0.1)


async def test_device_that_is_a_terminal_passes_every_byte_unchanged() -> None:
    ours, theirs = pty.openpty()
    try:
        stream = await dial.device(os.ttyname(theirs))
        collector = Collector(stream)
        every_byte = bytes(range(256))
        os.write(ours, every_byte)
        await collector.wait_for(every_byte)
        stream.write(every_byte)
        got = b""
        while len(got) < 256:
            got += await asyncio.to_thread(os.read, ours, 1024)
        assert got == every_byte
        stream.close()
    finally:
        os.close(ours)
        os.close(theirs)


async def test_what_is_no_character_device_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentUnreachable, match="not a character device"):
        await dial.device(tmp_path / "file")
    with pytest.raises(AgentUnreachable, match="No such file"):
        await dial.device(tmp_path / "none")


def is_there(pid: int) -> bool:
    """Also as a zombie."""
    return Path(f"/proc/{pid}").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until(condition: Callable[[], bool]) -> None:
    def wait() -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    await asyncio.to_thread(wait)


async def wait_for_reaping(pid: int) -> None:
    await wait_until(lambda: not is_there(pid))


async def test_process_stdio_is_a_stream_and_ends_with_it() -> None:
    stream = await dial.process(["cat"])
    assert isinstance(stream, dial.ProcessStream)
    collector = Collector(stream)
    block = os.urandom(1 << 20)
    for _ in range(4):
        stream.write(block)
        await stream.drained()
    await collector.wait_for(block * 4)
    pid = stream._child.pid
    assert is_there(pid)
    stream.close()
    stream.close()
    await collector.wait_for_end()
    assert collector.error is None
    await wait_for_reaping(pid)


async def test_process_that_ends_tells_its_code_and_the_tail_of_its_stderr() -> None:
    script = "head -c 200000 /dev/zero | tr '\\0' e >&2; printf data; echo ' no such box' >&2; exit 7"
    collector = Collector(await dial.process(["sh", "-c", script]))
    await collector.wait_for_end()
    assert collector.data == b"data"
    assert isinstance(collector.error, AgentUnreachable)
    assert "'sh'" in str(collector.error)
    assert "code 7" in str(collector.error)
    assert str(collector.error).endswith("e no such box")
    assert len(str(collector.error)) < 5000


async def test_process_that_closes_its_output_but_lives_on_is_ended() -> None:
    stream = await dial.process(["sh", "-c", "exec >&-; exec sleep 100"])
    assert isinstance(stream, dial.ProcessStream)
    collector = Collector(stream)
    await collector.wait_for_end()
    assert "closed its output" in str(collector.error)
    await wait_for_reaping(stream._child.pid)


async def test_process_whose_children_complain_without_end_is_told_of_all_the_same() -> None:
    stream = await dial.process(["sh", "-c", "yes >&2 1>&2 & exit 7"])
    assert isinstance(stream, dial.ProcessStream)
    collector = Collector(stream)
    await collector.wait_for_end()
    assert "code 7" in str(collector.error)
    assert len(str(collector.error)) < 5000
    await wait_for_reaping(stream._child.pid)


async def test_closing_kills_a_process_that_ignores_signals_and_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM HUP INT; sleep 100 & echo $!; wait"
    stream = await dial.process(["sh", "-c", script])
    assert isinstance(stream, dial.ProcessStream)
    collector = Collector(stream)
    await wait_until(lambda: b"\n" in collector.data)
    stream.close()
    await wait_for_reaping(stream._child.pid)
    grandchild = int(collector.data)
    await wait_until(lambda: not is_running(grandchild))


async def test_process_with_its_own_environment() -> None:
    collector = Collector(await dial.process(["/usr/bin/env"], env={"ONLY": "this"}))
    await collector.wait_for_end()
    assert collector.data == b"ONLY=this\n"


async def test_missing_program_is_unreachable() -> None:
    with pytest.raises(AgentUnreachable, match="cannot start '/no/such/engine'"):
        await dial.process(["/no/such/engine"])


def test_process_is_reaped_even_if_the_loop_ends_right_after_close() -> None:
    async def dial_and_close() -> int:
        stream = await dial.process(["cat"])
        assert isinstance(stream, dial.ProcessStream)
        Collector(stream)
        stream.close()
        return stream._child.pid

    before = set(threading.enumerate())
    pid = asyncio.run(dial_and_close())
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert not is_there(pid)
