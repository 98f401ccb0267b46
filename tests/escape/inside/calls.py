"""A: calls that reach beyond a box, each by every ABI. B: ways around a filter. C: mounts and namespaces."""

from __future__ import annotations

import posix

from .means import GOT_IN, by_interrupt, by_syscall, each_abi, in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MOUNTS, CGROUP, UTS, IPC, USER, PIDS, NET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
REMOUNT, BIND, SHARED, DETACH = 0x20, 0x1000, 1 << 20, 2
NETLINK, VSOCK, RAW = 16, 40, 3
CHILD = 17
ROOM = bytes(256)


def new(flags: int) -> bytes:
    """The arguments of clone3."""
    return flags.to_bytes(8, "little") + bytes(24) + CHILD.to_bytes(8, "little") + bytes(24)


def each_of(calls: list[Callable[[], str]]) -> Callable[[], str]:
    """The worst of several."""

    def attempt() -> str:
        end = ""
        for call in calls:
            end = in_child(call)
            if end.startswith(GOT_IN):
                break
        return end

    return attempt


def younger(by: Callable[..., str], numbers: range) -> Callable[[], str]:
    """In one child, as they are hundreds."""

    def attempt() -> str:
        ends = {number: by(number, 0, 0, 0, 0, 0, 0) for number in numbers}
        return next((f"{end}: {number}" for number, end in ends.items() if end.startswith(GOT_IN)), ends[numbers[-1]])

    return attempt


def socketcall(family: int, kind: int, protocol: int) -> Callable[[], str]:
    words = b"".join(each.to_bytes(4, "little") for each in (family, kind, protocol))
    return lambda: by_interrupt(102, 1, words)


def mount(kind: bytes, source: bytes = b"none") -> Callable[[], str]:
    return each_abi(165, 21, source, b"/tmp", kind, 0, 0)


def remount(path: bytes) -> Callable[[], str]:
    return each_abi(165, 21, b"none", path, 0, REMOUNT | BIND, 0)


def enter(kind: str) -> Callable[[], str]:
    def attempt() -> str:
        return by_syscall(308, posix.open(f"/proc/1/ns/{kind}", posix.O_RDONLY), 0)

    return attempt


ATTEMPTS: dict[str, Callable[[], str]] = {
    # each harmless even where it would be let in
    "A01": each_abi(321, 357, 0, ROOM, 72),
    "A02": each_abi(321, 357, 5, ROOM, 72),
    "A03": each_abi(323, 374, 0),
    "A04": each_abi(323, 374, 1),
    "A05": each_abi(425, 425, 8, ROOM),
    "A06": each_abi(426, 426, -1, 0, 0, 0, 0, 0),
    "A07": each_abi(427, 427, -1, 0, 0, 0),
    "A08": each_abi(250, 288, 0, -3, 0),
    "A09": each_abi(248, 286, b"user", b"skerry", b"x", 1, -3),
    "A10": each_abi(249, 287, b"user", b"skerry", 0, -3),
    "A11": each_abi(175, 128, 0, 0, b""),
    "A12": each_abi(313, 350, 0, b"", 0),
    "A13": each_abi(176, 129, b"no_such_module", 0),
    "A14": each_abi(246, 283, 0, 0, 0, 0),
    "A15": each_abi(320, 0, -1, -1, 0, 0, 0),
    "A16": each_abi(169, 88, 1, 2, 3, 0),
    "A17": each_abi(103, 103, 3, ROOM, 64),
    "A18": each_abi(103, 103, 5, 0, 0),
    "A19": each_abi(172, 110, 3),
    "A20": each_abi(173, 101, 0, 1, 1),
    "A21": each_abi(154, 123, 0, ROOM, 64),
    "A22": each_abi(170, 74, b"pwned", 5),
    "A23": each_abi(171, 121, b"pwned", 5),
    "A24": each_abi(300, 338, 0, 0),
    "A25": each_abi(301, 339, -1, 1, 1, -100, b"/"),
    "A26": each_abi(212, 253, 0, ROOM, 64),
    "A27": each_abi(278, 316, 1, 0, 0, 0),
    "A28": each_abi(310, 347, 1, ROOM, 1, ROOM, 1, 0),
    "A29": each_abi(311, 348, 1, ROOM, 1, ROOM, 1, 0),
    "A30": each_abi(312, 349, 1, 1, 0, 0, 0),
    "A31": each_abi(438, 438, -1, 0, 0),
    "A32": each_abi(440, 440, -1, ROOM, 1, 4, 0),
    "A33": each_abi(448, 448, -1, 0),
    "A34": each_abi(237, 274, 0, 0, 0, 0, 0, 0),
    "A35": each_abi(238, 276, 0, 0, 0),
    "A36": each_abi(279, 317, 0, 0, 0, 0, 0, 0),
    "A37": each_abi(256, 294, 0, 0, 0, 0),
    "A38": each_abi(227, 264, 0, 0),
    "A39": each_abi(164, 79, 0, 0),
    "A40": each_abi(159, 124, (1).to_bytes(4, "little") + ROOM),
    "A41": each_abi(305, 343, 0, (1).to_bytes(4, "little") + ROOM),
    "A42": each_abi(167, 87, b"/tmp/none", 0),
    "A43": each_abi(168, 115, b"/tmp/none"),
    "A44": each_abi(163, 51, b"/tmp/none"),
    "A45": each_abi(298, 336, ROOM, 0, -1, -1, 0),
    "A46": each_abi(101, 26, 0, 0, 0, 0),
    "A47": each_abi(304, 342, -100, ROOM, 0),
    "A48": each_abi(303, 341, -100, b"/", ROOM, ROOM, 0),
    "A49": each_abi(179, 131, 0x80000700, b"/dev/sda", 0, ROOM),
    "A50": each_abi(443, 443, -1, 0, 0, 0),
    "A51": each_abi(447, 447, 0),
    "A52": each_abi(460, 460, 100, ROOM, 32, 0),
    "A53": each_abi(153, 111),
    "A54": each_abi(134, 86, b"/tmp/none"),
    "A55": each_abi(16, 54, 0, 0x5412, b"x"),
    "A56": each_abi(16, 54, 0, 0x541C, b"\x02"),
    "A57": each_abi(435, 435, new(USER), 64),
    "A58": each_abi(56, 120, USER | CHILD, 0, 0, 0, 0),
    "A59": each_abi(457, 457, ROOM, ROOM, 64, 0),
    "A60": each_abi(458, 458, ROOM, ROOM, 4, 0),
    "B01": lambda: by_interrupt(20),
    "B02": lambda: by_syscall(0x40000000 | 39),
    "B03": lambda: by_syscall(0x40000000 | 521, 0, 0, 0, 0),
    "B04": socketcall(VSOCK, 1, 0),
    "B05": socketcall(NETLINK, RAW, 12),
    "B06": socketcall(NETLINK, RAW, 9),
    "B07": socketcall(17, RAW, 0),
    "B08": lambda: by_interrupt(117, 23, 0, 4096, 0o1600),
    "B09": lambda: by_interrupt(90, b"".join(each.to_bytes(4, "little") for each in (0, 4096, 3, 0x22, 0xFFFFFFFF, 0))),
    "B10": each_of([lambda: by_interrupt(113, ROOM), lambda: by_interrupt(166, 0, ROOM)]),
    "B11": lambda: by_interrupt(25, 0),
    "B12": lambda: by_interrupt(22, b"/proc"),
    "B13": younger(by_syscall, range(463, 700)),
    "B14": younger(by_interrupt, range(463, 700)),
    "B15": younger(by_syscall, range(1 << 30 | 512, 1 << 30 | 548)),
    "B16": lambda: by_syscall(0x80000000 | 165, b"none", b"/tmp", b"tmpfs", 0, 0),
    "B17": lambda: by_syscall(16, 0, 0x100005412, b"x"),
    "B18": lambda: by_syscall(41, 1 << 32 | VSOCK, 1, 0),
    "B19": each_of([each_abi(334 + n, 0, 0) for n in (1, 30, 80)]),
    "B20": each_of([each_abi(number, 0, 0) for number in (156, 174, 177, 178, 180, 181, 182, 183, 184, 185, 214, 236)]),
    "C01": mount(b"tmpfs"),
    "C02": mount(b"proc"),
    "C03": mount(b"sysfs"),
    "C04": each_of([mount(b"cgroup"), mount(b"cgroup2")]),
    "C05": each_of([mount(b"devpts"), mount(b"mqueue"), mount(b"binfmt_misc")]),
    "C06": each_of([mount(b"debugfs"), mount(b"tracefs"), mount(b"securityfs"), mount(b"bpf")]),
    "C07": mount(b"overlay"),
    "C08": each_of([mount(b"ext4", disk) for disk in (b"/dev/sda", b"/dev/vda", b"/dev/nvme0n1", b"/dev/loop0")]),
    "C09": each_abi(165, 21, b"/proc/1/root", b"/tmp", 0, BIND, 0),
    "C10": remount(b"/"),
    "C11": remount(b"/usr"),
    "C12": remount(b"/proc/sys"),
    "C13": remount(b"/dev"),
    "C14": remount(b"/sys"),
    "C15": each_abi(165, 21, b"none", b"/", 0, SHARED, 0),
    "C16": each_abi(166, 52, b"/proc/cmdline", DETACH),
    "C17": each_abi(166, 52, b"/tmp", DETACH),
    "C18": each_of([each_abi(430, 430, b"tmpfs", 0), each_abi(433, 433, -100, b"/", 0)]),
    "C19": each_of([each_abi(431, 431, -1, 0, 0, 0, 0), each_abi(432, 432, -1, 0, 0)]),
    "C20": each_abi(428, 428, -100, b"/", 1),
    "C21": each_abi(429, 429, -100, b"/tmp", -100, b"/home", 0),
    "C22": each_abi(442, 442, -100, b"/", 0, bytes(32), 32),
    "C23": each_abi(155, 217, b"/tmp", b"/tmp"),
    "C24": each_abi(161, 61, b"/tmp"),
    "C25": each_abi(272, 310, USER),
    "C26": each_abi(272, 310, MOUNTS),
    "C27": each_abi(272, 310, NET),
    "C28": each_abi(272, 310, PIDS),
    "C29": each_of([each_abi(272, 310, kind) for kind in (IPC, UTS, CGROUP)]),
    "C30": each_of([enter(kind) for kind in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup")]),
}
