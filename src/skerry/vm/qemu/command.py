"""Command line of a QEMU: a pure function of the machine and the host.

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
from skerry.vm.qemu.qcow2 import is_overlay

MEMORY = "memory"
"""File with the memory of a machine that is to be saved."""
QMP = "qmp.sock"
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_LEAST_TRANSLATIONS_MIB = 32
_MEMORY_PER_TRANSLATIONS = 8
"""Share of the memory for translated code: less is slower, and more only takes memory."""

Accelerator = Literal["kvm", "tcg"]
Channel = Literal["port", "vsock"]


class HostFacts(NamedTuple):
    """Facts of the host that a command line depends on."""

    program: str
    accelerator: Accelerator
    tsc_khz: int | None
    """Rate of this host's clock, if that is known for certain."""
    opens_memory_read_only: bool
    device_groups: tuple[int, ...] = ()
    cid: int | None = None
    """Guest's number in the kernel's vsock, if that is its channel."""
    token_digest: str | None = None
    """Digest of the token that the guest demands, as every user of the host can reach it by its number."""
    merges_memory: bool = False
    """Whether the host's kernel may keep one copy of pages that several machines have."""


def _bus(machine: Machine) -> str:
    return "device" if machine.kernel.own else "pci"


def shape(machine: Machine, accelerator: Accelerator, *, has_vsock: bool = False) -> list[str]:
    """Arguments of the machine's devices, in their order: they must be the same to restore it."""
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
    machine: Machine, host: HostFacts, layers: Mapping[str, tuple[Path, ...]], saved_memory: Path | None = None
) -> Launch:
    """Process to launch; with the memory of a saved machine it waits for the state of its devices."""
    files: list[Path] = []
    translations = max(_LEAST_TRANSLATIONS_MIB, machine.memory_mib // _MEMORY_PER_TRANSLATIONS)
    argv = [
        host.program,
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SANDBOX),
        *("-accel", "kvm" if host.accelerator == "kvm" else f"tcg,thread=single,tb-size={translations}"),
        *("-object", _memory(machine, host, files, saved_memory)),
        *("-chardev", "stdio,id=console,signal=off"),
        *("-chardev", f"socket,id=qmp,fd={launch.LISTEN_FD},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]
    for drive in machine.drives:
        argv += ["-blockdev", msgspec.json.encode(_node(drive, layers[drive.name], files)).decode()]
    if machine.network == "user":
        argv += ["-netdev", "user,id=net,ipv6=off"]
    argv += shape(machine, host.accelerator, has_vsock=host.cid is not None)
    argv += ["-machine", f"mem-merge={'on' if host.merges_memory else 'off'}"]  # QEMU's default is on
    if host.cid is None:
        argv += ["-chardev", f"socket,id=agent,fd={launch.CHANNEL_FD}"]
    else:
        argv += ["-device", f"vhost-vsock-{_bus(machine)},guest-cid={host.cid}"]
    if saved_memory is None:
        kernel = machine.kernel.vmlinux if machine.kernel.own else machine.kernel.vmlinuz
        argv += ["-kernel", _file(kernel, files), "-initrd", _file(machine.kernel.initrd, files)]
        argv += ["-append", kernel_arguments(machine, host)]
    else:
        argv += ["-incoming", "defer"]
    return Launch(
        argv=argv,
        files=tuple(files),
        channel=host.cid is None,
        listen=(QMP,),
        publish=machine.publish,
        own=tuple(drive.path for drive in machine.drives if not drive.read_only),
        device_groups=host.device_groups,
        cid=host.cid,
        network=machine.network == "user",
        small_pages=host.accelerator == "tcg",  # translated code would fill large ones in part
    )


def kernel_arguments(machine: Machine, host: HostFacts) -> str:
    words = ["console=ttyS0", "quiet", "loglevel=3", "reboot=t", "panic=-1"]
    if host.accelerator == "tcg" and machine.kernel.own and host.tsc_khz is not None:
        # the kernel would measure it against a timer that software cannot keep
        words += [f"tsc_early_khz={host.tsc_khz}", f"lpj={host.tsc_khz * 5}", "nolapic_timer"]
    elif host.accelerator == "tcg" and not machine.kernel.own:
        words += ["tsc=reliable", "no_timer_check", "mitigations=off"]
    channel = "port:agent.0" if host.cid is None else "vsock"
    token = [] if host.token_digest is None else [f"skerry.token={host.token_digest}"]
    return " ".join([*words, f"skerry.channel={channel}", *token, *machine.boot_args])


def _file(path: Path, files: list[Path]) -> str:
    """Name of a file that is passed as a descriptor, once."""
    if path not in files:
        files.append(path)
    return launch.file(files.index(path))


def _memory(machine: Machine, host: HostFacts, files: list[Path], saved: Path | None) -> str:
    size = f"id=ram,size={machine.memory_mib}M"
    if saved is not None:
        # each clone's changes are its own; an older QEMU opens the file for writing though it never writes
        read_only = ",readonly=on,rom=off" if host.opens_memory_read_only else ""
        return f"memory-backend-file,{size},mem-path={_file(saved, files)},share=off{read_only}"
    if machine.saveable:
        return f"memory-backend-file,{size},mem-path={MEMORY},share=on"
    return f"memory-backend-ram,{size}"


def _node(drive: Drive, layers: tuple[Path, ...], files: list[Path]) -> dict[str, object]:
    """A drive as a tree of nodes; all but the uppermost are shared with others, and so neither written nor locked."""
    node: dict[str, object] | None = None
    for layer in reversed(layers):
        is_top = layer is layers[0]
        path = str(layer) if is_top and not layer.is_absolute() else _file(layer, files)
        is_written = is_top and not drive.read_only
        file = {"driver": "file", "filename": path, "locking": "auto" if is_written else "off"}
        below = {} if node is None else {"backing": node}
        node = {"driver": "qcow2" if is_overlay(layer) else "raw", "file": file, "read-only": not is_written, **below}
    assert node is not None
    return {**node, "node-name": drive.name, "discard": "unmap"}
