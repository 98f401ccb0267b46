"""The frames of `vm/MUX.md`: many streams over one channel."""

from __future__ import annotations

from _struct import Struct

MAGIC = b"skerry mux 1".ljust(16, b"\0")
NONCE_BYTES = 16
WINDOW = 1 << 16
MAX_FRAME = 1 << 14
MAX_STREAMS = 256
HELLO, OPEN, ACCEPT, REFUSE, DATA, END, CLOSE, CREDIT = range(1, 9)
HEADER = Struct("<BBHI")
NUMBER = Struct("<I")
MAX_PAYLOAD = MAX_FRAME - HEADER.size
LENGTHS = {HELLO: len(MAGIC) + NONCE_BYTES, OPEN: 4, ACCEPT: 0, REFUSE: 0, END: 0, CLOSE: 0, CREDIT: 4}


class Broken(Exception):
    """The other side said what it may not say."""


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, 0, len(payload), stream) + payload
