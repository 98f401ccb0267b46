from __future__ import annotations

import errno
import functools
import os

import pytest
from escape import bpf

from skerry.model.spec import Spec
from skerry.providers.local import Local, seccomp
from skerry.providers.shared import syscalls
from skerry.sandbox.sandbox import AsyncSandbox

ALLOW = 0x7FFF0000
KILL = 0x80000000
X86, ARM = seccomp.ARCHITECTURES["x86_64"], seccomp.ARCHITECTURES["aarch64"]


def refused(code: int) -> int:
    return 0x00050000 | code


def judge(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What the filter answers, by interpreting it as the kernel does."""
    arch = seccomp.ARCHITECTURES[machine] if arch is None else arch
    return bpf.judge(program_of(machine), arch, number, *args)


@functools.cache
def program_of(machine: str) -> bpf.Program:
    return bpf.parse(seccomp.program(machine))


MACHINES = pytest.mark.parametrize("machine", list(seccomp.ARCHITECTURES))
NUMBERS = {
    "x86_64": {
        "read": 0,
        "execve": 59,
        "clone": 56,
        "socket": 41,
        "socketpair": 53,
        "ioctl": 16,
        "mount": 165,
        "bpf": 321,
    },
    "aarch64": {
        "read": 63,
        "execve": 221,
        "clone": 220,
        "socket": 198,
        "socketpair": 199,
        "ioctl": 29,
        "mount": 40,
        "bpf": 280,
    },
}


@MACHINES
def test_the_program_fits_the_kernel_and_every_path_ends_in_an_answer(machine: str) -> None:
    program = program_of(machine)
    assert len(program) <= 4096
    assert program[-1] == (0x06, 0, 0, refused(errno.ENOSYS))  # what nobody knows
    for position, (code, if_true, if_false, _) in enumerate(program):
        if code & 0x07 == 0x05:
            assert position + 1 + max(if_true, if_false) < len(program)
    assert {judge(machine, number) for number in range(1024)} <= {
        ALLOW,
        refused(errno.EPERM),
        refused(errno.ENOSYS),
        refused(errno.EAFNOSUPPORT),
    }


@MACHINES
def test_ordinary_calls_pass_and_dangerous_ones_do_not(machine: str) -> None:
    numbers = NUMBERS[machine]
    assert judge(machine, numbers["read"]) == ALLOW
    assert judge(machine, numbers["execve"]) == ALLOW
    for name in ("mount", "bpf"):
        assert judge(machine, numbers[name]) == refused(errno.EPERM)


@MACHINES
def test_each_call_is_answered_as_the_table_says(machine: str) -> None:
    column = syscalls.MACHINES.index(machine)
    expected = dict.fromkeys(range(syscalls.LAST_KNOWN_CALL + 1), ALLOW)
    for table, code in ((syscalls.REFUSED, errno.EPERM), (syscalls.ABSENT, errno.ENOSYS)):
        expected |= {number: refused(code) for each in table.values() if (number := each[column]) is not None}
    judged = {numbers[column] for numbers in syscalls.JUDGED.values()}
    assert {number: judge(machine, number) for number in expected.keys() - judged} == {
        number: answer for number, answer in expected.items() if number not in judged
    }


@MACHINES
def test_a_foreign_architecture_is_killed(machine: str) -> None:
    assert judge(machine, 0, arch=0x40000003) == KILL
    assert judge(machine, 0, arch=ARM if machine == "x86_64" else X86) == KILL


@MACHINES
def test_a_call_younger_than_the_table_does_not_exist(machine: str) -> None:
    assert {judge(machine, number) for number in range(syscalls.LAST_KNOWN_CALL + 1, 800)} == {refused(errno.ENOSYS)}
    assert judge(machine, 0xFFFFFFFF) == refused(errno.ENOSYS)


def test_the_x32_numbers_do_not_exist() -> None:
    for number in (0, 1, 59, 165, 512, 547):
        assert judge("x86_64", 0x40000000 | number) == refused(errno.ENOSYS)


@MACHINES
@pytest.mark.parametrize("number", [425, 426, 427, 435])
def test_io_uring_and_clone3_do_not_exist_so_that_libraries_fall_back(machine: str, number: int) -> None:
    assert judge(machine, number) == refused(errno.ENOSYS)


@MACHINES
def test_clone_makes_threads_and_processes_but_no_namespaces(machine: str) -> None:
    clone = NUMBERS[machine]["clone"]
    assert judge(machine, clone, 17) == ALLOW
    assert judge(machine, clone, 0x3D0F00) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(machine, clone, flag | 17) == refused(errno.EPERM)


@MACHINES
def test_terminal_injection_is_refused_whatever_the_high_bits_say(machine: str) -> None:
    ioctl = NUMBERS[machine]["ioctl"]
    assert judge(machine, ioctl, 0, 0x5413) == ALLOW
    for request in (0x5412, 0x541C, 0xFFFFFFFF00005412, 0x100005412 & 0x1FFFFFFFF):
        assert judge(machine, ioctl, 0, request) == refused(errno.EPERM)


@MACHINES
def test_only_common_socket_families_can_be_made(machine: str) -> None:
    socket, socketpair = NUMBERS[machine]["socket"], NUMBERS[machine]["socketpair"]
    allowed = {family for family in range(64) if judge(machine, socket, family, 1, 0) == ALLOW}
    assert allowed == {1, 2, 10, 16}
    assert {netlink for netlink in range(32) if judge(machine, socket, 16, 3, netlink) == ALLOW} == {0}
    assert {family for family in range(64) if judge(machine, socketpair, family, 1, 0) == ALLOW} == {1}
    assert judge(machine, socket, (1 << 32) | 40, 1, 0) == refused(errno.EAFNOSUPPORT)


_PROBE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    return errno.errorcode.get(ctypes.get_errno(), "ok") if result == -1 else "ok"
for number, *args in CALLS:
    print(call(number, *args))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers below are those of x86_64")
async def test_the_kernel_judges_as_the_interpreter_does(local: Local) -> None:
    expected = {
        (165, 0, 0, 0, 0, 0): "EPERM",  # mount
        (321, 0, 0, 0): "EPERM",  # bpf
        (323, 1): "EPERM",  # userfaultfd
        (425, 8, 0): "ENOSYS",  # io_uring_setup
        (435, 0, 0): "ENOSYS",  # clone3
        (272, 0x10000000): "EPERM",  # unshare(CLONE_NEWUSER)
        (101, 0, 0, 0, 0): "EPERM",  # ptrace(TRACEME)
        (250, 0, 0): "EPERM",  # keyctl
        (16, 0, 0x100005412, 0): "EPERM",  # ioctl(TIOCSTI) with a high bit
        (41, 40, 1, 0): "EAFNOSUPPORT",  # socket(AF_VSOCK)
        (41, 16, 3, 9): "EAFNOSUPPORT",  # socket(AF_NETLINK, NETLINK_AUDIT)
        (41, 1, 1, 0): "ok",
        (41, 16, 3, 0): "ok",
        (463, 0): "ENOSYS",
        (0x40000000 | 39,): "ENOSYS",  # x32 getpid
        (39,): "ok",
    }
    sandbox = await AsyncSandbox.create(Spec(), local)
    try:
        done = await sandbox.run_code("python", _PROBE.replace("CALLS", repr([list(call) for call in expected])))
    finally:
        await sandbox.destroy()
    assert dict(zip(expected, done.stdout.decode().split(), strict=True)) == expected


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="int 0x80 is an instruction of x86")
async def test_the_32_bit_gate_kills(local: Local) -> None:
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # mov eax, getpid; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_long)(address)())
"""
    sandbox = await AsyncSandbox.create(Spec(), local)
    try:
        done = await sandbox.run_code("python", code)
    finally:
        await sandbox.destroy()
    assert done.signal is not None
    assert done.stdout == b""
