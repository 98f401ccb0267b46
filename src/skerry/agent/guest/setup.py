"""Set-up of a box by its root: network cards, by the oldest calls there are, and home folders."""

from __future__ import annotations

import _socket
import posix
import sys
from fcntl import ioctl

from .loop import ignore_errors

_ADD_ROUTE, _SET_FLAGS, _SET_ADDRESS, _SET_MASK = 0x890B, 0x8914, 0x8916, 0x891C
_UP_AND_RUNNING = 0x41
_UP_THROUGH_GATEWAY = 3
_LOOPBACK = "lo"
_FIRST_FREE_PORT = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
_READ_ONLY = 30
_NOT_A_FOLDER = 20


def raise_loopback() -> None:
    _ask(_SET_FLAGS, _RAISED)


def open_low_ports() -> None:
    """Let everybody listen on ports that are root's otherwise. Raises OSError."""
    fd = posix.open(_FIRST_FREE_PORT, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, b"0")
    finally:
        posix.close(fd)


def set_up_network(address: str, gateway: str) -> None:
    """Give the one network card of a machine its address and its gateway. Raises OSError."""
    card = next((name for name in sorted(posix.listdir("/sys/class/net")) if name != _LOOPBACK), None)
    if card is None:
        raise FileNotFoundError(2, "the machine has no network card")
    number, _, length = address.partition("/")
    mask = (0xFFFFFFFF << (32 - int(length or 32)) & 0xFFFFFFFF).to_bytes(4, "big")
    _ask(_SET_ADDRESS, _request(card, _inet(_socket.inet_aton(number))))
    _ask(_SET_MASK, _request(card, _inet(mask)))
    _ask(_SET_FLAGS, _request(card, _UP_AND_RUNNING.to_bytes(2, sys.byteorder)))
    anywhere = _inet(bytes(4))
    route = bytes(8) + anywhere + _inet(_socket.inet_aton(gateway)) + anywhere
    _ask(_ADD_ROUTE, (route + _UP_THROUGH_GATEWAY.to_bytes(2, sys.byteorder)).ljust(120, b"\0"))


def _inet(address: bytes) -> bytes:
    return _socket.AF_INET.to_bytes(2, sys.byteorder) + bytes(2) + address + bytes(8)


def _request(card: str, value: bytes) -> bytes:
    return card.encode().ljust(16, b"\0") + value.ljust(24, b"\0")


def _ask(number: int, request: bytes) -> None:
    asking = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        ioctl(asking.fileno(), number, request)
    finally:
        asking.close()


_RAISED = _request(_LOOPBACK, _UP_AND_RUNNING.to_bytes(2, sys.byteorder))


def make_folder(path: str) -> None:
    """Make a folder and its parents, unless they are there."""
    at = ""
    for part in path.strip("/").split("/"):
        at += "/" + part
        ignore_errors(posix.mkdir, at, 0o755)


def own_folder(path: str, mode: int, uid: int, gid: int) -> None:
    """Make a folder the user's, but leave a read-only one as it is. Raises NotADirectoryError, also for a link."""
    make_folder(path)
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC)
    except OSError as error:
        raise NotADirectoryError(_NOT_A_FOLDER, f"of the image is no folder: {error.strerror}", path) from None
    try:
        posix.chown(fd, uid, gid)
        posix.chmod(fd, mode)
    except OSError as error:
        if error.errno != _READ_ONLY:
            raise
    finally:
        posix.close(fd)
