"""The filter of `syscalls` in the words of those who install it: container engines, and Incus.

It is an allow-list whose default is ENOSYS: what is younger than the list, what libseccomp does not know by name, and
every call of another ABI that the kernel takes (ia32's `int 0x80` with its multiplexers, x32) does not exist.
"""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from skerry.providers.shared import syscalls

_LOW_BITS = 0xFFFFFFFF
_ALLOW, _REFUSE = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"

Condition = dict[str, int | str]
Rule = dict[str, Any]


@functools.cache
def lxc_policy() -> str:
    """The value of `raw.seccomp`. It takes the place of all that Incus would write: what is in `security.syscalls.deny`
    liblxc leaves out for other ABIs, where `socket` is a number of a multiplexer."""
    lines = ["2", f"allowlist errno {errno.ENOSYS}", "[all]"]
    for rule in _rules():
        action = "allow" if rule["action"] == _ALLOW else f"errno {rule['errnoRet']}"
        bounds = "".join(f"[{c['index']},{c['valueTwo']},{c['op']},{c['value']}]" for c in rule["args"])
        if rule.get("errnoRet") != errno.ENOSYS:  # libseccomp takes no rule that says what its default says
            lines += [f"{name} {action} {bounds}".rstrip() for name in rule["names"]]
    return "\n".join(lines) + "\n"


@functools.cache
def oci_profile() -> str:
    """The value of a security option `seccomp=`, for every machine that the table knows."""
    machines = [f"SCMP_ARCH_{machine.upper()}" for machine in syscalls.MACHINES]
    return json.dumps(
        {
            "defaultAction": _REFUSE,
            "defaultErrnoRet": errno.ENOSYS,
            "archMap": [{"architecture": machine, "subArchitectures": []} for machine in machines],
            "syscalls": list(_rules()),
        },
        separators=(",", ":"),
    )


def _rules() -> Iterator[Rule]:
    yield _allow(syscalls.ALLOWED)
    yield _refuse(syscalls.REFUSED, errno.EPERM)
    yield _refuse(syscalls.ABSENT, errno.ENOSYS)
    # An engine's rule cannot say "unless": each judged call has rules for both answers, which never overlap.
    yield _allow(["clone"], _bits(0, syscalls.CLONE_NEW_ANY, 0))
    for bit in (1 << position for position in range(32)):
        if bit & syscalls.CLONE_NEW_ANY:
            yield _refuse(["clone"], errno.EPERM, _bits(0, bit, bit))
    for request in syscalls.TERMINAL_INJECTION:
        yield _refuse(["ioctl"], errno.EPERM, _is(1, request))
    for other in _is_none_of(1, *syscalls.TERMINAL_INJECTION):
        yield _allow(["ioctl"], other)
    for family in syscalls.SOCKET_FAMILIES:
        yield _allow(["socket"], _is(0, family))
    netlink = _is(0, syscalls.AF_NETLINK)
    yield _allow(["socket"], netlink, _is(2, syscalls.NETLINK_ROUTE))
    for other in _is_none_of(2, syscalls.NETLINK_ROUTE):
        yield _refuse(["socket"], errno.EAFNOSUPPORT, netlink, other)
    for other in _is_none_of(0, *syscalls.SOCKET_FAMILIES, syscalls.AF_NETLINK):
        yield _refuse(["socket"], errno.EAFNOSUPPORT, other)
    yield _allow(["socketpair"], _is(0, syscalls.AF_UNIX))
    for other in _is_none_of(0, syscalls.AF_UNIX):
        yield _refuse(["socketpair"], errno.EAFNOSUPPORT, other)


def _allow(names: Iterable[str], *conditions: Condition) -> Rule:
    return {"names": sorted(names), "action": _ALLOW, "args": conditions}


def _refuse(names: Iterable[str], code: int, *conditions: Condition) -> Rule:
    return {"names": sorted(names), "action": _REFUSE, "errnoRet": code, "args": conditions}


def _bits(index: int, mask: int, value: int) -> Condition:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _is(index: int, value: int) -> Condition:
    """The low 32 bits: the kernel drops the rest of an int, so a compare of 64 could be evaded (CVE-2019-10063)."""
    return _bits(index, _LOW_BITS, value)


def _is_none_of(index: int, *values: int, bit: int = 31, start: int = 0) -> Iterator[Condition]:
    """Conditions of which exactly one holds for any other value: by the first bit where it leaves all of these."""
    mask = _LOW_BITS >> bit << bit
    for branch in (start, start | 1 << bit):
        within = [value for value in values if value & mask == branch]
        if within:
            if bit:
                yield from _is_none_of(index, *within, bit=bit - 1, start=branch)
        else:
            yield _bits(index, mask, branch)
