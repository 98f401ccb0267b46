"""Relay between stdio and the agent's socket (a path, or @NAME in the abstract space) until either side ends. `relay.py
SOCKET [WAIT_S]`: an agent that is just starting is waited for that long."""

from __future__ import annotations

import _thread
import os
import select
import sys
import time
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

CHUNK = 1 << 18
STDIN, STDOUT = 0, 1


def copy_up(sock: int) -> None:
    """Copy stdin to the agent. The end of stdin ends the process, whatever the other thread waits for."""
    while data := read_some(STDIN):
        if not write_all(sock, data):
            return  # the agent has closed: the other thread delivers its last words, and ends
    os._exit(0)


def copy_down(sock: int) -> None:
    """Copy the agent's words to stdout, until it closes or nobody reads any more."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(STDOUT, 0)  # errors only: not every engine closes stdin when the host is gone
    while all(fd != STDOUT for fd, _ in poll.poll()):
        data = read_some(sock)
        if not data or not write_all(STDOUT, data):
            return


def read_some(fd: int) -> bytes:
    """Read some bytes; none at the end, which a terminal that hung up tells by an error."""
    try:
        return os.read(fd, CHUNK)
    except OSError:
        return b""


def write_all(fd: int, data: bytes) -> bool:
    """Write; False when nobody reads there any more."""
    view = memoryview(data)
    try:
        while len(view):
            view = view[os.write(fd, view) :]
    except OSError:
        return False
    return True


def connect(address: str, wait_s: float) -> socket:
    """Connect a socket once somebody listens. Raises OSError if nobody does in time."""
    end = time.monotonic() + wait_s
    delay_s = 0.001
    while True:
        sock = socket(AF_UNIX, SOCK_STREAM)
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            return sock
        except OSError:
            sock.close()
            if time.monotonic() >= end:
                raise
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, 0.02)


def is_agent(sock: socket) -> bool:
    """Whether the first process of the box listens there, or we are in no box: in one, our parent is outside. Some
    kernels name ourselves in the place of who listens."""
    listener = int.from_bytes(sock.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[:4], sys.byteorder)
    return os.getppid() != 0 or listener in (1, os.getpid())


def main() -> int:
    if len(sys.argv) not in (2, 3):
        sys.stderr.write("usage: relay.py PATH|@NAME [WAIT_S]\n")
        return 2
    package = type(sys)("skerry_agent")
    package.__path__ = [__file__.rpartition("/")[0]]
    sys.modules["skerry_agent"] = package
    from skerry_agent import users  # type: ignore[import-not-found]

    users.deny_tracing()
    address = sys.argv[1]
    try:
        sock = connect(address, float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    except OSError as error:
        sys.stderr.write(f"cannot reach the agent at {address}: {error.strerror}\n")
        return 1
    if not is_agent(sock):
        sys.stderr.write(f"another process of the box listens in the place of its agent at {address}\n")
        return 1
    for fd in (STDIN, STDOUT):
        os.set_blocking(fd, True)
    _thread.start_new_thread(copy_up, (sock.fileno(),))
    copy_down(sock.fileno())
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the other thread may be in a read that never ends
