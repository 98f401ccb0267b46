"""Machines on stand-ins for Firecracker, and a host's way to speak with them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from skerry.agent.client import AgentClient
from skerry.vm.base import AGENT_PORT, CONTROL_PORT, Drive, Kernel, Machine
from skerry.vm.firecracker import FirecrackerHypervisor
from skerry.vm.folder import VmFolder
from vm.firecracker.installing import StandIns

PATIENCE_S = 20.0
MIB = 1 << 20


class World:
    """A kernel, disks, and folders for machines."""

    def __init__(self, folder: Path, stand_ins: StandIns, *, jailed: bool) -> None:
        self.folder = folder
        self.stand_ins = stand_ins
        self.kernel = _kernel(folder)
        self.jailed = jailed
        jailer = str(stand_ins.jailer) if jailed else ""
        (folder / "cache").mkdir()
        self.hypervisor = FirecrackerHypervisor(
            folder / "cache", lambda: self.kernel, program=str(stand_ins.firecracker), jailer=jailer
        )
        self._count = 0
        self._machines: list[VmFolder] = []
        self.root = folder / "root.ext4"
        self.root.write_bytes(b"root")
        self.root.chmod(0o644)
        self.blank = folder / "blank.ext4"
        with self.blank.open("wb") as file:
            file.truncate(MIB)
        self.blank.chmod(0o644)

    async def machine(self, *, size: int | None = None, **fields: Any) -> tuple[VmFolder, Machine]:
        self._count += 1
        folder = VmFolder(self.folder / f"vm{self._count}")
        folder.make()
        self._machines.append(folder)
        disk = await self.hypervisor.make_disk(folder, "disk", base=self.blank, size=size)
        drives = (Drive(name="root", path=str(self.root), read_only=True), disk)
        return folder, Machine(kernel=self.kernel, drives=drives, **fields)

    async def booted(self, **fields: Any) -> VmFolder:
        folder, machine = await self.machine(**fields)
        with folder.ready_listener() as listener:
            await self.hypervisor.boot(folder, machine, None)
            await accepted(listener)
        return folder

    async def template(self) -> Path:
        folder = await self.booted()
        async with control(folder) as client:
            await reseed(client)
        into = self.folder / "saved"
        into.mkdir()
        await self.hypervisor.save(folder, into)
        return into

    async def end(self) -> None:
        for folder in self._machines:
            await self.hypervisor.kill(folder)
            folder.remove()


def elf(machine: int) -> bytes:
    """Beginning of a program for that kind of machine."""
    return (b"\x7fELF".ljust(16, b"\0") + bytes([2, 0, machine, 0])).ljust(1024, b"\0")


def image_of_arm() -> bytes:
    return (bytes(0x38) + b"ARMd").ljust(1024, b"\0")


def kernel_head() -> bytes:
    """Beginning of a kernel that Firecracker loads on this host's processor."""
    return image_of_arm() if os.uname().machine == "aarch64" else elf(62)


def _kernel(folder: Path) -> Kernel:
    vmlinux = folder / "vmlinux"
    vmlinux.write_bytes(kernel_head())
    initrd = folder / "initrd"
    initrd.write_bytes(b"initrd")
    for path in (vmlinux, initrd):
        path.chmod(0o644)
    return Kernel(key="k", version="6.12", own=True, vmlinuz=folder / "none", vmlinux=vmlinux, initrd=initrd)


async def accepted(listener: socket.socket) -> None:
    async with asyncio.timeout(PATIENCE_S):
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.close()


@asynccontextmanager
async def control(folder: VmFolder) -> AsyncIterator[AgentClient]:
    client = await AgentClient.greet(await folder.dial(CONTROL_PORT, PATIENCE_S))
    try:
        yield client
    finally:
        client.close()


async def reseed(client: AgentClient) -> None:
    params = {"entropy": os.urandom(64).hex(), "time": time.time(), "hostname": "h", "machine_id": "0" * 32}
    await client.call("reseed", params, type=dict[str, Any])


async def prepared(folder: VmFolder) -> AgentClient:
    async with control(folder) as client:
        await reseed(client)
        await client.call("prepare", {"mount_disk": True, "env": {}}, type=dict[str, Any])
    return await AgentClient.greet(await folder.dial(AGENT_PORT, PATIENCE_S))


async def shell(client: AgentClient, command: str) -> str:
    call = client.open("exec", {"shell": command})
    output = b"".join([bytes(piece) async for _, piece in call.chunks()])
    assert (await call.result(dict[str, Any], PATIENCE_S))["exit_code"] == 0
    return output.decode()
