"""What the built-in Python kernel says to its context: events, and all that cells write, in their order."""

from __future__ import annotations

import _thread
import io
import json
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HIGH = 700  # code that closes all descriptors up to some hundreds does not mean ours
_BATCH_S = 0.03
_AT_ONCE = 20
"""Lines in that time that are sent as they are written; what a program writes that they start comes after them."""
_MAX_BATCH = 1 << 15
_TAKEN_S = 0.00005
_MAX_PIECE = 1 << 18
MAIN = _thread.get_ident()


class Interrupts:
    """SIGINT: a KeyboardInterrupt for the code of a cell, held back while we speak, and nothing in between."""

    def __init__(self) -> None:
        self.is_running = False
        self._shields = 0
        self._is_pending = False

    def __call__(self, _number: int, _frame: Any) -> None:
        if self._shields:
            self._is_pending = True
        elif self.is_running:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._shields += 1

    def __exit__(self, *_: object) -> None:
        self._shields -= 1
        if not self._shields and self._is_pending:
            self._is_pending = False
            if self.is_running and _thread.get_ident() == MAIN:
                raise KeyboardInterrupt


interrupts = Interrupts()


class Wire:
    """The descriptor to our context, which no program that a cell starts inherits."""

    def __init__(self, fd: int) -> None:
        import fcntl

        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        except OSError:  # fewer descriptors are allowed
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(fd)
        self.socket = socket.socket(fileno=high)
        self.lock = _thread.RLock()
        self.is_ours = True
        """Not so in a process that code of a cell forked."""
        self._received = b""

    def send(self, event: str, **fields: Any) -> None:
        if not self.is_ours:
            return
        fields["event"] = event
        line = json.dumps(fields, default=str).encode() + b"\n"
        with interrupts, self.lock:
            self.socket.sendall(line)

    def wait_until_taken(self) -> None:
        """Wait a little until our context has taken what was sent: what others write comes to it in another way."""
        import fcntl
        import termios

        for _ in range(40):
            if not int.from_bytes(fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                return
            time.sleep(_TAKEN_S)

    def receive(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = self.socket.recv(1 << 18)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Forget the wire, in a forked process."""
        if self.is_ours:
            self.is_ours = False
            self.lock = _thread.RLock()
            self.socket.close()


class Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of the cells: in order with all that is displayed, and sent in small batches."""

    errors = "backslashreplace"
    encoding = "utf-8"

    def __init__(self, wire: Wire, name: str, fd: int) -> None:
        super().__init__()
        self.name = name
        self._wire = wire
        self._fd = fd
        self._parts: list[str] = []
        self._size = 0
        self._window = 0.0
        self._flushes = 0
        self._is_timed = False
        self.buffer = Bytes(self)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("write() argument must be str, not " + type(text).__name__)
        if not self._wire.is_ours:
            os.write(self._fd, text.encode("utf-8", self.errors))
            return len(text)
        with self._wire.lock:
            self._parts.append(text)
            self._size += len(text)
            now = time.monotonic()
            if now - self._window >= _BATCH_S:
                self._window, self._flushes = now, 0
            is_line = text.endswith("\n") and self._flushes < _AT_ONCE
            if is_line or self._size >= _MAX_BATCH:
                self.flush()
            elif not self._is_timed:
                self._is_timed = True
                _thread.start_new_thread(self._flush_later, ())
        return len(text)

    def flush(self) -> None:
        with self._wire.lock:
            if self._parts and self._wire.is_ours:
                text = "".join(self._parts).encode("utf-8", self.errors).decode()
                self._parts = []
                self._size = 0
                self._flushes += 1
                for at in range(0, len(text), _MAX_PIECE):
                    self._wire.send(self.name, text=text[at : at + _MAX_PIECE])
                if self._flushes <= _AT_ONCE:
                    self._wire.wait_until_taken()

    def _flush_later(self) -> None:
        time.sleep(_BATCH_S)
        self._is_timed = False
        try:
            self.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Stay open: a cell that closes its output ends only that of its own."""
        self.flush()

    def forget(self) -> None:
        self._parts = []


class Bytes(io.RawIOBase):
    """`sys.stdout.buffer`."""

    def __init__(self, stream: Stream) -> None:
        import codecs

        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def flush(self) -> None:
        if not self.closed:
            self._stream.flush()

    def close(self) -> None:
        self.flush()
