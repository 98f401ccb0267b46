"""Questions to the agent's resolver, well formed and not: each gets one answer with the right code, or none."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.agent.guest import resolver
from skerry.agent.guest.resolver import BAD_VERSION, FINE, MALFORMED, NO_NAME, NOT_DONE, REFUSED, Question

HEAD = struct.pack(">HHHHHH", 0xABCD, 0x0100, 1, 0, 0, 0)
A_IN = struct.pack(">HH", 1, 1)


def label(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def head(**other: int) -> bytes:
    fields = {"id": 0xABCD, "flags": 0x0100, "questions": 1, "answers": 0, "authorities": 0, "more": 0} | other
    return struct.pack(">HHHHHH", *fields.values())


PYPI = label(b"pypi") + label(b"org") + b"\0"
LONGEST = b"".join(label(b"a" * 63) for _ in range(3)) + label(b"b" * 61) + b"\0"
TOO_LONG = LONGEST.replace(label(b"b" * 61), label(b"b" * 62))
EDNS = b"\0" + struct.pack(">HHIH", 41, 4096, 0, 0)
LATER_EDNS = b"\0" + struct.pack(">HHIH", 41, 4096, 1 << 16, 0)
LETTERS = set("abcdefghijklmnopqrstuvwxyz0123456789_-.")

BAD = {
    "no question": (head(questions=0), MALFORMED),
    "two questions": (head(questions=2) + (PYPI + A_IN) * 2, MALFORMED),
    "65535 questions": (head(questions=65535) + PYPI + A_IN, MALFORMED),
    "an answer in it": (head(answers=1) + PYPI + A_IN, MALFORMED),
    "an authority in it": (head(authorities=1) + PYPI + A_IN, MALFORMED),
    "nothing after the head": (HEAD, MALFORMED),
    "half a label": (HEAD + b"\x05py", MALFORMED),
    "no end of its name": (HEAD + PYPI[:-1], MALFORMED),
    "half a kind": (HEAD + PYPI + b"\0", MALFORMED),
    "a name that points to itself": (HEAD + b"\xc0\x0c" + A_IN, MALFORMED),
    "a name that points back": (HEAD + label(b"a") + b"\xc0\x0c" + A_IN, MALFORMED),
    "a label of 64 bytes": (HEAD + b"\x40" + b"a" * 64 + b"\0" + A_IN, MALFORMED),
    "a name of 256 bytes": (HEAD + TOO_LONG + A_IN, MALFORMED),
    "more than a question": (HEAD + PYPI + A_IN + b"x", MALFORMED),
    "half an extension": (head(more=1) + PYPI + A_IN + EDNS[:-1], MALFORMED),
    "an extension longer than it is": (head(more=1) + PYPI + A_IN + EDNS[:-2] + b"\xff\xff", MALFORMED),
    "two extensions": (head(more=2) + PYPI + A_IN + EDNS * 2, MALFORMED),
    "a signature": (head(more=1) + PYPI + A_IN + b"\0" + struct.pack(">HHIH", 250, 255, 0, 0), MALFORMED),
    "an extension to come": (head(more=1) + PYPI + A_IN + LATER_EDNS, BAD_VERSION),
    "an update": (head(flags=0x2800) + PYPI + A_IN, NOT_DONE),
    "another class": (HEAD + PYPI + struct.pack(">HH", 16, 3), REFUSED),
    "a dot in a label": (HEAD + label(b"pypi.org") + b"\0" + A_IN, NO_NAME),
    "a NUL in a label": (HEAD + label(b"pypi\0") + b"\0" + A_IN, NO_NAME),
    "a label beyond ASCII": (HEAD + label("é".encode()) + b"\0" + A_IN, NO_NAME),
    "the root": (HEAD + b"\0" + A_IN, FINE),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code"), BAD.values(), ids=BAD)
def test_what_cannot_be_looked_up_has_its_answer_at_once(data: bytes, code: int) -> None:
    question = Question(data)
    assert question.code == code
    answer = question.answer(code)
    assert answer[:2] == data[:2]
    assert answer[2] & 0x80
    assert answer[3] & 15 == code & 15
    assert answer[6:8] == b"\0\0"


@pytest.mark.parametrize("name", [PYPI, LONGEST, label(b"_dmarc") + PYPI, label(b"xn--bcher-kva") + PYPI])
def test_a_question_is_answered_with_its_own_letters(name: bytes) -> None:
    asked = HEAD + name.swapcase() + A_IN
    question = Question(asked)
    assert question.code is None
    assert len(question.name) <= 253
    assert question.name == question.name.lower()
    answer = question.answer(FINE, "127.200.3.4")
    assert answer[12 : len(asked)] == asked[12:]
    assert answer.endswith(struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + bytes([127, 200, 3, 4]))
    assert len(answer) <= 512


def test_who_knows_the_extension_gets_it_back() -> None:
    question = Question(head(more=1) + PYPI + A_IN + EDNS)
    assert question.code is None
    assert question.answer(NO_NAME).endswith(b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0))
    later = Question(head(more=1) + PYPI + A_IN + LATER_EDNS)
    assert later.answer(BAD_VERSION).endswith(b"\0" + struct.pack(">HHIH", 41, 1232, 1 << 24, 0))


class _Sent:
    """A resolver without sockets, and what it sends."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: list[bytes] = []
        self.resolver = resolver.Resolver.__new__(resolver.Resolver)
        self.resolver._ask = self._ask

    def _ask(self, name: str, reply: resolver.Reply) -> None:
        self.asked.append(name)
        reply(FINE, "127.200.0.2")

    def serve(self, data: bytes) -> bool:
        return self.resolver.serve(data, self.answers.append)


@pytest.mark.parametrize("data", [b"", b"\0", HEAD[:11], head(flags=0x8180) + PYPI + A_IN])
def test_an_answer_and_what_is_too_short_get_no_answer(data: bytes) -> None:
    sent = _Sent()
    assert not sent.serve(data)
    assert not sent.answers


garbage = st.one_of(
    st.binary(max_size=600),
    st.binary(max_size=300).map(lambda rest: HEAD + rest),
    st.lists(st.binary(min_size=1, max_size=63), max_size=6).map(
        lambda labels: HEAD + b"".join(map(label, labels)) + b"\0" + A_IN
    ),
)


@given(garbage)
def test_whatever_comes_gets_one_answer_or_none(data: bytes) -> None:
    sent = _Sent()
    if not sent.serve(data):
        assert len(data) < 12 or data[2] & 0x80
        return
    (answer,) = sent.answers
    assert answer[:2] == data[:2]
    assert answer[2] & 0x80
    assert len(answer) <= 512
    assert all(0 < len(name) <= 253 and not set(name) - LETTERS for name in sent.asked)
