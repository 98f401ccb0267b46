"""Interface of hypervisors, and the constants of the guest's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

if TYPE_CHECKING:
    from skerry.vm.folder import VmFolder

CONTROL_PORT = 51
"""Port of PID 1 of a guest, which is root and hears the host alone."""
AGENT_PORT = 52
"""Port of the agent of the guest's user."""
READY_PORT = 1024
"""Port of the host for a guest that has come up: the socket `v.sock_1024` beside `v.sock`."""
CHANNEL = "v.sock"
"""Socket in a machine's folder that answers `CONNECT port`, whatever runs the machine."""
CONSOLE = "console.log"
FIRST_CID = 3
"""First CID of a guest. Those of Firecracker's templates, and so of their clones, have no other: the vsock of each is a
socket in its own folder."""
LEAST_MEMORY_MIB = 256


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel of a guest. `key` changes with every byte of it."""

    key: str
    version: str
    own: bool
    """Built by us from Debian's source: it has what Debian's kernels lack, and needs no modules."""
    vmlinuz: Path
    vmlinux: Path
    """Kernel uncompressed, for a hypervisor that wants it so."""
    initrd: Path


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """A block device of a guest; in the order of `Machine.drives` they are /dev/vda, /dev/vdb, ..."""

    name: str
    path: str
    """Absolute, or a name in the machine's folder."""
    format: Literal["raw", "qcow2"] = "raw"
    read_only: bool = False


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of a virtual machine."""

    kernel: Kernel
    drives: tuple[Drive, ...]
    vcpus: int = 2
    memory_mib: int = LEAST_MEMORY_MIB
    boot_args: tuple[str, ...] = ()
    """Beside those that the hypervisor needs itself."""
    network: Literal["none", "user"] = "none"
    publish: Mapping[str, int] = {}
    """Sockets in the machine's folder that lead to a port of the guest, without any handshake."""
    cid: int | None = None
    """Guest's number in vsock, if it is to have a certain one."""
    saveable: bool = False
    """Whether it is booted to be saved: a hypervisor may have to keep its memory in another way then."""


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a machine on the host, for all its processes together."""

    memory: int
    cpus: float
    pids: int = 256


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a hypervisor on this host, found by trying."""

    accelerator: Literal["kvm", "tcg", "hvf", "none"]
    version: str
    snapshots: bool
    """Whether a machine can be saved and cloned with its memory."""
    shares_memory: bool
    """Whether clones share the memory that none of them has changed."""

    @property
    def is_boundary(self) -> bool:
        return self.accelerator in ("kvm", "hvf")


EMULATED = "emulated: for development and CI, not a security boundary"
"""Verdict on every machine that software emulates."""


class Hypervisor(ABC):
    """Runs machines, each in a folder that any process can go on from. Who calls `boot` kills what it left."""

    name: ClassVar[str]

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Raises ProviderUnavailable, with the one-line fix, if this host runs no such machines."""

    def why_no_network(self) -> str | None:
        """Reason why its machines can have no network that leads out and not to the host; None where they can."""
        return f"{self.name} gives its machines none"

    @abstractmethod
    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        """A sparse drive in the folder that begins as `base`, which stays as it is, and is at least `size` bytes."""

    @abstractmethod
    async def boot(self, folder: VmFolder, machine: Machine, limits: MachineLimits | None) -> None:
        """Start it from its kernel; returns once it runs, not once the guest is up."""

    @abstractmethod
    async def save(self, folder: VmFolder, into: Path) -> None:
        """Keep a running machine's memory and devices in the folder `into`; the machine has ended then, and the
        content of its writable drives belongs to what was saved. Nothing may be connected to it."""

    @abstractmethod
    async def copy_memory(self, folder: VmFolder, into: Path) -> None:
        """Keep memory and devices of any machine in the folder `into`, as `save` does, and leave it frozen: `resume`
        lets it go on, `kill` ends it. Until then its writable drives are what belongs to what was kept. The caller sees
        to it that the files outlive the host's end, if they are to."""

    @abstractmethod
    async def restore(
        self, folder: VmFolder, machine: Machine, saved: Path, limits: MachineLimits | None, *, frozen: bool = False
    ) -> None:
        """Start a clone of what was saved; returns once it runs, or, if it is to be `frozen`, once `resume` lets it.
        `machine` differs from the saved one in the paths of its drives at most; the guest is told of drives that have
        another size by now. Raises Conflict for what cannot be restored here: another version, another processor, a
        broken file."""

    @abstractmethod
    async def pause(self, folder: VmFolder) -> None:
        """Freeze it; quiet if it is frozen."""

    @abstractmethod
    async def resume(self, folder: VmFolder) -> None:
        """Let it go on."""

    @abstractmethod
    async def is_paused(self, folder: VmFolder) -> bool: ...

    @abstractmethod
    async def kill(self, folder: VmFolder) -> None:
        """End it at once, and remove its sockets; drives and console stay. Quiet if there is nothing."""
