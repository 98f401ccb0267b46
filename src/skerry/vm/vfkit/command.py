"""Command line of a vfkit: a pure function of the machine and its folder."""

from __future__ import annotations

import re
from pathlib import Path

from skerry.errors import Unsupported
from skerry.vm.base import AGENT_PORT, CHANNEL, CONSOLE, CONTROL_PORT, READY_PORT, Drive, Machine

NAME = "vfkit"
API = "api.sock"
PID_FILE = "vfkit.pid"
_BOOT_ARGS = ("console=hvc0", "quiet", "skerry.channel=vsock", "skerry.poweroff")
"""A guest that reboots would only begin anew: it has to power off."""
_MAX_SOCKET = 103
_PLAIN = re.compile(r"/[A-Za-z0-9/._-]+")


def port_socket(port: int) -> str:
    """Name of the socket in a machine's folder that leads to a port of the guest."""
    return f"port-{port}.sock"


def sockets(machine: Machine) -> dict[str, int]:
    """Sockets that lead into the guest without a handshake, and their ports."""
    return {port_socket(port): port for port in (CONTROL_PORT, AGENT_PORT)} | dict(machine.publish)


def command(program: str, folder: Path, machine: Machine) -> list[str]:
    """Command line of a machine; its kernel must be an uncompressed arm64 image. Raises Unsupported."""
    if machine.network != "none":
        raise Unsupported("network", NAME, "the network that macOS gives to machines reaches this host; use none")
    kernel = machine.kernel
    args = " ".join((*_BOOT_ARGS, *machine.boot_args))
    devices = [
        *(_drive(folder, drive) for drive in machine.drives),
        "virtio-rng",
        f"virtio-serial,logFilePath={_plain(folder / CONSOLE)}",
        *(_socket(folder / name, port, "connect") for name, port in sockets(machine).items()),
        _socket(folder / f"{CHANNEL}_{READY_PORT}", READY_PORT, "listen"),
    ]
    return [
        *(program, "--log-level", "error", "--pidfile", _plain(folder / PID_FILE)),
        *("--restful-uri", f"unix://{_plain(folder / API, _MAX_SOCKET)}"),
        *("--cpus", str(machine.vcpus), "--memory", str(machine.memory_mib)),
        *("--kernel", str(kernel.vmlinux), "--initrd", str(kernel.initrd), "--kernel-cmdline", args),
        *(word for device in devices for word in ("--device", device)),
    ]


def _drive(folder: Path, drive: Drive) -> str:
    if drive.format != "raw":
        raise Unsupported("drives", NAME, f"{drive.name!r} is {drive.format}, and vfkit knows raw images alone")
    return f"virtio-blk,path={_plain(folder / drive.path)}{',readonly' if drive.read_only else ''}"


def _socket(path: Path, port: int, way: str) -> str:
    """`listen`: vfkit connects to the path when the guest asks for the port; `connect`: the other way."""
    return f"virtio-vsock,port={port},socketURL={_plain(path, _MAX_SOCKET)},{way}"


def _plain(path: Path, longest: int = 1000) -> str:
    """A path as vfkit understands it: it parts options at commas, and takes sockets for parts of a URL."""
    text = str(path)
    if not _PLAIN.fullmatch(text) or len(text) > longest:
        reason = f"vfkit cannot be told of {text!r}: choose a short path of plain letters and digits"
        raise Unsupported("state_dir", NAME, reason)
    return text
