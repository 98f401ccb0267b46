"""The description of the calls by which sandboxes are used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from skerry.surfaces.rest import events, execution, files, openapi, processes, sandboxes, terminals
from skerry.surfaces.rest.route import Route

_NOUNS = (sandboxes, execution, processes, files, terminals, events)
_ROUTES = [route for noun in _NOUNS for route in noun.routes.all]
_DOCUMENT = openapi.Document(_ROUTES).content


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def test_all_that_is_referred_to_is_there() -> None:
    schemas = _DOCUMENT["components"]["schemas"]
    named = {reference.removeprefix("#/components/schemas/") for reference in _references(_DOCUMENT)}
    assert named <= set(schemas)


def test_every_call_has_a_name_of_its_own() -> None:
    names = [call["operationId"] for path in _DOCUMENT["paths"].values() for call in path.values()]
    assert len(names) == len(set(names))


def test_every_call_says_what_it_does() -> None:
    assert all(call["summary"] for path in _DOCUMENT["paths"].values() for call in path.values())


@pytest.mark.parametrize("route", [each for each in _ROUTES if each.method != "WEBSOCKET"], ids=lambda each: each.name)
def test_a_call_is_described_as_it_is(route: Route) -> None:
    call = _DOCUMENT["paths"][route.path][route.method.lower()]
    in_path = {each["name"] for each in call["parameters"] if each["in"] == "path"}
    assert in_path == set(re.findall(r"{(\w+)}", route.path))
    names = [(each["in"], each["name"]) for each in call["parameters"]]
    assert len(names) == len(set(names))
    assert ("requestBody" in call) == bool(route.takes)
    (status,) = set(call["responses"]) - {"default"} - {str(each) for each in route.also}
    assert ("content" in call["responses"][status]) == (status != "204")
