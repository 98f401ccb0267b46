"""Classic BPF as the kernel runs it over a system call, and the filters that it really has."""

from __future__ import annotations

import ctypes
import os
import struct

_PTRACE_ATTACH, _PTRACE_DETACH, _PTRACE_SECCOMP_GET_FILTER = 16, 17, 0x420C
_WAIT_ALL_THREADS = 0x40000000

Program = list[tuple[int, int, int, int]]


def parse(program: bytes) -> Program:
    return list(struct.iter_unpack("=HBBI", program))


def judge(program: Program, arch: int, number: int, *args: int) -> int:
    """What a filter answers."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            position += value
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            position += if_true if holds else if_false


def installed(pid: int) -> Program:
    """The last filter that a process was given, from the kernel; only for root, and only where it can checkpoint."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ptrace(request: int, address: int = 0, data: object = None) -> int:
        result = libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(address), data)
        if result == -1:
            raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of {pid}")
        return int(result)

    ptrace(_PTRACE_ATTACH)
    try:
        os.waitpid(pid, _WAIT_ALL_THREADS)
        size = ptrace(_PTRACE_SECCOMP_GET_FILTER)
        program = ctypes.create_string_buffer(size * 8)
        ptrace(_PTRACE_SECCOMP_GET_FILTER, 0, program)
    finally:
        ptrace(_PTRACE_DETACH)
    return parse(program.raw)
