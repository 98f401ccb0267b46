"""A terminal with the program on it, read and typed at as a person would."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from typing import Any

PROGRAM = (sys.executable, "-c", "from skerry.cli import main; main()")
INSTALLED = (sys.executable, "-c", "from skerry.start import main; main()")
"""As `skerry` is installed: some commands are run by a fork of a process that others share."""


class Screen:
    """A terminal with the program in its foreground; we are the user in front of it."""

    def __init__(self, *args: str, program: Sequence[str] = ()) -> None:
        self.keyboard, self._line = pty.openpty()
        self.resize(30, 100)
        self.mode_before = self.mode()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *(program or PROGRAM), *args], stdin=self._line, stdout=self._line, stderr=self._line
        )
        self.seen = b""

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 20) -> None:
        """Read until the text is there, and take all up to it away."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; there is {self.seen!r}"
            self._look(left)
        self.seen = self.seen.partition(text.encode())[2]

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def mode(self) -> list[Any]:
        return termios.tcgetattr(self._line)

    def is_raw(self) -> bool:
        return not self.mode()[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def wait(self) -> int:
        """The exit code; what the program still says is read meanwhile, or it could not end."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; there is {self.seen!r}"
            self._look(0.02)
        while self._look(0):
            pass
        return self.process.returncode

    def _look(self, timeout_s: float) -> bool:
        if not select.select([self.keyboard], [], [], timeout_s)[0]:
            return False
        data = os.read(self.keyboard, 65536)
        self.seen += data
        return bool(data)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.wait()
        finally:
            self.process.kill()
            self.process.wait()
        os.close(self.keyboard)
        os.close(self._line)
