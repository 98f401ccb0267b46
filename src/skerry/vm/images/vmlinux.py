"""The kernel proper, out of the compressed file that boot loaders take."""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
import zlib
from typing import Protocol

from skerry.errors import ProviderError
from skerry.vm.images import programs

ELF = b"\x7fELF"
_BOOT_MAGIC = b"HdrS"
_SECTOR = 512
_UNPACK_S = 120
_TOOLS = {b"\x02\x21\x4c\x18": ("lz4", "-dc"), b"\x28\xb5\x2f\xfd": ("zstd", "-dcq")}


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def extract(vmlinuz: bytes) -> bytes:
    """An ELF file for x86; what is one already, and the image of an ARM kernel, stay as they are."""
    if vmlinuz.startswith(ELF) or vmlinuz[0x38:0x3C] == b"ARMd":
        return vmlinuz
    if vmlinuz.startswith(b"\x1f\x8b"):  # as Debian has kernels for ARM
        return gzip.decompress(vmlinuz)
    if vmlinuz[0x202:0x206] != _BOOT_MAGIC:
        raise ProviderError("this is no kernel that can be booted: it has neither an ELF nor a boot header")
    found = _inflated(_payload(vmlinuz))
    if not found.startswith(ELF):
        raise ProviderError("there is no kernel in the compressed part of this file")
    return found


def _payload(vmlinuz: bytes) -> bytes:
    sectors = vmlinuz[0x1F1] or 4
    offset, length = struct.unpack_from("<II", vmlinuz, 0x248)
    start = (sectors + 1) * _SECTOR + offset
    payload = vmlinuz[start : start + length]
    if not length or len(payload) != length:
        raise ProviderError("the kernel is damaged: it is shorter than its header says")
    return payload


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
            done = subprocess.run(
                [programs.find(tool), option], input=payload[:-4], capture_output=True, timeout=_UNPACK_S
            )
            if done.returncode:
                raise ProviderError(f"the kernel is damaged: {done.stderr.decode(errors='replace').strip()}")
            return done.stdout
    raise ProviderError(f"the kernel is compressed in an unknown way ({payload[:6].hex()})")


def _whole(inflater: _Inflater, payload: bytes) -> bytes:
    inflated = inflater.decompress(payload)
    if not inflater.eof:
        raise ProviderError("the kernel is damaged: its compressed part is cut short")
    return inflated
