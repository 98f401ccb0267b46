"""Makes phases and fleets from fields that were read, and notes what is wrong at the fields' places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from skerry.config import variable
from skerry.errors import InvalidSpec
from skerry.fleet.model import MAX_PER_PHASE, FleetSpec, OnFailure, Phase, faults
from skerry.fleet.reading import Reader, Reading
from skerry.fleet.tree import Items, Node, Table
from skerry.spec import Spec, SpecOptions

T = TypeVar("T")
Fields = dict[str, tuple[Any, Node]]
"""Values by the names of their fields, each with its place in the file."""


def _on_failure(reading: Reading, node: Node, field: str) -> Any:
    text = reading.text(node, field)
    if text in list(OnFailure):
        return OnFailure(text)
    choices = " or ".join(OnFailure)
    return reading.wrong(node, f"{field}: must be {choices}") if isinstance(text, str) else text


_SPEC_READERS: Mapping[str, Reader] = {
    "root": Reading.path,
    "writable_root": Reading.flag,
    "memory": Reading.quantity,
    "cpus": Reading.number,
    "pids": Reading.whole,
    "disk": Reading.quantity,
    "env": Reading.environment,
    "mounts": Reading.mounts,
    "workspace": Reading.workspace,
    "data": Reading.flag,
    "cache_paths": Reading.pairs,
    "lifetime": Reading.quantity,
    "idle": Reading.quantity,
    "labels": Reading.pairs,
}
"""The options of a spec that are not plain texts."""

SPEC_FIELDS = frozenset(SpecOptions.__annotations__) - {"project", "name"}
ALIASES = {"cpu": "cpus"}
PHASE_FIELDS: Mapping[str, Reader] = {
    "count": Reading.whole,
    "wait_for": Reading.texts,
    "on_failure": _on_failure,
    "timeout": Reading.seconds,
    "max_parallel": Reading.whole,
    "setup": Reading.commands,
    "files": Reading.files,
    "healthcheck": Reading.healthcheck,
    **{name: _SPEC_READERS.get(name, Reading.text) for name in sorted(SPEC_FIELDS)},
    **{alias: _SPEC_READERS[name] for alias, name in ALIASES.items()},
}
"""All that a phase can have, but for its name."""
FLEET_FIELDS: Mapping[str, Reader] = {
    "name": Reading.text,
    "project": Reading.text,
    "timeout": Reading.seconds,
    "max_parallel": Reading.whole,
    "max_per_phase": Reading.whole,
}
_MERGED = ("env", "labels")
_SECONDS = "_s"
_NEEDED = ("name", "phases")


class Placed(NamedTuple):
    """A phase, and where it and its fields are."""

    phase: Phase
    place: Node
    fields: Fields


def phase_fields(reading: Reading, table: Table, readers: Mapping[str, Reader] = PHASE_FIELDS) -> Fields:
    """The fields of a phase by their one name each."""
    found: Fields = {}
    for key, value in reading.fields(table, readers).items():
        name = ALIASES.get(key, key)
        if name in found:
            reading.wrong(value[1], f"{key} and {name} are the same; give one of them")
        found[name] = value
    return found


def over(base: Fields, own: Fields) -> Fields:
    """The phase's own fields over the defaults; variables and labels are joined."""
    joined = {key: ({**base[key][0], **own[key][0]}, own[key][1]) for key in _MERGED if key in base and key in own}
    return {**base, **own, **joined}


def build_phase(reading: Reading, name: str, fields: Fields, place: Node) -> Placed | None:
    """The phase, without what is wrong in it, so that the others' mistakes can be found too."""
    nodes = {key: node for key, (_, node) in fields.items()}
    options = {key: value for key, (value, _) in fields.items() if key in SPEC_FIELDS}
    own = {key: value for key, (value, _) in fields.items() if key not in SPEC_FIELDS}
    env: dict[str, str | None] = options.pop("env", {})
    inherited = tuple(sorted(key for key, value in env.items() if value is None))
    options["env"] = {key: text for key, value in env.items() if (text := _value(key, value)) is not None}
    spec = _construct(reading, Spec.of, options, nodes, place)
    if "timeout" in own:
        own["timeout_s"] = own.pop("timeout")
    nodes = {"name": place, **nodes}
    made = own | {"name": name, "spec": spec or Spec(), "inherited": inherited}
    phase = _construct(reading, Phase, made, nodes, place) or _construct(
        reading, Phase, own | {"name": name}, nodes, place
    )
    return None if phase is None else Placed(phase, place, fields)


def build_fleet(reading: Reading, fields: Fields, placed: Sequence[Placed], place: Node) -> FleetSpec | None:
    """The fleet, if all is right; what is wrong between the phases is noted at their places."""
    most = fields.get("max_per_phase", (MAX_PER_PHASE, place))[0]
    wrong = list(faults([each.phase for each in placed], most))
    for fault in wrong:
        at = placed[fault.position]
        node = at.fields[fault.field][1] if fault.field in at.fields else at.place
        if fault.item is not None and isinstance(node, Items):
            node = node.items[fault.item]
        elif fault.item is not None and isinstance(node, Table):
            node = node.entries[fault.item].key
        reading.within(f"phase {fault.phase!r}").wrong(node, fault.message)
    values = {key: value for key, (value, _) in fields.items()}
    if "timeout" in values:
        values["timeout_s"] = values.pop("timeout")
    values["phases"] = () if wrong else tuple(each.phase for each in placed)
    return _construct(reading, FleetSpec, values, {key: node for key, (_, node) in fields.items()}, place)


def _value(name: str, value: str | None) -> str | None:
    return variable(name) if value is None and name and "=" not in name and "\0" not in name else value


def _construct(
    reading: Reading, make: Callable[..., T], values: dict[str, Any], nodes: Mapping[str, Node], place: Node
) -> T | None:
    """Make it; a field that is refused is noted and left out, and so on until no other is."""
    while True:
        try:
            return make(**values)
        except InvalidSpec as error:
            field = (error.field or "").removesuffix(_SECONDS)
            reading.wrong(nodes.get(field, place), str(error))
            left_out = [key for key in (field, field + _SECONDS) if values.pop(key, None) is not None]
            if not left_out or field in _NEEDED:
                return None
