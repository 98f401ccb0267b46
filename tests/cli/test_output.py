from __future__ import annotations

import json

import pytest

from skerry.cli import output


@pytest.mark.parametrize("show", [output.print_json, output.print_json_line])
def test_json_of_what_a_box_said_does_nothing_to_a_terminal(show: object, capfd: pytest.CaptureFixture[str]) -> None:
    said = "".join(map(chr, range(0xA0))) + "ä€😀"
    show({said: said})  # type: ignore[operator]
    shown = capfd.readouterr().out
    assert json.loads(shown) == {said: said}
    assert not [c for c in shown if c != "\n" and (c < " " or "\x7f" <= c < "\xa0")]
