"""The user's terminal: its size, and raw mode that always ends."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from skerry.config import variable

STDIN = 0


@contextmanager
def raw_mode() -> Iterator[None]:
    """Every key goes to the box, Ctrl-C included; how the terminal was before comes back at the end."""
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN, termios.TCSANOW)  # what was typed ahead is kept
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(STDIN, termios.TCSANOW, before)


def size() -> tuple[int, int]:
    """Rows and columns."""
    columns, rows = os.get_terminal_size(STDIN)
    return rows or 24, columns or 80


def environment() -> dict[str, str]:
    """What tells a program in the box which terminal it writes to."""
    found = {name: variable(name) for name in ("TERM", "COLORTERM")}
    return {name: value for name, value in found.items() if value}
