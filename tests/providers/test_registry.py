"""Entry points are found where packages declare them, as `importlib.metadata` finds them."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from skerry import providers
from skerry.errors import NotFound
from skerry.providers import registry


def test_every_installed_provider_is_found_as_the_standard_library_finds_it() -> None:
    installed = entry_points(group=providers.GROUP)
    assert installed
    for point in installed:
        assert registry.find(providers.GROUP, point.name) == point.value


def test_a_provider_of_another_package_is_found_and_what_is_broken_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("a.dist-info", b"\xff\xfe"),
        ("b.dist-info", b"[console_scripts]\nmine = wrong:Place\n"),
        (
            "c.dist-info",
            b"[x]\ny = z\n[skerry.providers]\n# one\nmine = theirs.boxes:Boxes [extra]\n[more]\nmine = wrong:Too\n",
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry_points.txt").write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "not-there")
    assert registry.find(providers.GROUP, "mine") == "theirs.boxes:Boxes"
    assert registry.find(providers.GROUP, "yours") is None


def test_a_provider_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match=r"called 'nowhere'; there are: .*local"):
        providers.provider_class("nowhere")
