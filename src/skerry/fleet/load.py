"""Loads a fleet from its file, checked whole: every mistake is told, with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET, UnsetType

from skerry.fleet import compose, tree
from skerry.fleet.building import (
    FLEET_FIELDS,
    PHASE_FIELDS,
    Fields,
    Placed,
    build_fleet,
    build_phase,
    over,
    phase_fields,
)
from skerry.fleet.model import FleetSpec, meant
from skerry.fleet.reading import Reading
from skerry.fleet.tree import Items, Node, Problems, Scalar, Table

_SHORT = ("provider", "image")
"""Fields of the file itself that stand for the same among the defaults."""
TOP_FIELDS = (*FLEET_FIELDS, *_SHORT, "defaults", "phases")
EXTENSION = "x-"
"""How keys begin that are nobody's: a place for anchors."""


def load(path: Path | str, text: str | None = None, *, provider: str | None = None) -> FleetSpec:
    """The fleet of a file, ours or docker-compose's; `text` stands for what is in it, `provider` for one that it does
    not name. Raises `InvalidFleet` with all that is wrong."""
    path = Path(path)
    problems = Problems(str(path))
    root = tree.parse(tree.read(path, problems) if text is None else text, problems)
    reading = Reading(problems, path.absolute().parent)
    fleet = None
    if not isinstance(root, Table):
        reading.wrong(root, "a fleet's file must be a table with 'name' and 'phases'")
    elif root.get("services") is not None:
        fleet = compose.read(reading, root, path, provider)
    else:
        fleet = _read_fleet(reading, root, provider)
    problems.raise_if_any()
    assert fleet is not None
    return fleet


def _read_fleet(reading: Reading, root: Table, provider: str | None) -> FleetSpec | None:
    own = Table(root.line, root.column, tuple(each for each in root.entries if each.key.text in FLEET_FIELDS))
    short = Table(root.line, root.column, tuple(each for each in root.entries if each.key.text in _SHORT))
    for key, _ in root.entries:
        if key.text not in TOP_FIELDS and not key.text.startswith(EXTENSION):
            reading.wrong(key, f"unknown field {key.text!r}{meant(key.text, TOP_FIELDS)}")
    fields = reading.fields(own, FLEET_FIELDS)
    given: Fields = {} if provider is None else {"provider": (provider, root)}
    defaults = over(given | phase_fields(reading, short), _defaults(reading, root.get("defaults")))
    placed = [each for each in _phases(reading, root, defaults) if each is not None]
    if root.get("name") is None:
        reading.wrong(root, "name: must be given: the fleet's members are found by it")
    return build_fleet(reading, fields, placed, root) if "name" in fields else None


def _defaults(reading: Reading, node: Node | None) -> Fields:
    reading = reading.within("defaults")
    table = UNSET if node is None else reading.table(node, "defaults")
    return {} if isinstance(table, UnsetType) else phase_fields(reading, table)


def _phases(reading: Reading, root: Table, defaults: Fields) -> Iterator[Placed | None]:
    """Phases as a list of tables with a name each, or as a table by their names."""
    node = root.get("phases")
    if isinstance(node, Table) and node.entries:
        for key, value in node.entries:
            about = reading.within(f"phase {key.text!r}")
            table = about.table(value, "it")
            if not isinstance(table, UnsetType):
                yield build_phase(about, key.text, over(defaults, phase_fields(about, table)), key)
    elif isinstance(node, Items) and node.items:
        for item in node.items:
            yield _listed(reading, item, defaults)
    else:
        reading.wrong(node or root, "phases: must be a list of phases, or a table of them by name, with at least one")


def _listed(reading: Reading, node: Node, defaults: Fields) -> Placed | None:
    if not isinstance(node, Table):
        reading.wrong(node, "phases: each must be a table with a name")
        return None
    named = node.get("name")
    name = named.text if isinstance(named, Scalar) else None
    about = reading.within(f"phase {name!r}" if name else "a phase")
    fields = phase_fields(about, node, {"name": Reading.text, **PHASE_FIELDS})
    if name is None or "name" not in fields:
        if named is None:
            about.wrong(node, "name: must be given")
        return None
    place = fields.pop("name")[1]
    return build_phase(about, name, over(defaults, fields), place)
