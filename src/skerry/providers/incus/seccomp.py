"""The system calls that a box may not make, in the words of Incus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from skerry.providers import syscalls

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LAST_FAMILY = 45
_WHOLE = 0xFFFFFFFF


@cache
def deny_list() -> str:
    """One rule a line: a call, what is answered, and for which arguments."""
    return "\n".join(_rules())


def _rules() -> Iterator[str]:
    for name in syscalls.REFUSED:
        yield f"{name} errno {_EPERM}"
    for name in syscalls.ABSENT:
        yield f"{name} errno {_ENOSYS}"
    for bit in (1 << number for number in range(32)):
        if syscalls.CLONE_NEW_ANY & bit:
            yield f"clone errno {_EPERM} [0,{bit},SCMP_CMP_MASKED_EQ,{bit}]"
    for command in syscalls.TERMINAL_INJECTION:
        yield f"ioctl errno {_EPERM} [1,{command},SCMP_CMP_MASKED_EQ,{_WHOLE}]"
    for family in range(_LAST_FAMILY + 1):
        if family not in (*syscalls.SOCKET_FAMILIES, syscalls.AF_NETLINK):
            yield f"socket errno {_EAFNOSUPPORT} [0,{family},SCMP_CMP_EQ]"
    yield f"socket errno {_EAFNOSUPPORT} [0,{_LAST_FAMILY},SCMP_CMP_GT]"
    route = f"[2,{syscalls.NETLINK_ROUTE},SCMP_CMP_NE]"
    yield f"socket errno {_EAFNOSUPPORT} [0,{syscalls.AF_NETLINK},SCMP_CMP_EQ]{route}"
    yield f"socketpair errno {_EAFNOSUPPORT} [0,{syscalls.AF_UNIX},SCMP_CMP_NE]"
