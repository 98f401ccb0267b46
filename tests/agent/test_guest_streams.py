"""The agent's streams: every way to reach it, what it refuses, and that no frame can end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.agent.bundle import GUEST
from skerry.agent.client import AgentClient, digest_of
from skerry.errors import AgentUnreachable
from skerry.net.stream import FdStream

from .guest_process import PATIENCE_S, Guest, wait_until

CLOSING = {
    "garbage": b"\xff\xfe\x00\n",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "a long line": b"x" * ((1 << 20) + 2),
    "nesting of 10^5": b'{"id":1,"method":"ping","params":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a string id": b'{"id":"1","method":"ping"}\n',
    "a float id": b'{"id":1.5,"method":"ping"}\n',
    "no method": b'{"id":1}\n',
    "a method that is a number": b'{"id":1,"method":5}\n',
    "params that are a list": b'{"id":1,"method":"ping","params":[]}\n',
    "a negative attachment": b'{"id":1,"method":"ping","bytes":-1}\n',
    "a huge attachment": b'{"id":1,"method":"ping","bytes":1048577}\n',
    "an attachment as text": b'{"id":1,"method":"ping","bytes":"1"}\n',
    "a boolean attachment": b'{"id":1,"method":"ping","bytes":true}\n',
    "NaN": b'{"id":1,"method":"ping","params":{"x":NaN}}\n',
    "Infinity": b'{"id":1,"method":"ping","params":{"x":Infinity}}\n',
    "a number of 10,000 digits": b'{"id":' + b"1" * 10_000 + b',"method":"ping"}\n',
    "a notification for a list": b'{"method":"data","params":{"id":[]}}\n',
    "a notification for an object": b'{"method":"cancel","params":{"id":{}}}\n',
}


@pytest.mark.parametrize("hostile", CLOSING.values(), ids=CLOSING)
def test_a_broken_frame_closes_its_stream_and_no_other(guest: Guest, hostile: bytes) -> None:
    with guest.wire() as other, guest.wire() as wire:
        wire.socket.sendall(hostile + b'{"id":1,"method":"ping"}\n')
        assert wire.is_closed()
        assert other.call(1, "ping")["result"] == {}


def test_an_id_in_use_closes_the_stream(guest: Guest) -> None:
    with guest.wire() as wire:
        for _ in range(2):
            wire.send({"id": 1, "method": "exec", "params": {"argv": ["sleep", "60"]}})
        assert wire.is_closed()
    wait_until(lambda: not guest.children(), "the process of the closed stream is gone")


@pytest.mark.parametrize(
    "first", ['{"id":1,"method":"ping"}\n', '{"id":1,"method":"exec","params":{"argv":["true"]}}\n']
)
def test_where_a_token_is_demanded_nothing_is_answered_before_it(first: str) -> None:
    with Guest(token_digest=digest_of("secret")) as guest, guest.wire(greet=False) as wire:
        wire.socket.sendall(first.encode())
        assert wire.receive() == ({}, b"")


@pytest.mark.parametrize("token", [None, "wrong", "", "secre", "secrets", 5, ["secret"], "é", "\ud800"])
def test_a_wrong_token_closes_the_stream_without_a_word(token: Any) -> None:
    with Guest(token_digest=digest_of("secret")) as guest, guest.wire(greet=False) as wire:
        wire.send({"id": 1, "method": "hello", "params": {"protocol": 1, "token": token}})
        assert wire.receive() == ({}, b"")


def test_unknown_methods_have_the_code_of_json_rpc(guest: Guest) -> None:
    with guest.wire() as wire:
        for id, method in enumerate(["", "nope", "__init__", "run", "_dispatch", "hello.x", "x" * 10_000], start=1):
            assert wire.call(id, method)["error"]["code"] == -32601
        assert wire.call(99, "ping")["result"] == {}


def test_a_missing_or_null_params_is_not_the_end(guest: Guest) -> None:
    with guest.wire() as wire:
        wire.send({"id": 1, "method": "ping"})
        assert wire.answer(1)["result"] == {}


# ways to reach it


async def test_it_is_reached_by_tcp_with_its_token() -> None:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    guest = Guest()
    config = {"listen": {"tcp": ["127.0.0.1", port]}, "token_digest": digest_of("secret"), "home": str(guest.home)}
    guest.process = guest.start(config)
    try:

        def connect() -> socket.socket:
            end = time.monotonic() + PATIENCE_S
            while True:
                try:
                    return socket.create_connection(("127.0.0.1", port))
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.005)

        fd = connect().detach()
        client = await AgentClient.greet(FdStream(fd, fd), token="secret")
        assert await client.call("ping", type=dict[str, Any]) == {}
        client.close()
        fd = connect().detach()
        with pytest.raises(AgentUnreachable):
            await AgentClient.greet(FdStream(fd, fd), token="guess")
    finally:
        guest.__exit__()


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_it_is_reached_by_a_unix_socket_that_it_makes(kind: str) -> None:
    guest = Guest()
    address = guest.path if kind == "path" else f"@skerry-test-{os.getpid()}"
    guest.process = guest.start({"listen": {"unix": address}, "home": str(guest.home)})
    try:
        connection = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                connection.connect(address.replace("@", "\0", 1))
                break
            except OSError:
                assert time.monotonic() < end
                await asyncio.sleep(0.005)
        fd = connection.detach()
        client = await AgentClient.greet(FdStream(fd, fd))
        client.close()
    finally:
        guest.__exit__()


@pytest.fixture
def over_stdio() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-I", "-S", "-B", str(GUEST / "start.py"), "id"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield process
        process.kill()


async def test_over_stdio_nothing_else_gets_into_the_stream_and_its_end_is_the_agents(
    over_stdio: subprocess.Popen[bytes],
) -> None:
    process = over_stdio
    assert process.stdin
    assert process.stdout
    client = await AgentClient.greet(FdStream(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())))
    call = client.open("exec", {"shell": "echo out; cat; ls -l /proc/self/fd | wc -l"})
    assert b"".join([data async for _, data in call.chunks()]) == b"out\n5\n"
    client.close()
    process.stdin.close()
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0


async def test_over_a_device_it_serves_one_host_after_the_other() -> None:
    """A serial line, as in a virtual machine; here it is a terminal pair, which must be made raw."""
    master, slave = pty.openpty()
    guest = Guest()
    guest.process = guest.start({"listen": {"device": os.ttyname(slave)}, "home": str(guest.home)})
    try:
        await asyncio.to_thread(
            wait_until, lambda: not termios.tcgetattr(slave)[3] & termios.ECHO, "the agent made the device raw"
        )
        client = await AgentClient.greet(FdStream(os.dup(master), os.dup(master)))
        call = client.open("exec", {"argv": ["printf", "\\001\\003\\004\\021\\023\\r\\n\\377"]})
        assert b"".join([data async for _, data in call.chunks()]) == b"\x01\x03\x04\x11\x13\r\n\xff"
        client.close()
    finally:
        os.close(slave)
        guest.__exit__()
        os.close(master)


def test_streams_beyond_the_limit_wait_until_others_end(guest: Guest) -> None:
    wires = [guest.wire() for _ in range(128)]
    waiting = [guest.connect() for _ in range(3)]
    for stream in waiting:
        stream.sendall(b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":1}}\n')
        stream.settimeout(PATIENCE_S)
    assert wires[0].call(1, "ping")["result"] == {}
    assert guest.fds().count("socket") == 1 + len(wires)
    for stream, wire in zip(waiting, wires, strict=False):
        wire.socket.close()
        assert b'"protocol":1' in stream.recv(4096)
    for stream in (*waiting, *(wire.socket for wire in wires)):
        stream.close()
    wait_until(lambda: guest.fds().count("socket") == 1, "closed streams are let go")
    with guest.wire() as wire:
        assert wire.call(1, "ping")["result"] == {}


# its end


def test_it_ends_when_nothing_has_happened_for_its_idle_time() -> None:
    with Guest(idle_s=0.2) as guest:
        assert guest.process.wait(PATIENCE_S) == 0


def test_who_asks_for_how_long_nobody_has_used_it_does_not_use_it() -> None:
    with Guest() as guest, guest.wire() as wire, guest.wire() as other:
        wire.call(1, "exec", argv=["true"])
        first, second = (other.call(number, "unused")["result"]["unused_s"] for number in (1, 2))
        assert 0 <= first < second
        wire.call(2, "exec", argv=["sleep", "1000"], background=True)
        assert other.call(3, "unused")["result"] == {"unused_s": 0.0}


def test_a_running_process_keeps_it_from_being_idle() -> None:
    with Guest(idle_s=0.2) as guest:
        with guest.wire() as wire:
            wire.call(1, "exec", argv=["sleep", "0.6"], background=True)
        with pytest.raises(subprocess.TimeoutExpired):
            guest.process.wait(0.45)
        assert guest.process.wait(PATIENCE_S) == 0


def test_its_lifetime_ends_it_and_what_it_started() -> None:
    with Guest(lifetime_s=0.3) as guest:
        with guest.wire() as wire:
            pid = wire.call(1, "exec", argv=["sleep", "60"], background=True)["result"]["pid"]
            assert guest.process.wait(PATIENCE_S) == 0
        wait_until(lambda: not os.path.exists(f"/proc/{pid}") or is_zombie(pid), "its process is gone")


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] == "Z"
    except OSError:
        return True


def test_a_lifetime_can_be_changed_and_ended(guest: Guest) -> None:
    with guest.wire() as wire:
        assert wire.call(1, "set_lifetime", lifetime_s=3600)["result"]["lifetime_s"] > 3500
        assert wire.call(2, "set_lifetime", lifetime_s=None, idle_s=500)["result"] == {
            "lifetime_s": None,
            "idle_s": 500,
        }
        for id, wrong in enumerate([-1, 0, "1", True, 1e300, []], start=3):
            assert wire.call(id, "set_lifetime", lifetime_s=wrong)["error"]["data"]["kind"] == "invalid"
        assert wire.call(90, "shutdown")["result"] == {}
        assert guest.process.wait(PATIENCE_S) == 0


# no frame can end it

SAFE = ["ping", "exec", "exec_code", "attach", "processes", "signal", "resize", "read_file", "write_file", "stat",
        "list_dir", "make_dir", "symlink", "xattr", "tree_download", "watch", "metrics", "connect", "hello",
        "nope"]  # fmt: skip
"""Not those that would remove, own or end something: the agent of this test is not in a box."""

odd: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
params = st.fixed_dictionaries(
    {},
    optional={
        "path": st.one_of(st.sampled_from(["f", "d", ".", "d/x", "missing", None, 5, [], {}])),
        "path64": st.sampled_from(["", "Zg==", "!", "/w=="]),
        "argv": st.sampled_from([["true"], ["cat"], [], [""], [5], "true", None, ["\udcff"]]),
        "shell": st.sampled_from(["true", "exit 3", None, 5]),
        "language": st.sampled_from(["sh", "klingon", None, 5]),
        "env": st.one_of(odd, st.just({"A": "b"})),
        "cwd": odd, "user": odd, "timeout_s": st.one_of(odd, st.just(0.01)), "stdin": odd, "limit": odd,
        "pty": st.one_of(odd, st.just({"rows": 5, "cols": 5})), "background": st.booleans(), "tag": odd, "window": odd,
        "process": odd, "call": odd, "signal": odd, "rows": odd, "cols": odd, "offset": odd, "length": odd,
        "mode": odd, "atomic": odd, "append": odd, "depth": odd, "follow": odd, "parents": st.booleans(),
        "target": odd, "set": odd, "remove": odd, "port": st.sampled_from([1, 0, -1, "x", None]), "host": odd,
        "recursive": odd,
    },
)  # fmt: skip
requests = st.builds(lambda m, p: {"method": m, "params": p}, st.sampled_from(SAFE), params)
notes = st.builds(
    lambda m, p: {"method": m, "params": p},
    st.sampled_from(["data", "end", "credit", "cancel", "other"]),
    st.fixed_dictionaries({"id": st.one_of(st.integers(0, 8), odd)}, optional={"bytes": odd, "fd": odd}),
)


@pytest.fixture(scope="module")
def lasting_guest() -> Any:
    with Guest() as guest:
        (guest.home / "d").mkdir()
        (guest.home / "f").write_bytes(b"x" * 100_000)
        yield guest


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(requests, notes), max_size=8), st.booleans())
def test_no_conversation_ends_the_agent(lasting_guest: Guest, messages: list[dict[str, Any]], polite: bool) -> None:
    with lasting_guest.wire() as wire:
        for id, message in enumerate(messages, start=1):
            is_request = message["method"] in SAFE
            attachment = b"x" * 10 if message["method"] == "data" else b""
            try:
                wire.send({**message, "id": id} if is_request else message, attachment)
            except OSError:
                break  # it closed the stream, as it may
        if polite:
            with contextlib.suppress(OSError):
                wire.socket.shutdown(socket.SHUT_WR)
            assert wire.is_closed()
    with lasting_guest.wire() as wire:
        assert wire.call(1, "ping")["result"] == {}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=300), max_size=4), st.booleans())
def test_no_bytes_end_the_agent(lasting_guest: Guest, pieces: list[bytes], greet: bool) -> None:
    with lasting_guest.wire(greet=greet) as wire:
        with contextlib.suppress(OSError):
            for piece in pieces:
                wire.socket.sendall(piece)
            wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed()
    with lasting_guest.wire() as wire:
        assert wire.call(1, "ping")["result"] == {}


def test_requests_in_one_packet_are_all_answered(guest: Guest) -> None:
    with guest.wire() as wire:
        wire.socket.sendall(b"".join(json.dumps({"id": i, "method": "ping"}).encode() + b"\n" for i in range(1, 501)))
        assert sorted(wire.receive()[0]["id"] for _ in range(500)) == list(range(1, 501))
