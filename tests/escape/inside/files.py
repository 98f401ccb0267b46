"""D: files of the host and of others, devices, programs that are their owner's."""

from __future__ import annotations

import fcntl
import posix

from .means import FIND, GOT_IN, first, lines, make, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def find(marker: str) -> str:
    """Whether a file of the host is anywhere below this box's root."""
    folders = ["/"]
    while folders:
        folder = folders.pop()
        try:
            names = posix.scandir(folder)
        except OSError:
            continue
        for entry in names:
            if entry.name == marker:
                return f"{GOT_IN} at {entry.path}"
            if entry.is_dir(follow_symlinks=False) and entry.path not in ("/proc", "/sys"):
                folders.append(entry.path)
    return "ENOENT"


def through_descriptors(process: str) -> str:
    for number in posix.listdir(f"/proc/{process}/fd"):
        try:
            posix.stat(f"/proc/{process}/fd/{number}/../../../../../../../../../..{FIND}")
        except OSError:
            continue
        return f"{GOT_IN} at {number}"
    return "ENOENT"


def inherited() -> str:
    """Besides the one that the list is read from."""
    found = [number for number in posix.listdir("/proc/self/fd") if int(number) > 2]
    ours = 1 + 1  # the pipe to the parent, and the folder itself
    return "ENOENT" if len(found) <= ours else f"{GOT_IN}: {len(found) - ours}"


def node(kind: int, major: int, minor: int) -> Callable[[], str]:
    """A device, wherever the box can write, that opens."""

    def try_at(path: str) -> Callable[[], object]:
        def action() -> None:
            posix.mknod(path, kind | 0o666, posix.makedev(major, minor))
            posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK)

        return action

    return first([f"{folder}/node-{major}-{minor}" for folder in ("/tmp", "/home/user", "/dev/shm", "/dev")], try_at)


def device(*names: str) -> Callable[[], str]:
    def try_to(path: str) -> Callable[[], object]:
        return lambda: posix.open(path, posix.O_RDWR | posix.O_NONBLOCK)

    return first([f"/dev/{name}" for name in names], try_to)


def owned_by_another(path: str) -> Callable[[], object]:
    """A program that makes whoever starts it another user."""

    def action() -> None:
        posix.close(posix.open(path, posix.O_CREAT | posix.O_WRONLY, 0o755))
        posix.chown(path, 0 if posix.getuid() else 1, -1)
        posix.chmod(path, 0o4755)

    return action


def run_as_owner() -> str:
    """Whether a program that is its owner's changes who we are."""
    posix.execv("/bin/sh", ["sh", "-c", "exit 0"]) if posix.fork() == 0 else posix.wait()
    privileges = [line.split()[1] for line in lines("/proc/self/status") if line.startswith("NoNewPrivs")]
    return "EPERM" if privileges == ["1"] else GOT_IN


def attribute(name: str, value: bytes) -> Callable[[], object]:
    def action() -> None:
        posix.close(posix.open("/tmp/attributed", posix.O_CREAT | posix.O_WRONLY))
        posix.setxattr("/tmp/attributed", name, value)

    return action


def immutable() -> None:
    fd = posix.open("/home/user/immutable", posix.O_CREAT | posix.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, (0x10).to_bytes(8, "little"))


def link_to(path: str) -> Callable[[], object]:
    return lambda: posix.link(path, "/tmp/linked")


ENGINES = ("docker.sock", "podman/podman.sock", "containerd/containerd.sock", "incus/unix.socket", "skerry", "dbus")

ATTEMPTS: dict[str, Callable[[], object]] = {
    "D01": lambda: find(FIND.rpartition("/")[2]),
    "D02": read(FIND),
    "D03": lambda: through_descriptors("1"),
    "D04": lambda: through_descriptors("self"),
    "D05": inherited,
    "D06": read(f"/proc/1/root{FIND}"),
    "D07": read(f"/proc/1/cwd/../../../../../..{FIND}"),
    "D08": write("/proc/1/exe"),
    "D09": write("/proc/self/exe"),
    "D10": first([f"{run}/{name}" for run in ("/run", "/var/run", "/var/lib") for name in ENGINES], read),
    "D11": read("/etc/shadow"),
    "D12": read("/root"),
    "D13": read("/var/lib"),
    "D14": make("/x"),
    "D15": make("/usr/x"),
    "D16": make("/etc/x"),
    "D17": make("/dev/x"),
    "D18": make("/home/x"),
    "D19": make("/var/x"),
    "D20": first(["/.skerry/x", "/.skerry/agent/x"], make),
    "D21": write("/etc/passwd"),
    "D22": write("/usr/bin/env"),
    "D23": write("/.skerry/agent/start.py"),
    "D24": node(0o020000, 1, 11),
    "D25": node(0o020000, 1, 1),
    "D26": node(0o060000, 8, 0),
    "D27": node(0o060000, 254, 0),
    "D28": node(0o020000, 10, 229),
    "D29": device("mem", "kmem", "port"),
    "D30": device("kmsg"),
    "D31": device("sda", "vda", "vdb", "vdc", "nvme0n1", "loop0", "dm-0"),
    "D32": device("loop-control", "mapper/control", "btrfs-control"),
    "D33": device("fuse", "cuse"),
    "D34": device("kvm", "vfio/vfio"),
    "D35": device("net/tun"),
    "D36": device("vsock", "vhost-vsock", "vhost-net"),
    "D37": device("userfaultfd"),
    "D38": device("ttyS0", "tty0", "tty1", "hvc0", "console"),
    "D39": device("vport0p1", "vport1p1", "virtio-ports/skerry"),
    "D40": device("dri/card0", "input/event0", "snd/timer", "uinput", "uhid"),
    "D41": owned_by_another("/tmp/sh"),
    "D42": run_as_owner,
    "D43": attribute("security.capability", bytes.fromhex("0100000200000020000000000000000000000000")),
    "D44": attribute("trusted.skerry", b"x"),
    "D45": immutable,
    "D46": link_to("/etc/shadow"),
    "D47": link_to("/proc/1/exe"),
}
