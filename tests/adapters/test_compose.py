"""Compose files of frameworks' tasks on their way to a fleet, without any framework."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skerry.adapters.compose import Build, read
from skerry.errors import InvalidFleet
from skerry.fleet.load import load


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_variables_are_filled_in_as_compose_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "ours")
    monkeypatch.delenv("NOBODYS", raising=False)
    text = """
services:
  a:
    image: ${IMAGE}
    environment: [A=$OF_THE_PROGRAM, "B=${NOBODYS:-x y}", "C=${EMPTY-x}", "D=${EMPTY:-x}", "E=$$HOME"]
"""
    path = write(tmp_path, "c.yaml", text)
    project = read([path], {}, {"IMAGE": "i", "EMPTY": "", "OF_THE_PROGRAM": "theirs"})
    assert project.content["services"]["a"]["environment"] == ["A=theirs", "B=x y", "C=", "D=x", "E=$HOME"]
    assert project.builds == {"a": Build(context=tmp_path, dockerfile="", image="i")}
    (phase,) = load(path, project.as_text(project.with_images({"a": "i"}))).phases
    assert phase.spec.env["E"] == "$HOME"
    with pytest.raises(InvalidFleet, match="'IMAGE' has no value"):
        read([path], {}, {})


def test_a_file_lies_over_those_before_it_and_tables_are_merged(tmp_path: Path) -> None:
    below = write(tmp_path, "a.yaml", "services: {a: {image: old, expose: [1], labels: {x: 1, y: 2}}}")
    above = write(tmp_path, "b.yaml", "services: {a: {image: new, expose: [2], labels: {y: 3}}, b: {image: other}}")
    services = read([below, above], {"services": {"main": {}}}, {}).content["services"]
    assert services["a"] == {"image": "new", "expose": [1, 2], "labels": {"x": 1, "y": 3}}
    assert list(services) == ["main", "a", "b"]


def test_what_is_built_is_apart_and_its_key_changes_with_what_it_is_made_of(tmp_path: Path) -> None:
    text = "services: {a: {build: ./x, cpus: 1}, b: {build: {context: ., args: [A=1, B], target: t, dockerfile: D}}}"
    project = read([write(tmp_path, "c.yaml", text)], {}, {})
    assert project.builds == {
        "a": Build(context=tmp_path / "x"),
        "b": Build(context=tmp_path, args={"A": "1", "B": ""}, target="t", dockerfile="D"),
    }
    assert json.loads(project.as_text(project.with_images({"a": "i", "b": "j"}))) == {
        "services": {"a": {"cpus": 1, "image": "i"}, "b": {"image": "j"}}
    }
    build = project.builds["b"]
    others = [build._replace(target="u"), build._replace(args=None), build._replace(dockerfile="E")]
    assert len({each.key("files") for each in [build, *others]} | {build.key("other files")}) == 5


@pytest.mark.parametrize("text", ["services: [a]", "a: 1", "services: {a: 1}", "services: {a: {", "[]"])
def test_a_file_that_is_none_of_compose_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidFleet, match=r"c\.yaml"):
        read([write(tmp_path, "c.yaml", text)], {}, {})
