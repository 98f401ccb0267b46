from __future__ import annotations

import json

import pytest
from agent.lying_agent import LyingAgent, Message, requests_only, sandbox_of

from skerry.cli import output
from skerry.cli.logs import Lines
from skerry.errors import PathDenied
from skerry.model.states import State


@pytest.mark.parametrize("show", [output.print_json, output.print_json_line])
def test_json_of_what_a_box_said_does_nothing_to_a_terminal(show: object, capfd: pytest.CaptureFixture[str]) -> None:
    said = "".join(map(chr, range(0xA0))) + "ä€😀"
    show({said: said})  # type: ignore[operator]
    shown = capfd.readouterr().out
    assert json.loads(shown) == {said: said}
    assert not [c for c in shown if c != "\n" and (c < " " or "\x7f" <= c < "\xa0")]


VALUES = [
    {}, [], {"a": {}, "b": [], "c": [1, {"d": None}], "e": True, "f": 1.5}, "x", [[1], [2, 3]], {"é": "\u2028"},
    {"long": "a\0é\ud800😀" * 50_000, "b": "x"}, (1, 2), {"enum": State.READY, "float": 1e300},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_json_in_pieces_is_what_json_is(value: object, capfd: pytest.CaptureFixture[str]) -> None:
    output.print_json(value)
    assert capfd.readouterr().out == _escaped(json.dumps(value, indent=2, ensure_ascii=False)) + "\n"
    output.print_json_line(value)
    assert capfd.readouterr().out == _escaped(json.dumps(value, ensure_ascii=False)) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\u2028", "\\u2028").encode(errors="replace").decode()


FORGERIES = [
    "a\nskerry: fine",
    "a\rskerry: b",
    "a\x1b[1A\x1b[2Kskerry: b",
    "a\u2028b",
    "a\x85b",
    "a\u202eb",
    "\ud800",
]


@pytest.mark.parametrize("text", FORGERIES)
def test_what_a_box_says_in_an_error_begins_no_line_of_ours(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    output.say(f"box: {text}")
    output.print_table(("A",), [(text,)])
    shown = capfd.readouterr()
    assert shown.err.count("\nskerry:") == 0
    assert len(shown.out.splitlines()) == 2
    assert all(c == "\n" or c.isprintable() for c in shown.err + shown.out)


@pytest.mark.parametrize("text", FORGERIES)
async def test_an_error_of_an_agent_is_one_line(text: str) -> None:
    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        error = {"code": -32000, "message": text.encode(errors="replace").decode(), "data": {"kind": "denied"}}
        agent.send({"id": message["id"], "error": error})

    with pytest.raises(PathDenied) as raised:
        await sandbox_of(script).files.stat("x")
    assert str(raised.value).isprintable()


async def test_a_member_cannot_speak_as_another(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = Lines(["one", "two"])
    said = b"a\r\nb\rtwo | c\x1b[2K\x1b[1Atwo | d\xc2\x85two | e\xe2\x80\xa8two | f\n\ttab \xff \xc3\xa9\nlast"
    for fd in (1, 2):
        own = lines.of("one")
        await own.write(fd, said)
        await own.end()
    shown = capfdbinary.readouterr()
    for each in (shown.out, shown.err):
        assert [line[:6] for line in each.decode().splitlines()] == ["one | "] * 4
        assert each.startswith(b"one | a\none | b\\rtwo | c\\x1b[2K")
        assert "\none | \ttab \ufffd é\none | last\n" in each.decode()
