"""The box's network, by the oldest calls there are: they need no program in the image."""

from __future__ import annotations

import _socket
import sys
from fcntl import ioctl

_ADD_ROUTE, _SET_FLAGS, _SET_ADDRESS, _SET_MASK = 0x890B, 0x8914, 0x8916, 0x891C
_UP_AND_RUNNING = 0x41
_UP_THROUGH_GATEWAY = 3
_LOOPBACK = "lo"


def raise_loopback() -> None:
    _ask(_SET_FLAGS, _request(_LOOPBACK, _UP_AND_RUNNING.to_bytes(2, sys.byteorder)))


def set_up(address: str, gateway: str) -> None:
    """Give the one network card of a machine its address, and the way out."""
    import posix

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
