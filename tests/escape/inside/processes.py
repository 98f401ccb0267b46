"""F: processes of the host, the agent, and who we are."""

from __future__ import annotations

import ctypes
import posix
import resource

from .means import GOT_IN, VICTIM, libc, lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def processes() -> list[int]:
    return [int(name) for name in posix.listdir("/proc") if name.isdigit()]


def strangers() -> str:
    """Processes that are neither the agent nor the probe's own."""
    pid, ours = posix.getpid(), {1}
    while pid > 1:
        ours.add(pid)
        pid = next(int(line.split()[1]) for line in lines(f"/proc/{pid}/status") if line.startswith("PPid"))
    found = set(processes()) - ours
    return f"{GOT_IN}: {len(found)}" if found else "ESRCH"


def of_host(action: Callable[[int], object]) -> Callable[[], object]:
    """The same number may be a process of the box: then it is not the host's."""
    return lambda: "ESRCH" if VICTIM in processes() else action(VICTIM)


def settle(done: bool) -> str:
    return GOT_IN if done else "EPERM"


def number(call: int, *args: int) -> Callable[[], str]:
    """Any error will do: the call itself is for everybody."""
    return lambda: settle(libc.syscall(ctypes.c_long(call), *(ctypes.c_long(each) for each in args)) >= 0)


def become(action: Callable[[], object]) -> Callable[[], object]:
    """Another user or group than we are already."""
    return lambda: "EPERM" if posix.getuid() == 0 and posix.getgid() == 0 else action()


def read_agent(name: str) -> Callable[[], object]:
    return lambda: posix.read(posix.open(f"/proc/1/{name}", posix.O_RDONLY), 1)


def list_agent(name: str) -> Callable[[], object]:
    return lambda: posix.listdir(f"/proc/1/{name}")


def write_memory() -> None:
    """What the agent would run next; the first byte of its stack is as good, and harms nobody."""
    area = next(line for line in lines("/proc/1/maps") if "[stack]" in line)
    start = int(area.partition("-")[0], 16)
    fd = posix.open("/proc/1/mem", posix.O_RDWR)
    posix.pwrite(fd, posix.pread(fd, 1, start), start)


def gain() -> str:
    """All capabilities there are."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()
    libc.capget(header, before)
    wanted = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    return settle(libc.capset(header, wanted) == 0)


def capabilities() -> str:
    """Whether one is left that reaches the kernel: modules, raw I/O, tracing, administration, time, devices."""
    dangerous = sum(1 << bit for bit in (2, 12, 13, 15, 16, 17, 18, 19, 20, 21, 22, 24, 25, 26, 27, 34, 36, 38, 39, 40))
    held = [line.split()[1] for line in lines("/proc/self/status") if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
    return settle(any(int(each, 16) & dangerous for each in held))


def status(name: str, wanted: str) -> Callable[[], str]:
    """A wall that the kernel says is there."""
    return lambda: settle(not any(line.split() == [f"{name}:", wanted] for line in lines("/proc/self/status")))


def lift(name: int) -> Callable[[], object]:
    def action() -> object:
        hard = resource.getrlimit(name)[1]
        if hard == resource.RLIM_INFINITY:
            return f"{GOT_IN}: it is endless"
        try:
            resource.setrlimit(name, (hard + 1, hard + 1))
        except ValueError:  # in place of EPERM
            return "EPERM"
        return GOT_IN

    return action


ATTEMPTS: dict[str, Callable[[], object]] = {
    "F01": strangers,
    "F02": of_host(lambda pid: posix.kill(pid, 0)),
    "F03": of_host(lambda pid: posix.kill(pid, 9)),
    "F04": of_host(posix.pidfd_open),
    "F05": of_host(lambda pid: posix.open(f"/proc/{pid}/mem", posix.O_RDWR)),
    "F06": of_host(lambda pid: posix.sched_getaffinity(pid)),
    "F07": of_host(lambda pid: posix.setpriority(posix.PRIO_PROCESS, pid, 19)),
    "F08": of_host(lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE)),
    "F09": number(101, 16, 1, 0, 0),
    "F10": number(101, 0x4206, 1, 0, 0),
    "F11": write_memory,
    "F12": read_agent("mem"),
    "F13": lambda: settle(bool(posix.readlink("/proc/1/fd/0"))),
    "F14": list_agent("map_files"),
    "F15": read_agent("auxv"),
    "F16": read_agent("syscall"),
    "F17": lambda: settle(bool(posix.readlink("/proc/1/exe"))),
    "F18": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, resource.prlimit(1, resource.RLIMIT_NOFILE)),
    "F19": lambda: posix.setpriority(posix.PRIO_PROCESS, 1, posix.getpriority(posix.PRIO_PROCESS, 1)),
    "F20": lambda: posix.setpriority(posix.PRIO_PROCESS, 0, -20),
    "F21": lambda: posix.sched_setscheduler(0, posix.SCHED_FIFO, posix.sched_param(50)),
    "F22": number(251, 1, 0, 1 << 13),
    "F23": become(lambda: posix.setuid(0)),
    "F24": become(lambda: posix.setgid(0)),
    "F25": become(lambda: posix.setgroups([0])),
    "F26": gain,
    "F27": capabilities,
    "F28": status("NoNewPrivs", "1"),
    "F29": status("Seccomp", "2"),
    "F30": number(157, 22, 0, 0, 0, 0),
    "F31": number(157, 28, 0, 0, 0, 0),
    "F32": number(157, 47, 2, 12, 0, 0),
    "F33": lift(resource.RLIMIT_NOFILE),
    "F34": lift(resource.RLIMIT_CORE),
    "F35": lift(resource.RLIMIT_MEMLOCK),
    "F36": lift(resource.RLIMIT_MSGQUEUE),
    "F37": lift(resource.RLIMIT_RTPRIO),
    "F38": lift(resource.RLIMIT_NICE),
}
