"""E: what the kernel tells and lets be set, in /proc, /sys and control groups."""

from __future__ import annotations

import posix

from .means import FIND, GOT_IN, ended, first, lines, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def groups(name: str, text: str) -> Callable[[], str]:
    """To write to a file of a control group, wherever one is to be seen."""

    def attempt() -> str:
        folders, last = ["/sys/fs/cgroup"], "ENOENT"
        while folders:
            folder = folders.pop()
            try:
                entries = [*posix.scandir(folder)]
            except OSError:
                continue
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            if any(entry.name == name for entry in entries):
                last = ended(write(f"{folder}/{name}", text))
                if last.startswith(GOT_IN):
                    return f"{last} at {folder}"
        return last

    return attempt


def tell(path: str, *words: str) -> Callable[[], str]:
    """Whether a file holds one of these words."""
    return lambda: next((f"{GOT_IN}: {word}" for word in words if word in "\n".join(lines(path))), "ENOENT")


def addresses(path: str) -> str:
    """Whether the kernel says where things lie."""
    return next((GOT_IN for line in lines(path) if line.split()[0].strip("0-")), "ENOENT")


def frames() -> str:
    """Whether it says which memory of the machine a page is."""
    fd = posix.open("/proc/self/pagemap", posix.O_RDONLY)
    entries = posix.pread(fd, 8 * 512, 0x400000 // 4096 * 8)
    found = [int.from_bytes(entries[n : n + 8], "little") & (1 << 55) - 1 for n in range(0, len(entries), 8)]
    return GOT_IN if any(found) else "EPERM"


def same(path: str) -> Callable[[], object]:
    """To write what is there: harmless, and yet a write."""
    return lambda: write(path, "\n".join(lines(path)))()


def oom() -> str:
    """To be the last that is killed for want of memory."""
    write("/proc/self/oom_score_adj", "-1000")()
    return GOT_IN


ATTEMPTS: dict[str, Callable[[], object]] = {
    "E01": same("/proc/sys/kernel/core_pattern"),
    "E02": same("/proc/sys/kernel/modprobe"),
    "E03": same("/proc/sys/kernel/panic"),
    "E04": write("/proc/sysrq-trigger", ""),
    "E05": same("/proc/sys/kernel/hostname"),
    "E06": same("/proc/sys/net/ipv4/ip_forward"),
    "E07": same("/proc/sys/user/max_user_namespaces"),
    "E08": same("/proc/sys/vm/overcommit_memory"),
    "E09": write("/proc/sys/vm/drop_caches", "1"),
    "E10": same("/proc/sys/kernel/randomize_va_space"),
    "E11": same("/proc/sys/kernel/yama/ptrace_scope"),
    "E12": same("/proc/sys/kernel/unprivileged_bpf_disabled"),
    "E13": write("/proc/sys/fs/binfmt_misc/register", ":x:M::x::/bin/sh:"),
    "E14": same("/proc/sys/fs/mqueue/msg_max"),
    "E15": same("/proc/sys/kernel/shmmax"),
    "E16": first(["/proc/irq/0/smp_affinity", "/proc/irq/default_smp_affinity", "/proc/mtrr"], same),
    "E17": write("/proc/1/oom_score_adj", "-17"),
    "E18": oom,
    "E19": write("/proc/self/uid_map", "0 0 1"),
    "E20": write("/proc/self/gid_map", "0 0 1"),
    "E21": first(["/sys/kernel/uevent_helper", "/sys/power/state", "/sys/module/kernel/parameters/panic"], same),
    "E22": first(["/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/ksm/run"], same),
    "E23": write("/sys/bus/pci/rescan", "0"),
    "E24": groups("release_agent", "/tmp/x"),
    "E25": groups("notify_on_release", "1"),
    "E26": groups("devices.allow", "a"),
    "E27": first(["cgroup.procs", "tasks"], lambda name: groups(name, "0")),
    "E28": first(["memory.limit_in_bytes", "memory.max"], lambda name: groups(name, "-1")),
    "E29": groups("pids.max", "max"),
    "E30": first(["cpu.max", "cpu.cfs_quota_us"], lambda name: groups(name, "-1")),
    "E31": groups("cgroup.subtree_control", "+memory"),
    "E32": lambda: posix.mkdir("/sys/fs/cgroup/x"),
    "E33": read("/proc/cmdline"),
    "E34": read("/proc/interrupts"),
    "E35": read("/proc/keys"),
    "E36": read("/proc/key-users"),
    "E37": read("/proc/kcore"),
    "E38": read("/proc/kmsg"),
    "E39": first(["/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats"], read),
    "E40": first(["/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo"], read),
    "E41": first(["/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup"], read),
    "E42": lambda: addresses("/proc/kallsyms"),
    "E43": frames,
    "E44": first(["/proc/acpi", "/proc/scsi", "/proc/asound"], read),
    "E45": lambda: addresses("/proc/iomem"),
    "E46": read("/sys/firmware"),
    "E47": first(["/sys/class/dmi/id/product_serial", "/sys/class/dmi/id/board_vendor"], read),
    "E48": read("/sys/class/powercap"),
    "E49": read("/sys/class/thermal"),
    "E50": first(["/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security", "/sys/fs/bpf"], read),
    "E51": read("/proc/vmcore"),
    "E52": tell("/proc/self/mountinfo", FIND.rpartition("/")[0]),
    "E53": tell("/proc/1/environ", "PASSWORD_OF_THE_MANAGER"),
    "E54": tell("/proc/1/cmdline", "PASSWORD_OF_THE_MANAGER", FIND.rpartition("/")[0]),
}
