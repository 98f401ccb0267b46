"""Tries to get out of the box that it runs in, and tells how each attempt ended. Never run it anywhere else."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

if os.environ.get("SKERRY_PROBE") != "inside" or not os.path.isdir("/.skerry/agent") or os.getppid() != 1:
    sys.exit("refused: this probe attacks the machine that it runs on, and this is not the inside of a box")

libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *args: int | bytes | None) -> str:
    """`got in`, or the name of the error."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in args]
    result = libc.syscall(ctypes.c_long(number), *words)
    return errno.errorcode.get(ctypes.get_errno(), "?") if result == -1 else "got in"


def attempt(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "got in"


def write(path: str, text: str = "x") -> Callable[[], object]:
    def action() -> None:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    return action


def make(path: str) -> Callable[[], object]:
    return lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def read(path: str) -> Callable[[], object]:
    def action() -> None:
        if os.path.isdir(path):
            os.listdir(path)
            return
        with open(path, "rb") as file:
            if not file.read(1):
                raise FileNotFoundError(errno.ENOENT, "empty", path)

    return action


def in_child(action: Callable[[], str]) -> str:
    """For what changes or ends the process that does it."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if action() == "got in" else 1)
    return "got in" if os.waitpid(pid, 0)[1] == 0 else "refused"


def kernel() -> dict[str, str]:
    """Calls by their x86_64 numbers, each harmless even where it would be allowed."""
    results = {
        "A1 bpf": call(321, 0, None, 0),
        "A2 userfaultfd": call(323, 0),
        "A2 userfaultfd user mode": call(323, 1),
        "A4 io_uring_setup": call(425, 8, None),
        "A5 keyctl": call(250, 0, -3, 0),
        "A5 add_key": call(248, b"user", b"skerry", b"x", 1, -3),
        "A7 init_module": call(175, None, 0, b""),
        "A7 finit_module": call(313, 0, b"", 0),
        "A7 delete_module": call(176, b"no_such_module", 0),
        "A8 kexec_load": call(246, 0, 0, None, 0),
        "A8 reboot with bad magic": call(169, 1, 2, 3, None),
        "A10 syslog": call(103, 3, None, 0),
        "A11 iopl": call(172, 3),
        "A11 ioperm": call(173, 0, 1, 1),
        "A11 modify_ldt": call(154, 0, None, 0),
        "A13 sethostname": call(170, b"pwned", 5),
        "A14 fanotify_init": call(300, 0, 0),
        "A14 lookup_dcookie": call(212, 0, None, 0),
        "A17 x32": in_child(lambda: call(0x40000000 | 39)),
        "A19 vmsplice": call(278, 0, None, 0, 0),
        "A19 process_vm_readv": call(310, 1, None, 0, None, 0, 0),
        "A19 kcmp": call(312, 1, 1, 0, 0, 0),
        "A19 pidfd_getfd": call(438, 0, 0, 0),
        "A19 process_madvise": call(440, 0, None, 0, 0, 0),
        "A20 mbind": call(237, 0, 0, 0, None, 0, 0),
        "A20 move_pages": call(279, 0, 0, None, None, None, 0),
        "A20 migrate_pages": call(256, 0, 0, None, None),
        "A23 TIOCSTI with high bits": call(16, 0, 0x100005412, b"x"),
        "clock_settime": call(227, 0, None),
        "settimeofday": call(164, None, None),
        "swapon": call(167, b"/tmp/none", 0),
        "acct": call(163, b"/tmp/none"),
        "perf_event_open": call(298, None, 0, -1, -1, 0),
        "ptrace": in_child(lambda: call(101, 0, 0, 0, 0)),
        "open_by_handle_at": call(304, 0, None, 0),
        "B4 fsopen": call(430, b"tmpfs", 0),
        "B4 open_tree": call(428, -100, b"/", 1),
        "B4 move_mount": call(429, -1, b"", -1, b"", 0),
        "B4 mount_setattr": call(442, -100, b"/", 0, None, 0),
        "B5 pivot_root": call(155, b"/tmp", b"/tmp"),
        "B5 chroot": call(161, b"/tmp"),
        "unshare user": in_child(lambda: call(272, 0x10000000)),
        "unshare mount": in_child(lambda: call(272, 0x20000)),
        "setns": call(308, 0, 0),
        "clone3": call(435, None, 0),
    }
    younger = {call(number, 0, 0, 0, 0, 0, 0) for number in range(463, 700)}
    return results | {"A22 younger calls": " ".join(sorted(younger))}


def mounts() -> dict[str, str]:
    results = {}
    for kind in (b"tmpfs", b"proc", b"cgroup", b"cgroup2", b"sysfs"):
        results[f"B1 mount {kind.decode()}"] = call(165, b"none", b"/tmp", kind, 0, None)
    for path in (b"/", b"/usr", b"/proc/sys", b"/dev"):
        results[f"B2 remount {path.decode()}"] = call(165, b"none", path, None, 0x20 | 0x1000, None)
    results["B2 umount /proc/cmdline"] = call(166, b"/proc/cmdline", 2)
    results["B10 share /"] = call(165, b"none", b"/", None, 1 << 20, None)
    return results


CGROUP_DOORS = ("release_agent", "notify_on_release", "devices.allow", "cgroup.procs", "memory.limit_in_bytes")


def cgroups() -> Iterator[tuple[str, str]]:
    for folder, _, names in os.walk("/sys/fs/cgroup"):
        for name in CGROUP_DOORS:
            if name in names:
                yield f"B7 write {folder}/{name}", attempt(write(f"{folder}/{name}", "0"))


def find(marker: str) -> str:
    """Whether a file of the host is anywhere below this box's root."""
    for folder, folders, names in os.walk("/"):
        if marker in names:
            return f"got in at {folder}"
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys")]
    return "ENOENT"


def files() -> dict[str, str]:
    path_on_host = sys.argv[2]
    results = {f"C1 mknod {name}": attempt(lambda n=name: os.mknod(n, 0o20666, os.makedev(1, 11)))
               for name in ("/tmp/kmsg", "/home/user/kmsg", "/dev/shm/kmsg")}  # fmt: skip
    for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/x", "/.skerry/agent/x", "/.skerry/x", "/home/x", "/var/x"):
        results[f"C3 make {path}"] = attempt(make(path))
    for path in ("/etc/passwd", "/usr/bin/env", "/.skerry/agent/start.py"):
        results[f"C3 write {path}"] = attempt(write(path))
    for path in ("/etc/shadow", "/root", "/var/run/docker.sock", "/run/skerry", "/sys", "/sys/fs/cgroup", "/var/lib"):
        results[f"C4 read {path}"] = attempt(read(path))
    results["C4 find a file of the host"] = find(os.path.basename(path_on_host))
    for process in ("1", "self"):
        for number in range(64):
            way = f"/proc/{process}/fd/{number}/../../../../../../../..{path_on_host}"
            if attempt(read(way)) == "got in":
                results[f"C7 through descriptor {number} of {process}"] = "got in"
    for number in range(3, 64):
        target = attempt(lambda n=number: os.fstat(n))
        if target == "got in":
            results[f"C6 inherited descriptor {number}"] = "got in"
    for path in (
        "sys/kernel/core_pattern",
        "sys/kernel/modprobe",
        "sys/kernel/panic",
        "sysrq-trigger",
        "sys/net/ipv4/ip_forward",
        "sys/kernel/hostname",
        "sys/user/max_user_namespaces",
        "1/oom_score_adj",
    ):
        results[f"D1 write /proc/{path}"] = attempt(write(f"/proc/{path}", "-17"))
    for path in ("cmdline", "interrupts", "keys", "key-users", "kcore", "kmsg", "acpi/wakeup", "1/root/etc/shadow"):
        results[f"D read /proc/{path}"] = attempt(read(f"/proc/{path}"))
    for path in ("/sys/class/dmi", "/sys/class/thermal", "/sys/class/powercap", "/sys/firmware"):
        results[f"D6 read {path}"] = attempt(read(path))
    return results | dict(cgroups())


COMMON = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
NEARBY = ("169.254.169.254", "10.0.2.2", "172.17.0.1", "::ffff:127.0.0.1", "0.0.0.0")


def others() -> dict[str, str]:
    victim, abstract, port = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    visible = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {
        "D4 see a host process": "got in" if len(visible) > 4 else "ESRCH",
        "E1 signal a host process": attempt(lambda: os.kill(victim, signal.SIGKILL)) if victim not in visible else "-",
        "E1 pidfd of a host process": attempt(lambda: os.pidfd_open(victim)) if victim not in visible else "-",
        "E1 process_vm_readv": call(310, victim, None, 0, None, 0, 0),
        "F abstract socket of the host": attempt(lambda: socket.socket(socket.AF_UNIX).connect("\0" + abstract)),
        "F port of the host": attempt(lambda: socket.create_connection(("127.0.0.1", port), 2)),
        "F5 vsock": attempt(lambda: socket.socket(socket.AF_VSOCK)),
        "F6 packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
        "F6 raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
        "F6 alg": attempt(lambda: socket.socket(socket.AF_ALG)),
        **{
            f"F6 family {number}": attempt(lambda n=number: socket.socket(n))
            for number in range(46)
            if number not in COMMON
        },
        **{
            f"F3 reach {address}": attempt(lambda a=address: socket.create_connection((a, port), 1))
            for address in NEARBY
        },
    }


print(json.dumps({"kernel": kernel, "mounts": mounts, "files": files, "others": others}[sys.argv[1]]()))
