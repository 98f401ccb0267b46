"""Reads a docker-compose file as a fleet: a service is a phase. What cannot be mapped is a mistake, with its line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from skerry.fleet import tree
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
from skerry.fleet.model import FleetSpec, Healthcheck
from skerry.fleet.reading import HEALTH_NAMES, Reader, Reading, kind_of
from skerry.fleet.tree import Entry, Items, Node, Problems, Scalar, Table
from skerry.spec import Mount, Network

OURS = "x-skerry"
"""What a service says to us alone: fields of a phase."""
_EXTENSION = "x-"
_HEALTHY = "service_healthy"
_CONDITIONS = ("service_started", _HEALTHY)
_IDLE = (("sleep", "infinity"), ("sleep", "inf"), ("tail", "-f", "/dev/null"))
"""Commands that do nothing but keep a container there, as a sandbox is anyway."""
_DOLLAR = re.compile(r"\$\$|\$")
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|m|us|s))+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|us|s)")
_SPAN_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000001}
_HINTS = {
    "build": "build the image first (`skerry image build`) and name it in 'image'",
    "command": f"a sandbox waits for commands; run this one with `skerry fleet exec`, or in setup below {OURS}",
    "container_name": "members are named by their phase and index",
    "entrypoint": f"a sandbox waits for commands; run this one with `skerry fleet exec`, or in setup below {OURS}",
    "env_file": "write the variables below 'environment'",
    "networks": "use network_mode: none, host or bridge",
    "ports": "forward them with `skerry port` once it is up",
    "secrets": "name a variable of yours without a value below 'environment'",
}


def from_compose(text: str, path: Path | str, *, provider: str | None = None) -> FleetSpec:
    """The fleet that a docker-compose file describes."""
    path = Path(path)
    problems = Problems(str(path))
    root = tree.parse(text, problems)
    reading = Reading(problems, path.absolute().parent)
    fleet = None
    if isinstance(root, Table):
        fleet = read(reading, root, path, provider)
    else:
        reading.wrong(root, "a docker-compose file must be a table with 'services'")
    problems.raise_if_any()
    assert fleet is not None
    return fleet


def read(reading: Reading, root: Table, path: Path, provider: str | None) -> FleetSpec | None:
    """The fleet of a file that was parsed; what is wrong is noted."""
    root = Table(root.line, root.column, tuple(_without_dollars(reading, each) for each in root.entries))
    for key, node in root.entries:
        if key.text not in ("name", "version", "services", OURS) and not _is_extension(key) and not _is_empty(node):
            _refuse(reading, key, "")
    fields = _fleet_fields(reading, root, path)
    services = reading.table(root.get("services") or root, "services")
    placed: list[Placed] = []
    if not isinstance(services, UnsetType):
        given: Fields = {} if provider is None else {"provider": (provider, root)}
        made = (_service(reading, key, node, given) for key, node in services.entries)
        placed = [each for each in made if each is not None]
        if not services.entries:
            reading.wrong(services, "services: there is none")
        _refuse_unhealthy(reading, services, placed)
    return build_fleet(reading, fields, placed, root)


def _fleet_fields(reading: Reading, root: Table, path: Path) -> Fields:
    """The name as docker compose takes it, from the folder if need be; and what is ours."""
    folder = re.sub(r"[^a-z0-9_-]", "", path.absolute().parent.name.lower()).lstrip("_-") or "fleet"
    fields: Fields = {"name": (folder, root)}
    if (ours := root.get(OURS)) is not None:
        table = reading.table(ours, OURS)
        readers = {key: reader for key, reader in FLEET_FIELDS.items() if key != "name"}
        fields |= {} if isinstance(table, UnsetType) else reading.fields(table, readers, OURS)
    if (node := root.get("name")) is not None and not isinstance(name := reading.text(node, "name"), UnsetType):
        fields["name"] = (name, node)
    return fields


def _service(reading: Reading, key: Scalar, node: Node, given: Fields) -> Placed | None:
    about = reading.within(f"service {key.text!r}")
    table = about.table(node, "it")
    if isinstance(table, UnsetType):
        return None
    known = []
    for entry in table.entries:
        if entry.key.text in _SERVICE:
            known.append(entry)
        elif entry.key.text != OURS and not _is_extension(entry.key) and not _is_harmless(entry):
            _refuse(about, entry.key, "")
    read = about.fields(Table(table.line, table.column, tuple(known)), {name: it[1] for name, it in _SERVICE.items()})
    fields: Fields = dict(given)
    for name, value in read.items():
        fields |= value[0] if name == "deploy" else {_SERVICE[name][0]: value}
    fields.setdefault("network", (Network.BRIDGE.value, key))
    if (ours := table.get(OURS)) is not None and not isinstance(own := about.table(ours, OURS), UnsetType):
        fields = over(fields, phase_fields(about.within(f"service {key.text!r}: {OURS}"), own))
    if fields.get("healthcheck", ("", key))[0] is None:
        del fields["healthcheck"]
    return build_phase(about, key.text, fields, key)


def _refuse(reading: Reading, key: Scalar, inside: str) -> None:
    hint = _HINTS.get(key.text, "take it away, or use a fleet file")
    reading.wrong(key, f"{inside}{key.text!r} cannot be mapped to a fleet: {hint}")


def _is_extension(key: Scalar) -> bool:
    return key.text.startswith(_EXTENSION) and key.text != OURS


def _is_empty(node: Node) -> bool:
    return (isinstance(node, Table) and not node.entries) or (isinstance(node, Scalar) and node.value is None)


def _is_harmless(entry: Entry) -> bool:
    """What says only what is so anyway."""
    key, node = entry
    if key.text == "command":
        words = tuple(each.text for each in node.items if isinstance(each, Scalar)) if isinstance(node, Items) else ()
        return (tuple(node.text.split()) if isinstance(node, Scalar) else words) in _IDLE
    return key.text == "restart" and isinstance(node, Scalar) and node.text == "no"


def _without_dollars(reading: Reading, value: Any) -> Any:
    """`$$` is a dollar; a variable would have to be filled in, and we do not."""
    if isinstance(value, Entry):
        return Entry(value.key, _without_dollars(reading, value.value))
    if isinstance(value, Items):
        return Items(value.line, value.column, tuple(_without_dollars(reading, each) for each in value.items))
    if isinstance(value, Table):
        return Table(value.line, value.column, tuple(_without_dollars(reading, each) for each in value.entries))
    if "$" not in value.text:
        return value
    if any(found == "$" for found in _DOLLAR.findall(value.text)):
        reading.wrong(value, "variables are not filled in: write the value, or $$ for a dollar sign")
    return Scalar(value.line, value.column, value.text.replace("$$", "$"), value.plain)


def _mounts(reading: Reading, node: Node, field: str) -> Any:
    found = (_mount(reading, each, field) for each in reading.items(node, field))
    return tuple(each for each in found if not isinstance(each, UnsetType))


def _mount(reading: Reading, node: Node, field: str) -> Mount | UnsetType:
    """A folder or file of the host; volumes that docker would keep by a name are not."""
    if isinstance(node, Table):
        return _long_mount(reading, node, field)
    text = reading.text(node, field)
    if isinstance(text, UnsetType):
        return UNSET
    source, colon, rest = text.partition(":")
    if not colon or not source.startswith((".", "/", "~")):
        return reading.wrong(node, f"{field}: {text!r} is a volume by name; name a folder of the host, as ./data:/data")
    return reading.attempt(node, lambda: Mount.parse(f"{reading.resolve(source)}:{rest}"))


def _long_mount(reading: Reading, node: Table, field: str) -> Mount | UnsetType:
    kind = node.get("type")
    if not (isinstance(kind, Scalar) and kind.text == "bind"):
        return reading.wrong(kind or node, f"{field}: only 'type: bind' can be mapped to a fleet")
    readers: Mapping[str, Reader] = {
        "type": Reading.text,
        "source": Reading.path,
        "target": Reading.text,
        "read_only": Reading.flag,
    }
    given = {key: value for key, (value, _) in reading.fields(node, readers, field).items() if key != "type"}
    if not {"source", "target"} <= given.keys():
        return reading.wrong(node, f"{field}: source and target must be given")
    return reading.attempt(node, lambda: Mount(**given))


def _depends_on(reading: Reading, node: Node, field: str) -> Any:
    if not isinstance(node, Table):
        return reading.texts(node, field)
    for key, value in node.entries:
        _check_dependency(reading, value, f"{field}: {key.text!r}")
    return tuple(key.text for key, _ in node.entries)


def _check_dependency(reading: Reading, node: Node, what: str) -> None:
    table = reading.table(node, what)
    for key, value in () if isinstance(table, UnsetType) else table.entries:
        text = value.text if isinstance(value, Scalar) else ""
        allowed = {"condition": _CONDITIONS, "required": ("true",), "restart": ("false",)}.get(key.text, ())
        if text not in allowed:
            choices = f"; it can be {' or '.join(allowed)}" if allowed else ""
            shown = kind_of(value) if allowed else "given"
            reading.wrong(value, f"{what}: {key.text} is {shown}, which cannot be mapped to a fleet{choices}")


def _refuse_unhealthy(reading: Reading, services: Table, placed: list[Placed]) -> None:
    """Whoever waits for a service to be healthy needs one that can be."""
    checked = {each.phase.name for each in placed if each.phase.healthcheck is not None}
    for name, node in services.entries:
        waits = node.get("depends_on") if isinstance(node, Table) else None
        for key, value in waits.entries if isinstance(waits, Table) else ():
            condition = value.get("condition") if isinstance(value, Table) else None
            known = services.get(key.text) is not None
            if known and key.text not in checked and isinstance(condition, Scalar) and condition.text == _HEALTHY:
                text = f"depends_on: {key.text!r} has no healthcheck, so it is never {_HEALTHY}"
                reading.within(f"service {name.text!r}").wrong(condition, text)


def _healthcheck(reading: Reading, node: Node, field: str) -> Any:
    table = reading.table(node, field)
    if isinstance(table, UnsetType):
        return UNSET
    given = {HEALTH_NAMES.get(key, key): value for key, (value, _) in reading.fields(table, _HEALTH, field).items()}
    if given.pop("disable", False) or ("test" in given and given["test"] is None):
        return None
    if "test" not in given:
        return UNSET if table.get("test") is not None else reading.wrong(node, f"{field}: test must be given")
    command = given.pop("test")
    defaults = {"interval_s": 30.0, "timeout_s": 30.0, "retries": 3}
    return reading.attempt(node, lambda: Healthcheck(command=command, **{**defaults, **given}))


def _test(reading: Reading, node: Node, field: str) -> Any:
    """A line for the shell, or a list that begins with CMD, CMD-SHELL or NONE; None is no check."""
    command = reading.command(node, field)
    if not isinstance(command, tuple):
        return command
    match command:
        case ("NONE",):
            return None
        case ("CMD", _, *_):
            return command[1:]
        case ("CMD-SHELL", line):
            return line
    return reading.wrong(node, f"{field}: a list must begin with CMD, CMD-SHELL or NONE, and name a command")


def _span(reading: Reading, node: Node, field: str) -> Any:
    """A duration as docker compose writes it: 1m30s."""
    text = node.text if isinstance(node, Scalar) else ""
    if not _SPAN.fullmatch(text):
        return reading.wrong(node, f"{field}: must be a duration such as 30s or 1m30s, and is {kind_of(node)}")
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in _SPAN_PART.findall(text))


def _deploy(reading: Reading, node: Node, field: str) -> Any:
    """The fields of a phase that `deploy` gives: how many, and their limits."""
    found: Fields = {}
    for key, value in _inside(reading, node, field):
        if key.text == "replicas":
            found["count"] = (reading.whole(value, "deploy: replicas"), value)
        elif key.text == "resources":
            found |= _resources(reading, value)
        elif (key.text, value.text if isinstance(value, Scalar) else "") != ("mode", "replicated"):
            _refuse(reading, key, "deploy: ")
    return {name: value for name, value in found.items() if value[0] is not UNSET}


def _resources(reading: Reading, node: Node) -> Fields:
    found: Fields = {}
    for key, value in _inside(reading, node, "deploy: resources"):
        if key.text != "limits":
            _refuse(reading, key, "deploy: resources: ")
            continue
        for limit, bound in _inside(reading, value, "deploy: resources: limits"):
            if limit.text in ("cpus", "memory", "pids"):
                found[limit.text] = (PHASE_FIELDS[limit.text](reading, bound, limit.text), bound)
            else:
                _refuse(reading, limit, "deploy: resources: limits: ")
    return found


def _inside(reading: Reading, node: Node, field: str) -> tuple[Entry, ...]:
    table = reading.table(node, field)
    return () if isinstance(table, UnsetType) else table.entries


_SERVICE: Mapping[str, tuple[str, Reader]] = {
    "image": ("image", Reading.text),
    "environment": ("env", Reading.environment),
    "labels": ("labels", Reading.pairs),
    "user": ("user", Reading.text),
    "working_dir": ("cwd", Reading.text),
    "volumes": ("mounts", _mounts),
    "mem_limit": ("memory", Reading.quantity),
    "cpus": ("cpus", Reading.number),
    "pids_limit": ("pids", Reading.whole),
    "runtime": ("runtime", Reading.text),
    "network_mode": ("network", Reading.text),
    "scale": ("count", Reading.whole),
    "deploy": ("", _deploy),
    "depends_on": ("wait_for", _depends_on),
    "healthcheck": ("healthcheck", _healthcheck),
}
"""What a service can have: the field of a phase that it becomes, and what reads it."""

_HEALTH: Mapping[str, Reader] = {
    "test": _test,
    "interval": _span,
    "timeout": _span,
    "retries": Reading.whole,
    "start_period": _span,
    "disable": Reading.flag,
}
