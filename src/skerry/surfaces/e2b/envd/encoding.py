"""Bodies that are compressed on their way, piece by piece in either direction."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from skerry.errors import InvalidSpec

GZIP = "gzip"
_GZIP_BITS = 31
_PIECE = 1 << 18
_LEVEL = 4
_SHORT = 1 << 16


def accepted(header: str) -> str:
    """`gzip` or `identity`, whichever a client likes better. Raises InvalidSpec if it takes neither."""
    liked: dict[str, float] = {}
    for item in header.split(","):
        name, *options = (each.strip().lower() for each in item.split(";"))
        quality = 1.0
        for option in options:
            if option.startswith("q="):
                try:
                    quality = float(option[2:])
                except ValueError:
                    quality = 1.0
        if name:
            liked.setdefault(name, quality)
    identity = liked.get("identity", liked.get("*"))
    if liked.get(GZIP, 0) > 0 and liked[GZIP] >= liked.get("identity", 0):
        return GZIP
    if identity == 0:
        if liked.get("*", 0) > 0:
            return GZIP
        raise InvalidSpec("no acceptable encoding found, supported: gzip")
    return "identity"


async def compressed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What is yielded, compressed, without keeping the event loop from all else."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_BITS)
    async for chunk in chunks:
        long = len(chunk) > _SHORT
        if packed := await asyncio.to_thread(packer.compress, chunk) if long else packer.compress(chunk):
            yield packed
    yield packer.flush()


async def decompressed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What was compressed, in pieces of bounded size however small it was. Raises InvalidSpec for what is no gzip."""
    unpacker = zlib.decompressobj(_GZIP_BITS)
    begun = False
    try:
        async for chunk in chunks:
            rest = chunk
            while rest:
                begun = True
                if piece := unpacker.decompress(rest, _PIECE):
                    yield piece
                rest = unpacker.unconsumed_tail
                while rest == b"" and not unpacker.eof and piece:  # what it holds back
                    piece = unpacker.decompress(b"", _PIECE)
                    if piece:
                        yield piece
                if unpacker.eof:
                    rest = unpacker.unused_data
                    unpacker, begun = zlib.decompressobj(_GZIP_BITS), False
    except zlib.error as error:
        raise InvalidSpec(f"error decompressing request body: {error}") from None
    if begun:
        raise InvalidSpec("error decompressing request body: it ends too early")
