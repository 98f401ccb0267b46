"""Requests to a host of a secret, which the gate opens, beside those that it passes on as they are. Client, gate and
host are processes of their own."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opened_gate import BODY, BOX, NAME

from skerry.gate.ca import certificate
from skerry.gate.secrets import placeholder, seed_of
from skerry.measure.figures import Figure, ratio

from .settings import Settings

_SCRIPT = Path(__file__).parents[1] / "opened_gate.py"
_WARM_UP = 100
_AT_MOST = 2.5


async def opened(settings: Settings) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        return _measure(Path(folder), settings.rounds(4000))


def _measure(folder: Path, rounds: int) -> list[Figure]:
    trusted = ssl.create_default_context(cadata=certificate(folder / "host") + certificate(folder / "gate"))
    (folder / "host.pem").write_text(certificate(folder / "host"))
    token = placeholder("TOKEN", seed_of(folder / "gate", BOX))
    request = f"GET / HTTP/1.1\r\nHost: {NAME}\r\nAccept: */*\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    kept: tuple[list[float], list[float]] = ([], [])
    fresh: tuple[list[float], list[float]] = ([], [])
    with _process(folder, "host") as (host,), _process(folder, "gate", str(host)) as ports:
        with _connect(ports[0], trusted) as one, _connect(ports[1], trusted) as other:
            for turn in range(_WARM_UP + rounds):
                for side, times in zip((one, other), kept, strict=True):
                    took = _ask(side, request)
                    if turn >= _WARM_UP:
                        times.append(took)
        for _ in range(max(rounds // 20, 10)):
            for port, times in zip(ports, fresh, strict=True):
                start = time.perf_counter()
                with _connect(port, trusted) as side:
                    _ask(side, request)
                times.append(time.perf_counter() - start)
    beside = "passed on as it is"
    return [
        ratio("opened", "a request that gets a secret, on an open connection", *kept, against=beside, at_most=_AT_MOST),
        ratio("opened", "the same on a new connection", *fresh, against=beside, at_most=_AT_MOST),
    ]


@contextmanager
def _process(folder: Path, *arguments: str) -> Iterator[list[int]]:
    """A process that serves meanwhile; its ports."""
    argv = [sys.executable, str(_SCRIPT), str(folder), *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield [int(word) for word in process.stdout.readline().split()]
        finally:
            process.stdin.close()


def _connect(port: int, trusted: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return trusted.wrap_socket(plain, server_hostname=NAME)


def _ask(side: ssl.SSLSocket, request: bytes) -> float:
    start = time.perf_counter()
    side.sendall(request)
    answer = b""
    while not answer.endswith(BODY):
        answer += side.recv(1 << 16)
    return time.perf_counter() - start
