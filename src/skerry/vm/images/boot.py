"""Files that a machine boots with: the initrd, an archive with one shell, modules and a script, and the bare kernel."""

from __future__ import annotations

import gzip
import lzma
import re
import stat
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from skerry.errors import ProviderError
from skerry.oci.roots import Entry
from skerry.vm.images import programs, tree

MODULES = (
    "virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "vmw_vsock_virtio_transport", "virtio_net",
    "virtio_rng", "overlay",
)  # fmt: skip
"""For drives, the channel, the network and what else every machine has."""
_APPLETS = ("sh", "mount", "mkdir", "insmod", "sleep", "switch_root", "reboot", "poweroff")
_FOLDERS = ("bin", "dev", "image", "lacking", "modules", "proc", "root")
_KINDS = {**tree.KINDS, tarfile.CHRTYPE: stat.S_IFCHR}
_BLOCK = 512
_ELF = b"\x7fELF"
_PT_INTERP = 3
_VERSION = re.compile(rb"Linux version ([\w.+~-]{1,64}) ")
_TOOLS = {b"\x02\x21\x4c\x18": ("lz4", "-dc"), b"\x28\xb5\x2f\xfd": ("zstd", "-dcq")}


def archive(entries: Iterable[Entry]) -> bytes:
    """Pack a cpio archive, the same bytes for the same entries: all belong to root and are of no time."""
    parts = []
    for number, (info, open_content) in enumerate(entries, 1):
        content = open_content().read() if open_content else info.linkname.encode()
        mode = _KINDS[info.type] | (0o777 if info.issym() else info.mode)
        parts.append(_packed(number, info.name, mode, content, (info.devmajor, info.devminor)))
    whole = b"".join([*parts, _packed(0, "TRAILER!!!", 0)])
    return whole + bytes(-len(whole) % _BLOCK)


def _packed(number: int, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, *device, len(name.encode()) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def init_script(modules: Iterable[str]) -> bytes:
    """The first program, which loads these modules."""
    text = Path(__file__).with_name("init.sh").read_text()
    return text.replace("@MODULES@", " ".join(modules)).replace("@FOLDERS@", " ".join(tree.FOLDERS)).encode()


def make_initrd(busybox: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Pack the initrd, not compressed: to inflate it costs more time at boot than to read it."""
    console = tarfile.TarInfo("dev/console")
    console.type, console.mode, console.devmajor, console.devminor = tarfile.CHRTYPE, 0o600, 5, 1
    entries = [*map(tree.folder_entry, _FOLDERS), Entry(console, None)]
    entries.append(tree.file_entry("bin/busybox", busybox, 0o755))
    entries += [tree.link_entry(f"bin/{name}", "busybox") for name in _APPLETS]
    entries += [tree.file_entry(f"modules/{name}.ko", content) for name, content in modules.items()]
    entries.append(tree.file_entry("init", init_script(modules), 0o755))
    return archive(entries)


def is_static(program: bytes) -> bool:
    """Whether a program runs where there is nothing else: no loader, no libraries."""
    if not program.startswith(_ELF) or program[4] != 2:  # of 64 bits
        return False
    start = int.from_bytes(program[32:40], "little")
    size, count = (int.from_bytes(program[at : at + 2], "little") for at in (54, 56))
    kinds = (int.from_bytes(program[start + n * size : start + n * size + 4], "little") for n in range(count))
    return _PT_INTERP not in kinds


def extract_vmlinux(vmlinuz: bytes) -> bytes:
    """The kernel proper as an ELF file for x86; what is one already, and the image of an ARM kernel, stay as they are.
    Raises ProviderError for what is no kernel."""
    if vmlinuz.startswith(_ELF) or vmlinuz[0x38:0x3C] == b"ARMd":
        return vmlinuz
    if vmlinuz.startswith(b"\x1f\x8b"):  # as Debian has kernels for ARM
        return gzip.decompress(vmlinuz)
    if vmlinuz[0x202:0x206] != b"HdrS":
        raise ProviderError("this is no kernel that can be booted: it has neither an ELF nor a boot header")
    sectors = vmlinuz[0x1F1] or 4
    offset, length = struct.unpack_from("<II", vmlinuz, 0x248)
    start = (sectors + 1) * _BLOCK + offset
    payload = vmlinuz[start : start + length]
    if not length or len(payload) != length:
        raise ProviderError("the kernel is damaged: it is shorter than its header says")
    found = _inflated(payload)
    if not found.startswith(_ELF):
        raise ProviderError("there is no kernel in the compressed part of this file")
    return found


def version(vmlinux: Path) -> str:
    """Version as a kernel calls itself. Raises ProviderError."""
    found = _VERSION.search(vmlinux.read_bytes())
    if found is None:
        raise ProviderError("it does not tell its version")
    return found[1].decode()


def _inflated(payload: bytes) -> bytes:
    """Behind all but gzip's data the kernel's builder puts the length, which the tools would take for a block."""
    try:
        if payload.startswith(b"\x1f\x8b"):
            return _whole(zlib.decompressobj(wbits=31), payload)
        if payload.startswith(b"\xfd7zXZ\x00"):
            return _whole(lzma.LZMADecompressor(lzma.FORMAT_XZ), payload)
    except (zlib.error, lzma.LZMAError) as error:
        raise ProviderError(f"the kernel is damaged: {error}") from error
    for magic, (tool, option) in _TOOLS.items():
        if payload.startswith(magic):
            command = [programs.find(tool), option]
            done = subprocess.run(command, input=payload[:-4], capture_output=True, timeout=120)
            if done.returncode:
                raise ProviderError(f"the kernel is damaged: {done.stderr.decode(errors='replace').strip()}")
            return done.stdout
    raise ProviderError(f"the kernel is compressed in an unknown way ({payload[:6].hex()})")


def _whole(inflater: zlib._Decompress | lzma.LZMADecompressor, payload: bytes) -> bytes:
    inflated = inflater.decompress(payload)
    if not inflater.eof:
        raise ProviderError("the kernel is damaged: its compressed part is cut short")
    return inflated
