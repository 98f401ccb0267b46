"""Names of a domain for some programs alone: a server for DNS on the loopback, and a mount namespace that asks it."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from types import TracebackType
from typing import Self

_ADDRESS = "127.53.73.58"
_A, _NO_ERROR, _NO_NAME = 1, 0, 3
_MOUNT = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


class Names:
    """Everything below the domain is at 127.0.0.1, while the `with` lasts, for what `beginning` begins."""

    def __init__(self, domain: str) -> None:
        self._is_over = False
        self._suffix = f".{domain}".encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._file = tempfile.NamedTemporaryFile("w", prefix="resolv-")  # noqa: SIM115 - it lasts as long as we do
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.beginning = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, self._file.name)

    def __enter__(self) -> Self:
        self._socket.bind((_ADDRESS, 53))
        self._file.write(f"nameserver {_ADDRESS}\noptions timeout:1\n")
        self._file.flush()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", (_ADDRESS, 53))
        self._thread.join()
        self._socket.close()
        self._file.close()

    def _serve(self) -> None:
        while not self._is_over:
            try:
                query, client = self._socket.recvfrom(512)
                self._socket.sendto(self._answer(query), client)
            except (IndexError, struct.error):  # no query
                continue

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]])
            at += 1 + query[at]
        question = query[12 : at + 5]
        name = b"." + b".".join(labels).lower()
        has = name.endswith(self._suffix)
        is_address = has and struct.unpack("!H", query[at + 1 : at + 3])[0] == _A
        code = _NO_ERROR if has else _NO_NAME
        head = query[:2] + struct.pack("!5H", 0x8180 | code, 1, int(is_address), 0, 0)
        record = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, 4) + socket.inet_aton("127.0.0.1")
        return head + question + (record if is_address else b"")
