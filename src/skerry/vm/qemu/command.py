"""The command line of a machine: a pure function of what it is made of.

Our own kernel has what `microvm` needs, which boots in a third of the time; Debian's kernels find devices on PCI only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from skerry.vm import launch
from skerry.vm.base import Drive, Machine
from skerry.vm.launch import Launch
from skerry.vm.qemu.qcow2 import Layer

MEMORY = "memory"
"""The file with the memory of a machine that is to be saved."""
QMP = "qmp.sock"
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_LEAST_TRANSLATIONS_MIB = 32
_MEMORY_PER_TRANSLATIONS = 8
"""How much software keeps of what it has translated: less is slower, and more only takes memory."""

Accelerator = Literal["kvm", "tcg"]


class Host(NamedTuple):
    """What a command line depends on beside the machine."""

    program: str
    accelerator: Accelerator
    tsc_khz: int | None
    """How fast this host's clock ticks, if that is known for certain."""
    opens_memory_read_only: bool
    device_groups: tuple[int, ...] = ()
    cid: int | None = None
    """The guest's number in the kernel's vsock, if that is its channel."""


def _bus(machine: Machine) -> str:
    return "device" if machine.kernel.own else "pci"


def shape(machine: Machine, accelerator: Accelerator, *, has_vsock: bool = False) -> list[str]:
    """The machine's devices, in their order: what must be the same to restore it."""
    bus = _bus(machine)
    board = "microvm,acpi=off,rtc=on" if machine.kernel.own else "pc,usb=off,hpet=off,graphics=off"
    arguments = [
        *("-machine", f"{board},memory-backend=ram"),
        *("-cpu", "host" if accelerator == "kvm" else "max"),
        *("-smp", str(machine.vcpus)),
        *("-m", str(machine.memory_mib)),
        *("-serial", "chardev:console"),
    ]
    if not has_vsock:
        arguments += ["-device", f"virtio-serial-{bus},max_ports=2"]
        arguments += ["-device", "virtserialport,chardev=agent,name=agent.0"]
    for drive in machine.drives:
        arguments += ["-device", f"virtio-blk-{bus},drive={drive.name},id=device-{drive.name}"]
    if machine.network == "user":
        arguments += ["-device", f"virtio-net-{bus},netdev=net"]
    return arguments


def command(
    machine: Machine, host: Host, layers: Mapping[str, tuple[Layer, ...]], saved_memory: Path | None = None
) -> Launch:
    """What to launch; with the memory of a saved machine it waits to be told of its devices."""
    files = _Files()
    argv = [
        host.program,
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SANDBOX),
        *("-accel", "kvm" if host.accelerator == "kvm" else f"tcg,thread=single,tb-size={_translations(machine)}"),
        *("-object", _memory(machine, host, files, saved_memory)),
        *("-chardev", "stdio,id=console,signal=off"),
        *("-chardev", f"socket,id=qmp,fd={launch.LISTEN_FD},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]
    for drive in machine.drives:
        argv += ["-blockdev", msgspec.json.encode(_node(drive, layers[drive.name], files)).decode()]
    if machine.network == "user":
        argv += ["-netdev", "user,id=net,ipv6=off"]
    argv += shape(machine, host.accelerator, has_vsock=host.cid is not None)
    if host.cid is None:
        argv += ["-chardev", f"socket,id=agent,fd={launch.CHANNEL_FD}"]
    else:
        argv += ["-device", f"vhost-vsock-{_bus(machine)},guest-cid={host.cid}"]
    if saved_memory is None:
        argv += ["-kernel", files.name(_kernel(machine)), "-initrd", files.name(machine.kernel.initrd)]
        argv += ["-append", kernel_arguments(machine, host)]
    else:
        argv += ["-incoming", "defer"]
    return Launch(
        argv=argv,
        files=tuple(files.paths),
        channel=host.cid is None,
        listen=(QMP,),
        publish=machine.publish,
        own=tuple(drive.path for drive in machine.drives if not drive.read_only),
        device_groups=host.device_groups,
        cid=host.cid,
        network=machine.network == "user",
    )


def kernel_arguments(machine: Machine, host: Host) -> str:
    words = ["console=ttyS0", "quiet", "loglevel=3", "reboot=t", "panic=-1"]
    if host.accelerator == "tcg" and machine.kernel.own and host.tsc_khz is not None:
        # the kernel would measure it against a timer that software cannot keep
        words += [f"tsc_early_khz={host.tsc_khz}", f"lpj={host.tsc_khz * 5}", "nolapic_timer"]
    elif host.accelerator == "tcg" and not machine.kernel.own:
        words += ["tsc=reliable", "no_timer_check", "mitigations=off"]
    channel = "port:agent.0" if host.cid is None else "vsock"
    return " ".join([*words, f"skerry.channel={channel}", *machine.boot_args])


class _Files:
    """Files that are passed as descriptors, each once."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def name(self, path: Path) -> str:
        if path not in self.paths:
            self.paths.append(path)
        return launch.file(self.paths.index(path))


def _translations(machine: Machine) -> int:
    return max(_LEAST_TRANSLATIONS_MIB, machine.memory_mib // _MEMORY_PER_TRANSLATIONS)


def _kernel(machine: Machine) -> Path:
    return machine.kernel.vmlinux if machine.kernel.own else machine.kernel.vmlinuz


def _memory(machine: Machine, host: Host, files: _Files, saved: Path | None) -> str:
    size = f"id=ram,size={machine.memory_mib}M"
    if saved is not None:
        # each clone's changes are its own; an older QEMU opens the file for writing though it never writes
        read_only = ",readonly=on,rom=off" if host.opens_memory_read_only else ""
        return f"memory-backend-file,{size},mem-path={files.name(saved)},share=off{read_only}"
    if machine.saveable:
        return f"memory-backend-file,{size},mem-path={MEMORY},share=on"
    return f"memory-backend-ram,{size}"


def _node(drive: Drive, layers: tuple[Layer, ...], files: _Files) -> dict[str, object]:
    """A drive as a tree of nodes; all but the uppermost are shared with others, and so neither written nor locked."""
    node: dict[str, object] | None = None
    for layer in reversed(layers):
        is_top = layer is layers[0]
        path = str(layer.path) if is_top and not layer.path.is_absolute() else files.name(layer.path)
        is_written = is_top and not drive.read_only
        file = {"driver": "file", "filename": path, "locking": "auto" if is_written else "off"}
        below = {} if node is None else {"backing": node}
        node = {"driver": "qcow2" if layer.is_overlay else "raw", "file": file, "read-only": not is_written, **below}
    assert node is not None
    return {**node, "node-name": drive.name, "discard": "unmap"}
