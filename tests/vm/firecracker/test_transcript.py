"""The stand-in for Firecracker is held to what a real one answered."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from skerry.host import uids
from vm.firecracker.installing import HERE, StandIns

_CUT_AT = 600
"""Long answers were not written down whole."""
_PATIENCE_S = 20.0
_JAILED_UID = 1234


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "transcript.jsonl").read_text().splitlines()]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.connect(str(self._path))


def _ask(socket_path: Path, method: str, path: str, body: Any) -> tuple[int, str]:
    connection = _Connection(socket_path)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Process:
    """One stand-in, as the transcript's `n1`, `n2`, ..."""

    def __init__(self, stand_ins: StandIns, folder: Path, id: str) -> None:
        self.api = folder / f"{id}.api"
        argv = [stand_ins.firecracker, "--api-sock", self.api, "--id", id]
        self.process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        assert b"API server started" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Replay:
    """Asks the stand-in what was asked then; the paths of that day become paths in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("mnt", "tmp/f"):
            (folder / name).mkdir(parents=True)
        for name in ("kbase.strip", "v61", "bz61", "i61-mmio.img", "rootfs.ext4"):
            (folder / "mnt" / name).write_bytes(b"\x7fELF")
        (folder / "mnt/fcx.py").write_text("import os")

    def here(self, text: str) -> str:
        return text.replace("/mnt/", f"{self.folder}/mnt/").replace("/tmp/f/", f"{self.folder}/tmp/f/")

    def hold(self, process: Process, line: dict[str, Any]) -> None:
        status, reply = _ask(process.api, line["method"], line["path"], json.loads(self.here(json.dumps(line["body"]))))
        told, expected = reply, self.here(line["reply"])
        if len(line["reply"]) == _CUT_AT:
            told = told[: len(expected)]
        assert (status, told) == (line["status"], expected), f"{line['method']} {line['path']}"


@pytest.fixture
def replay(short_folder: Path) -> Replay:
    return Replay(short_folder / "r")


@pytest.fixture
def start(stand_ins: StandIns, replay: Replay) -> Iterator[Callable[[str], Process]]:
    running: list[Process] = []

    def begin(id: str) -> Process:
        running.append(Process(stand_ins, replay.folder, id))
        return running[-1]

    yield begin
    for process in running:
        process.kill()


def _episodes() -> list[list[dict[str, Any]]]:
    """What was asked of one process after the other: a note tells of each new one."""
    found: list[list[dict[str, Any]]] = []
    for line in _lines():
        if line.get("note") in ("api-up", "jailer api socket"):
            found.append([])
        found[-1].append(line)
    return found


def _exchanges(episode: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in episode if line.get("status")]


def test_before_the_start_it_answers_as_firecracker_did(replay: Replay, start: Callable[[str], Process]) -> None:
    process = start("n1")
    exchanges = _exchanges(_episodes()[0])
    assert len(exchanges) > 45
    for line in exchanges:
        replay.hold(process, line)
    assert process.process.poll() is None


def test_from_the_start_to_the_clones_it_answers_as_firecracker_did(
    replay: Replay, start: Callable[[str], Process]
) -> None:
    first, refused, *clones = _episodes()[1:6]
    original = start("n1")
    for line in _exchanges(first):
        replay.hold(original, line)

    twin = start("n2")
    replay.hold(twin, _exchanges(refused)[0])
    assert twin.process.wait(_PATIENCE_S) == 1
    assert original.process.poll() is None

    last: Process = twin
    for number, clone in enumerate(clones):
        last = start(f"c{number}")
        replay.hold(last, _exchanges(clone)[0])
    for line in _exchanges(clones[-1])[1:]:
        # What came after the last clone was asked of the first machine.
        replay.hold(original, line)
    original.kill()
    assert (replay.folder / "tmp/f/v.sock").exists(), "a killed process leaves its socket"


def test_other_kernels_are_started_as_firecracker_did(replay: Replay, start: Callable[[str], Process]) -> None:
    for number, episode in enumerate(_episodes()[6:8]):
        process = start(f"d{number}")
        for line in _exchanges(episode):
            replay.hold(process, line)


@pytest.mark.skipif(not uids.are_available(), reason="only root has jails")
def test_in_a_jail_it_is_found_and_answers_as_firecracker_did(replay: Replay, stand_ins: StandIns) -> None:
    seen, *_ = episode = _episodes()[8]
    base = replay.folder / "j"
    root = base / Path(seen["path"]).parents[1].relative_to("/srv/j")
    root.mkdir(parents=True)
    for name in ("kbase.strip", "rootfs.ext4"):
        (root / name).write_bytes(b"\x7fELF")
        os.chown(root / name, _JAILED_UID, _JAILED_UID)
    who = ["--id", root.parent.name, "--uid", str(_JAILED_UID), "--gid", str(_JAILED_UID), "--new-pid-ns"]
    argv = [stand_ins.jailer, *who, "--exec-file", stand_ins.firecracker, "--chroot-base-dir", base]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as jailer:
        assert jailer.stdout is not None
        assert b"API server started" in jailer.stdout.readline()
        pid = int((root / "firecracker.pid").read_text())
        try:
            assert jailer.wait(_PATIENCE_S) == 0
            assert {path.name for path in root.iterdir()} == {*seen["ls"]}
            status = Path(f"/proc/{pid}/status").read_text().splitlines(keepends=True)
            assert {"Uid:\t1234\t1234\t1234\t1234\n", f"NSpid:\t{pid}\t1\n"} <= {*status}
            for line in _exchanges(episode):
                told = _ask(root / "run/firecracker.socket", line["method"], line["path"], line["body"])
                assert told == (line["status"], line["reply"])
        finally:
            os.kill(pid, signal.SIGKILL)


def test_every_exchange_of_the_transcript_is_replayed() -> None:
    assert sum(len(_exchanges(episode)) for episode in _episodes()) == sum(1 for line in _lines() if line.get("status"))
    assert len(_episodes()) == 9


def test_the_eleventh_connection_is_refused(replay: Replay, start: Callable[[str], Process]) -> None:
    process = start("n1")
    with_answers = []
    for _ in range(14):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_PATIENCE_S)
        connection.connect(str(process.api))
        with_answers.append(connection)
    try:
        firsts = []
        for connection in with_answers[:10]:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            firsts.append(connection.recv(40))
        firsts += [connection.recv(40) for connection in with_answers[10:]]
    finally:
        for connection in with_answers:
            connection.close()
    seen = [line["first"].encode() for line in _lines() if line.get("note") == "conn" and "first" in line]
    assert {*firsts[:10]} == {*seen[:10]}
    assert {*firsts[10:]} == {*seen[10:]}


def _say(path: Path, *writes: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(str(path))
        try:
            for data in writes:
                connection.sendall(data)
            return connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_its_vsock_answers_as_firecrackers_did(replay: Replay, start: Callable[[str], Process]) -> None:
    process = start("n1")
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        (replay.folder / "tmp/f").mkdir(exist_ok=True)
        listener.bind(str(replay.folder / "tmp/f/v.sock_1024"))
        listener.listen(1)
        listener.settimeout(_PATIENCE_S)
        for line in _exchanges(_episodes()[1])[:7]:
            replay.hold(process, line)
        listener.accept()[0].close()
    vsock = replay.folder / "tmp/f/v.sock"

    assert _say(vsock, b"CONNECT 51\n").startswith(b"OK 10737418")
    assert _say(vsock, b"connect 51\n").startswith(b"OK 10737418")
    assert _say(vsock, b"CONNECT 51\r\n").startswith(b"OK 10737418")
    hello = json.dumps({"id": 1, "method": "hello", "params": {"protocol": 1}}).encode()
    assert _say(vsock, b"CONNECT 51\n" + hello + b"\n").startswith(b"OK 10737418")
    assert _say(vsock, b"CONNECT 999\n") == b"", "nobody listens there"
    assert _say(vsock, b"CONNECT 4294967296\n") == b""
    assert _say(vsock, b"garbage\n") == b""
    assert _say(vsock, b"CONNECT 51") == b"", "no line end"
    assert os.path.exists(vsock)
