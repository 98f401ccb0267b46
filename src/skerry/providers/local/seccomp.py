"""The system calls that a box may make, as a classic BPF program built with nothing but `struct`.

Refused is what reaches beyond the box or widens the kernel's attack surface: mounts, namespaces, modules, keys, bpf,
tracing, clocks, NUMA placement, io_uring (it makes sockets behind a socket filter's back). A number that is younger
than this table is answered ENOSYS, so that a new kernel never opens what nobody has judged yet.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine names, as `os.uname` spells them, and the kernel's AUDIT_ARCH of each."""

LAST_KNOWN_CALL = 462

_X32_BIT = 0x40000000
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16

_CLONE_NEW_ANY = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0

# name: (x86_64, aarch64); None where the architecture has no such call
_REFUSED: Mapping[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "afs_syscall": (183, None),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "epoll_ctl_old": (214, None),
    "epoll_wait_old": (215, None),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "get_mempolicy": (239, 236),
    "getpmsg": (181, None),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "lookup_dcookie": (212, 18),
    "lsm_set_self_attr": (460, 460),
    "mbind": (237, 235),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "putpmsg": (182, None),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "security": (185, None),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "statmount": (457, 457),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "tuxcall": (184, None),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
    "vserver": (236, None),
}

# answered ENOSYS: libc, libuv and tokio then fall back to the older calls, whose arguments a filter can see
_ABSENT: Mapping[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

_JUDGED: Mapping[str, tuple[int, int]] = {
    "clone": (56, 220),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

Instruction = tuple[int, int, int, int]


def program(machine: str) -> bytes:
    """The filter for one of `ARCHITECTURES`, in the form that `bwrap --seccomp` reads."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine))


def _instructions(machine: str) -> Iterator[Instruction]:
    column = list(ARCHITECTURES).index(machine)
    yield _load(_ARCH_OFFSET)
    yield _JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield _return(_KILL_PROCESS)
    yield _load(_NUMBER_OFFSET)
    if machine == "x86_64":
        yield from _when(_JUMP_AT_LEAST, _X32_BIT, _refuse(errno.ENOSYS))
    yield from _when(_JUMP_GREATER, LAST_KNOWN_CALL, _refuse(errno.ENOSYS))
    for table, code in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                yield from _when(_JUMP_EQUAL, number, _refuse(code))
    judges = {"clone": _judge_clone, "ioctl": _judge_ioctl, "socket": _judge_socket, "socketpair": _judge_socketpair}
    for name, judge in judges.items():
        body = list(judge())
        yield _JUMP_EQUAL, 0, len(body), _JUDGED[name][column]
        yield from body
    yield _return(_ALLOW)


def _judge_clone() -> Iterator[Instruction]:
    yield _load_argument(0)
    yield from _when(_JUMP_ANY_BIT, _CLONE_NEW_ANY, _refuse(errno.EPERM))
    yield _return(_ALLOW)


def _judge_ioctl() -> Iterator[Instruction]:
    yield _load_argument(1)
    yield from _when(_JUMP_EQUAL, _TIOCSTI, _refuse(errno.EPERM))
    yield from _when(_JUMP_EQUAL, _TIOCLINUX, _refuse(errno.EPERM))
    yield _return(_ALLOW)


def _judge_socket() -> Iterator[Instruction]:
    yield _load_argument(0)
    for family in (_AF_UNIX, _AF_INET, _AF_INET6):
        yield from _when(_JUMP_EQUAL, family, _return(_ALLOW))
    yield _JUMP_EQUAL, 0, 3, _AF_NETLINK
    yield _load_argument(2)
    yield from _when(_JUMP_EQUAL, _NETLINK_ROUTE, _return(_ALLOW))
    yield _refuse(errno.EAFNOSUPPORT)


def _judge_socketpair() -> Iterator[Instruction]:
    yield _load_argument(0)
    yield from _when(_JUMP_EQUAL, _AF_UNIX, _return(_ALLOW))
    yield _refuse(errno.EAFNOSUPPORT)


def _load(offset: int) -> Instruction:
    return _LOAD, 0, 0, offset


def _load_argument(index: int) -> Instruction:
    """The low 32 bits: the kernel drops the rest of an int, so a compare of 64 could be evaded (CVE-2019-10063)."""
    return _load(_ARGS_OFFSET + 8 * index)


def _when(jump: int, value: int, then: Instruction) -> tuple[Instruction, Instruction]:
    return (jump, 0, 1, value), then


def _return(action: int) -> Instruction:
    return _RETURN, 0, 0, action


def _refuse(code: int) -> Instruction:
    return _return(_ERRNO | code)
