"""Events of an interpreter, as a hostile box may tell them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import AgentProtocolError
from skerry.sandbox import interpreter
from skerry.sandbox.interpreter import _Lines

ID = "0123456789abcdef"


def line(**fields: object) -> bytes:
    return b"\n" + json.dumps({"id": ID, "event": "stdout", **fields}).encode() + b"\n"


def test_the_rest_of_an_event_that_began_before_is_left_out() -> None:
    lines = _Lines(ID)
    assert lines.feed(b'text": "' + ID.encode() + b'"}') == []
    assert [each.text for each in lines.feed(b"\n" + line(text="mine"))] == ["mine"]


def test_events_may_come_in_any_pieces() -> None:
    whole = line(text="one") + line(text="two\n") + line(id="other", text="no")
    for size in (1, 2, 7, 1000):
        lines, found = _Lines(ID), []
        for at in range(0, len(whole), size):
            found += [each.text for each in lines.feed(whole[at : at + size])]
        assert found == ["one", "two\n"]


@pytest.mark.parametrize(
    "hostile",
    [
        line(text=5),
        line(count=-1),
        line(count=10**30),
        line(data=[1]),
        line(death={"signal": "x"}),
        line(text="\ud800"),
        b"\n" + b'{"id":"' + ID.encode() + b'","event":"stdout","data":' + b"[" * 100_000 + b"\n",
        b"\n\xff\xfe" + ID.encode() + b"\n",
        b"\nNaN\n",
    ],
)
def test_what_has_the_wrong_form_is_left_out(hostile: bytes) -> None:
    lines = _Lines(ID)
    assert [each.text for each in lines.feed(hostile + line(text="after"))] == ["after"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_MAX_LINE", 1000)
    lines = _Lines(ID)
    lines.feed(b"x" * 900)
    with pytest.raises(AgentProtocolError):
        lines.feed(b"x" * 900)


def test_events_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_MAX_RUN", 1000)
    lines = _Lines(ID)
    lines.feed(b"x\n" * 400)
    with pytest.raises(AgentProtocolError):
        lines.feed(b"x\n" * 400)


@given(st.lists(st.binary(max_size=60)))
def test_no_bytes_break_it(pieces: list[bytes]) -> None:
    lines = _Lines(ID)
    for piece in pieces:
        lines.feed(piece)
    assert [each.text for each in lines.feed(b"\n" + line(text="after"))] == ["after"]
