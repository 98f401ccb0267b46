from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry.agent.bundle import GUEST
from skerry.agent.client import AgentClient
from skerry.errors import AgentUnreachable
from skerry.net import dial

Relay = tuple["subprocess.Popen[bytes]", socket.socket]


PYTHON = [sys.executable, "-I", "-S", "-B"]


def start(address: str) -> subprocess.Popen[bytes]:
    argv = [*PYTHON, str(GUEST / "relay.py"), address]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


@pytest.fixture(params=["path", "abstract"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    """A relay and the agent's end of its socket."""
    name = f"@skerry-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name.replace("@", "\0", 1))
        server.listen()
        server.settimeout(10)
        with start(name) as process:
            try:
                peer, _ = server.accept()
                peer.settimeout(10)
                with peer:
                    yield process, peer
            finally:
                process.kill()


def peak_memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def test_bytes_go_both_ways_at_once_in_bounded_memory(relay: Relay) -> None:
    process, peer = relay
    assert process.stdin
    assert process.stdout
    size = 32 << 20
    stdin, stdout = process.stdin.fileno(), process.stdout.fileno()
    up = threading.Thread(target=lambda: send(size, lambda block: os.write(stdin, block)))
    down = threading.Thread(target=lambda: send(size, peer.send))
    back = threading.Thread(target=lambda: read_exactly(lambda count: os.read(stdout, count), size))
    for thread in (up, down, back):
        thread.start()
    assert read_exactly(peer.recv, size) == size
    for thread in (up, down, back):
        thread.join(10)
        assert not thread.is_alive()
    assert peak_memory(process.pid) < 20 << 20


def send(size: int, write: Callable[[bytes], int]) -> None:
    while size:
        size -= write(bytes(min(1 << 20, size)))


def read_exactly(read: Callable[[int], bytes], size: int) -> int:
    count = 0
    while count < size and (chunk := read(min(1 << 20, size - count))):
        count += len(chunk)
    return count


def test_the_agents_last_words_are_delivered_whole_though_stdin_stays_open(relay: Relay) -> None:
    process, peer = relay
    assert process.stdin
    assert process.stdout
    last_words = os.urandom(300_000)

    def speak_and_end() -> None:
        peer.sendall(last_words)
        peer.close()

    speaker = threading.Thread(target=speak_and_end)
    speaker.start()
    got = os.read(process.stdout.fileno(), 100_000)
    speaker.join(10)
    process.stdin.write(b"nobody hears this")
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        got += chunk
    assert got == last_words
    assert process.wait(10) == 0


def test_the_end_of_stdin_ends_the_stream_though_the_agent_is_silent(relay: Relay) -> None:
    process, peer = relay
    assert process.stdin
    process.stdin.write(b"last words")
    process.stdin.close()
    assert peer.recv(100) == b"last words"
    assert peer.recv(100) == b""
    assert process.wait(10) == 0


def test_a_reader_that_is_gone_ends_it_though_stdin_stays_open(relay: Relay) -> None:
    process, peer = relay
    assert process.stdout
    process.stdout.close()
    assert process.wait(10) == 0
    assert peer.recv(100) == b""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """The socket of a running agent."""
    config, writer = os.pipe()
    os.write(writer, json.dumps({"listen": {"unix": str(tmp_path / "agent")}}).encode())
    os.close(writer)
    argv = [*PYTHON, str(GUEST / "start.py"), "test", str(config)]
    with subprocess.Popen(argv, pass_fds=[config]) as process:
        os.close(config)
        while not (tmp_path / "agent").exists() and process.poll() is None:
            time.sleep(0.002)
        yield tmp_path / "agent"
        process.kill()


async def test_the_agent_is_reached_through_it_again_and_again(agent: Path) -> None:
    for _ in range(2):
        client = await AgentClient.greet(await dial.process([*PYTHON, str(GUEST / "relay.py"), str(agent)]))
        output = client.open("exec", {"argv": ["echo", "through the relay"]}).chunks()
        assert [data async for _, data in output] == [b"through the relay\n"]
        client.close()


async def test_an_agent_that_is_not_there_is_told_to_the_caller(tmp_path: Path) -> None:
    stream = await dial.process([*PYTHON, str(GUEST / "relay.py"), str(tmp_path / "none")])
    with pytest.raises(AgentUnreachable, match=r"cannot reach the agent at .*/none: No such file"):
        await AgentClient.greet(stream)


def test_no_agent_is_said_on_stderr_with_a_code(tmp_path: Path) -> None:
    with start(str(tmp_path / "none")) as process:
        _, words = process.communicate(timeout=10)
        assert process.returncode == 1
        assert words == f"cannot reach the agent at {tmp_path}/none: No such file or directory\n".encode()


def test_it_imports_little_since_every_stream_pays_for_it() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(GUEST)!r}); before = set(sys.modules); import relay;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    heavy = {"socket", "selectors", "threading", "signal", "subprocess", "typing", "re", "json"}
    assert not heavy & set(done.stdout.split())
