"""Loads a fleet from its file, checked whole: every mistake is told, with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from skerry.fleet import compose, tree
from skerry.fleet.fields import FLEET_FIELDS, PHASE_FIELDS, BadValue, Fields, Placed, Reading
from skerry.fleet.model import FleetSpec, suggestion
from skerry.fleet.tree import Items, Node, Problems, Scalar, TableNode

_SHORT = ("provider", "image")  # fields of the file itself that stand for the same among the defaults
TOP_FIELDS = (*FLEET_FIELDS, *_SHORT, "defaults", "phases")
EXTENSION = "x-"  # how keys begin that are nobody's: a place for anchors


def load(
    path: Path | str,
    text: str | None = None,
    *,
    provider: str | None = None,
    asks_providers: bool = False,
    sets: Mapping[str, Sequence[str]] | None = None,
    is_foreign: bool = False,
) -> FleetSpec:
    """The fleet of a file, ours or docker-compose's, or of its `text`. Raises InvalidFleet with all that is wrong; with
    `asks_providers` also for phases without an image where their provider makes boxes of images, with `sets`, the
    installation's own, for sets of rules that there are not. In a text that `is_foreign` it is a mistake to name a file
    or a variable of this host that would be read."""
    path = Path(path)
    problems = Problems(str(path))
    root = tree.parse(tree.read(path, problems) if text is None else text, problems)
    reading = Reading(problems, path.absolute().parent, asks_providers=asks_providers, sets=sets, is_foreign=is_foreign)
    fleet = None
    if not isinstance(root, TableNode):
        reading.wrong(root, "a fleet's file must be a table with 'name' and 'phases'")
    elif root.get("services") is not None:
        fleet = compose.read(reading, root, path, provider)
    else:
        fleet = _read_fleet(reading, root, provider)
    problems.raise_if_any()
    assert fleet is not None
    return fleet


def _read_fleet(reading: Reading, root: TableNode, provider: str | None) -> FleetSpec | None:
    own = TableNode(root.line, root.column, tuple(each for each in root.entries if each.key.text in FLEET_FIELDS))
    short = TableNode(root.line, root.column, tuple(each for each in root.entries if each.key.text in _SHORT))
    for key, _ in root.entries:
        if key.text not in TOP_FIELDS and not key.text.startswith(EXTENSION):
            reading.wrong(key, f"unknown field {key.text!r}{suggestion(key.text, TOP_FIELDS)}")
    fields = reading.fields(own, FLEET_FIELDS)
    given: Fields = {} if provider is None else {"provider": (provider, root)}
    defaults = _defaults(reading, root.get("defaults"), reading.phase_fields(short, given))
    placed = [each for each in _phases(reading, root, defaults) if each is not None]
    if root.get("name") is None:
        reading.wrong(root, "name: must be given: the fleet's members are found by it")
    return reading.build_fleet(fields, placed, root) if "name" in fields else None


def _defaults(reading: Reading, node: Node | None, base: Fields) -> Fields:
    reading = reading.within("defaults")
    with suppress(BadValue):
        return base if node is None else reading.phase_fields(reading.table(node, "defaults"), base)
    return base


def _phases(reading: Reading, root: TableNode, defaults: Fields) -> Iterator[Placed | None]:
    """Phases as a list of tables with a name each, or as a table by their names."""
    node = root.get("phases")
    if isinstance(node, TableNode) and node.entries:
        for key, value in node.entries:
            about = reading.within(f"phase {key.text!r}")
            with suppress(BadValue):
                yield about.build_phase(key.text, about.phase_fields(about.table(value, "it"), defaults), key)
    elif isinstance(node, Items) and node.items:
        for item in node.items:
            with suppress(BadValue):
                yield _listed(reading, item, defaults)
    else:
        reading.wrong(node or root, "phases: must be a list of phases, or a table of them by name, with at least one")


def _listed(reading: Reading, node: Node, defaults: Fields) -> Placed | None:
    if not isinstance(node, TableNode):
        raise reading.wrong(node, "phases: each must be a table with a name")
    named = node.get("name")
    name = named.text if isinstance(named, Scalar) else None
    about = reading.within(f"phase {name!r}" if name else "a phase")
    fields = about.phase_fields(node, defaults, {"name": Reading.text, **PHASE_FIELDS})
    if named is None:
        raise about.wrong(node, "name: must be given")
    if name is None or "name" not in fields:
        raise BadValue
    place = fields.pop("name")[1]
    return about.build_phase(name, fields, place)
