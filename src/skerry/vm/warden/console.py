"""What the guest and its hypervisor say, kept in two files of limited size."""

from __future__ import annotations

import io
import os

_CHUNK = 64 * 1024


class Console(io.TextIOBase):
    """Reads a pipe into `path`; a full file becomes `path`.1, in place of the one before. Our words go there too."""

    def __init__(self, pipe: int, path: str, limit: int) -> None:
        self._pipe = pipe
        self._path = path
        self._limit = limit
        self.is_over = False
        os.set_blocking(pipe, False)
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def read_some(self) -> bool:
        """False if there is nothing to read now; `is_over` if there will never be."""
        try:
            data = os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return False
        self._keep(data)
        self.is_over = not data
        return bool(data)

    def write(self, text: str) -> int:
        self._keep(text.encode(errors="replace"))
        return len(text)

    def _keep(self, data: bytes) -> None:
        if self._size + len(data) > self._limit:
            os.close(self._fd)
            os.replace(self._path, f"{self._path}.1")
            self._fd = self._open()
            self._size = 0
        try:
            os.write(self._fd, data)
            self._size += len(data)
        except OSError:
            pass  # the disk is full: a machine goes on without a console
