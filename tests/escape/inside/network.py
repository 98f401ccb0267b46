"""G: the network, sockets of the host, and families that reach past it."""

from __future__ import annotations

import _socket
import errno

from .means import ABSTRACT, GOT_IN, PORT, each_abi, ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


STREAM, DATAGRAM, RAW, PACKETS = 1, 2, 3, 5


def connect(family: int, kind: int, address: tuple[object, ...] | str) -> Callable[[], object]:
    def action() -> None:
        made = _socket.socket(family, kind)
        made.settimeout(1)
        made.connect(address)

    return action


def reach(address: str) -> Callable[[], object]:
    family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
    return connect(family, _socket.SOCK_STREAM, (address, PORT))


def sockets(*kinds: tuple[int, int, int]) -> Callable[[], str]:
    """The worst of these: family, type, protocol."""

    def attempt() -> str:
        for family, kind, protocol in kinds:
            end = ended(lambda: _socket.socket(family, kind, protocol).close())  # noqa: B023
            if end.startswith(GOT_IN):
                return f"{end} ({family}, {kind}, {protocol})"
        return end

    return attempt


def route(kind: int, body: bytes) -> Callable[[], str]:
    """What the kernel answers to a wish of rtnetlink."""

    def attempt() -> str:
        made = _socket.socket(16, 3, 0)
        made.settimeout(2)
        wish = (16 + len(body)).to_bytes(4, "little") + kind.to_bytes(2, "little") + (0x605).to_bytes(2, "little")
        made.send(wish + bytes(8) + body)
        number = -int.from_bytes(made.recv(4096)[16:20], "little", signed=True)
        return errno.errorcode.get(number, "?") if number else GOT_IN

    return attempt


def option(family: int, kind: int, level: int, name: int, value: bytes | int) -> Callable[[], object]:
    return lambda: _socket.socket(family, kind).setsockopt(level, name, value)


def every_kind(family: int) -> Callable[[], str]:
    return sockets(*((family, kind, 0) for kind in (STREAM, DATAGRAM, RAW, PACKETS)))


def family_call(family: int, kind: int, protocol: int) -> Callable[[], str]:
    return each_abi(41, 359, family, kind, protocol)


def listen_on(family: int, address: tuple[object, ...]) -> Callable[[], object]:
    return lambda: _socket.socket(family, STREAM).bind(address)


def configure(request: int) -> Callable[[], object]:
    """The address or the state of a card."""

    def action() -> None:
        import fcntl

        wish = b"lo".ljust(16, b"\0") + b"\x02\0\0\0\x0a\x09\x08\x07" + bytes(16)
        fcntl.ioctl(_socket.socket(2, DATAGRAM).fileno(), request, wish)

    return action


LINK = bytes(16) + b"\x0a\0\x03\0dumb0\0\0\0" + b"\x10\0\x12\0" + b"\x0a\0\x01\0dummy\0\0\0"
ROUTE = b"\x02\0\0\0\xfe\x03\0\x01" + bytes(4) + b"\x08\0\x04\0\x01\0\0\0"

ATTEMPTS: dict[str, Callable[[], object]] = {
    "G01": connect(_socket.AF_UNIX, STREAM, "\0" + ABSTRACT),
    "G02": reach("127.0.0.1"),
    "G03": reach("::1"),
    "G04": reach("::ffff:127.0.0.1"),
    "G05": reach("0.0.0.0"),
    "G06": reach("169.254.169.254"),
    "G07": reach("10.0.2.2"),
    "G08": reach("172.17.0.1"),
    "G09": reach("10.0.0.1"),
    "G10": reach("192.168.0.1"),
    "G11": reach("192.0.2.1"),
    "G12": reach("fd00:ec2::254"),
    "G13": family_call(40, STREAM, 0),
    "G14": connect(40, STREAM, (2, PORT)),
    "G15": listen_on(40, (0xFFFFFFFF, 7777)),
    "G16": family_call(16, RAW, 12),
    "G17": family_call(16, RAW, 9),
    "G18": family_call(16, RAW, 15),
    "G19": family_call(16, RAW, 16),
    "G20": family_call(16, RAW, 6),
    "G21": family_call(16, RAW, 11),
    "G22": sockets(*((16, RAW, protocol) for protocol in (1, 2, 4, 5, 7, 8, 10, 13, 14, 18, 19, 20, 21, 22))),
    "G23": each_abi(53, 360, 40, STREAM, 0, bytes(8)),
    "G24": every_kind(17),
    "G25": sockets((2, RAW, 1), (2, RAW, 255), (10, RAW, 58)),
    "G26": sockets((2, DATAGRAM, 1), (10, DATAGRAM, 58)),
    "G27": every_kind(38),
    "G28": every_kind(44),
    "G29": every_kind(31),
    "G30": every_kind(30),
    "G31": every_kind(21),
    "G32": every_kind(29),
    "G33": every_kind(15),
    "G34": sockets((2, PACKETS, 132), (2, STREAM, 132), (2, 6, 33)),
    "G35": sockets(*((family, kind, 0) for family in (3, 4, 5, 6, 8, 9, 11, 18, 19, 20, 22, 23) for kind in (1, 2, 3))),
    "G36": sockets(*((family, kind, 0) for family in (24, 26, 32, 33, 34, 35, 36, 37) for kind in (1, 2, 3, 5))),
    "G37": sockets(*((family, kind, 0) for family in (39, 41, 42, 43, 45, 46, 63) for kind in (1, 2, 3, 5))),
    "G38": route(16, LINK),
    "G39": route(24, ROUTE),
    "G40": configure(0x8916),
    "G41": configure(0x8914),
    "G42": option(2, STREAM, 1, 36, 1),
    "G43": option(2, STREAM, 0, 19, 1),
    "G44": option(2, STREAM, 6, 19, 1),
    "G45": option(2, RAW, 0, 64, bytes(1024)),
    "G46": option(2, STREAM, 6, 31, b"espintcp"),
    "G47": listen_on(2, ("0.0.0.0", 80)),
}
