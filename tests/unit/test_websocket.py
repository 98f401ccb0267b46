"""WebSocket frames, cut at any place, and such as no server may send."""

from __future__ import annotations

import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from skerry.net.stream import HIGH_WATER, Buffer, Receiver, Stream
from skerry.net.websocket import BrokenFrames, WebSocket


class Wire(Stream):
    """The other side's end, in memory."""

    def __init__(self) -> None:
        self.sent = b""

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def write(self, *parts: Buffer) -> None:
        self.sent += b"".join(bytes(part) for part in parts)

    async def drained(self) -> None:
        return

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.receiver.closed(None)


class Heard:
    def __init__(self, early: bytes = b"") -> None:
        self.data = b""
        self.messages: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.wire = Wire()
        self.socket = WebSocket(self.wire, early)
        self.socket.on_message_end = self.message_ended
        self.socket.start(self)

    def received(self, data: memoryview) -> None:
        self.data += bytes(data)

    def message_ended(self) -> None:
        self.messages.append(self.data)
        self.data = b""

    def closed(self, error: Exception | None) -> None:
        self.ends.append(error)


def frame(opcode: int, content: bytes, *, final: bool = True, masked: bool = False) -> bytes:
    first, mask = opcode | (0x80 if final else 0), 0x80 if masked else 0
    if len(content) < 126:
        return struct.pack(">BB", first, mask | len(content)) + content
    if len(content) < 1 << 16:
        return struct.pack(">BBH", first, mask | 126, len(content)) + content
    return struct.pack(">BBQ", first, mask | 127, len(content)) + content


SIZES = st.one_of(st.integers(0, 300), st.integers(65_000, 66_000))


@given(sizes=st.lists(SIZES, max_size=5), cuts=st.lists(st.integers(0, 70_000), max_size=20))
def test_messages_come_whole_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    contents = [bytes(size) for size in sizes]
    text = b"".join(frame(2, content) for content in contents)
    places = [*sorted(cuts), len(text)]
    heard = Heard(text[: places[0]])
    for start, end in pairwise(places):
        heard.wire.receiver.received(memoryview(text)[start:end])
    assert heard.messages == contents


@given(sizes=st.lists(st.integers(0, 300), max_size=5))
def test_messages_come_whole_byte_by_byte(sizes: list[int]) -> None:
    heard = Heard()
    for byte in b"".join(frame(2, bytes(size)) for size in sizes):
        heard.wire.receiver.received(memoryview(bytes((byte,))))
    assert [len(message) for message in heard.messages] == sizes


@given(size=SIZES)
def test_what_is_written_is_one_frame_with_a_mask_that_changes_nothing(size: int) -> None:
    content = bytes(size)
    heard = Heard()
    heard.socket.write(content[:7], memoryview(content)[7:])
    plain = frame(2, content, masked=True)
    head = len(plain) - len(content)
    assert heard.wire.sent == plain[:head] + bytes(4) + content


def test_a_message_in_pieces_has_pings_in_between() -> None:
    heard = Heard()
    for each in (frame(1, b"one ", final=False), frame(9, b"there?"), frame(0, b"message")):
        heard.wire.receiver.received(memoryview(each))
    assert heard.messages == [b"one message"]
    assert heard.wire.sent == bytes((0x8A, 0x86)) + bytes(4) + b"there?"


def test_a_close_ends_it_once() -> None:
    heard = Heard()
    heard.wire.receiver.received(memoryview(frame(2, b"last") + frame(8, b"\x03\xe8") + frame(2, b"never")))
    heard.socket.close()
    assert (heard.messages, heard.ends) == ([b"last"], [None])
    assert not heard.wire.is_open


def test_what_no_server_may_send_ends_it() -> None:
    for wrong in (frame(2, b"x", masked=True), frame(9, bytes(126)), frame(9, b"x", final=False)):
        heard = Heard()
        heard.wire.receiver.received(memoryview(wrong))
        assert [type(end) for end in heard.ends] == [BrokenFrames]
        assert not heard.wire.is_open


def test_a_server_that_asks_without_end_and_takes_no_answer_gets_no_more() -> None:
    heard = Heard()
    pings = frame(9, bytes(125)) * 1000
    for _ in range(20):
        heard.wire.receiver.received(memoryview(pings))
        heard.wire.buffered = len(heard.wire.sent)  # nothing goes out
    assert HIGH_WATER <= len(heard.wire.sent) < 2 * HIGH_WATER
    heard.wire.sent, heard.wire.buffered = b"", 0
    heard.wire.receiver.received(memoryview(frame(9, b"there?")))
    assert heard.wire.sent.endswith(b"there?")
    assert heard.ends == []
