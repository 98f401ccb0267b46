"""Reads a docker-compose file as a fleet: a service is a phase. What cannot be mapped is a mistake, with its line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skerry.fleet import networks
from skerry.fleet.fields import FLEET_FIELDS, MOUNT_FIELDS, PHASE_FIELDS, BadValue, Fields, Placed, Reader, Reading
from skerry.fleet.model import Command, FleetSpec, Healthcheck
from skerry.fleet.networks import ComposeNetwork, Service
from skerry.fleet.tree import Items, Node, Scalar, TableEntry, TableNode, kind_of
from skerry.model.spec import LOOPBACK, Mount, Port

OURS = "x-skerry"  # what a service says to us alone: fields of a phase
_TOP = ("name", "version", "services", "networks", OURS)
_EXTENSION = "x-"
_HEALTHY = "service_healthy"
_CONDITIONS = ("service_started", _HEALTHY)
_CONTAINERS = ("init", "stdin_open", "tty")
"""What a container is to have that is only kept there: a first process that reaps, or input that does not end."""
_IDLE = (("sleep", "infinity"), ("sleep", "inf"), ("tail", "-f", "/dev/null"))
"""Commands that do nothing but keep a container there, as a sandbox is anyway."""
_DOLLAR = re.compile(r"\$\$|\$")
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|m|us|s))+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|us|s)")
_SPAN_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000001}
_HINTS = {
    "build": "build the image first (`skerry image build`) and name it in 'image'",
    "command": f"a sandbox waits for commands; give this one as 'command' below {OURS}, and it is kept running",
    "entrypoint": f"a sandbox waits for commands; give the whole as 'command' below {OURS}, and it is kept running",
    "env_file": "write the variables below 'environment'",
    "ports": f"forward them with `skerry port`, or name this host's loopback ({LOOPBACK}:8080:80), for it alone",
    "secrets": f"give them below {OURS}, or name a variable of yours without a value below 'environment'",
}


def read(reading: Reading, root: TableNode, path: Path, provider: str | None) -> FleetSpec | None:
    """The fleet of a parsed file; mistakes are noted."""
    root = TableNode(root.line, root.column, tuple(_without_dollars(reading, each) for each in root.entries))
    for key, node in root.entries:
        if key.text not in _TOP and not _is_extension(key) and not _is_empty(node):
            _refuse(reading, key, "")
    fields = _fleet_fields(reading, root, path)
    placed: list[Placed] = []
    with suppress(BadValue):
        services = reading.table(root.get("services") or root, "services")
        given: Fields = {} if provider is None else {"provider": (provider, root)}
        declared = networks.read_networks(reading, root.get("networks"))
        made = reading.each(services.entries, lambda entry: _service(reading, entry.key, entry.value, given, declared))
        networks.connect(made)
        phases = (each.about.build_phase(each.key.text, each.fields, each.key) for each in made)
        placed = [each for each in phases if each is not None]
        if not services.entries:
            reading.wrong(services, "services: there is none")
        _refuse_unhealthy(reading, services, placed)
    return reading.build_fleet(fields, placed, root)


def _fleet_fields(reading: Reading, root: TableNode, path: Path) -> Fields:
    """The name as docker compose takes it, from the folder if need be; and our own fields."""
    folder = re.sub(r"[^a-z0-9_-]", "", path.absolute().parent.name.lower()).lstrip("_-") or "fleet"
    fields: Fields = {"name": (folder, root)}
    if (ours := root.get(OURS)) is not None:
        readers = {key: reader for key, reader in FLEET_FIELDS.items() if key != "name"}
        with suppress(BadValue):
            fields |= reading.fields(reading.table(ours, OURS), readers, OURS)
    if (node := root.get("name")) is not None:
        with suppress(BadValue):
            fields["name"] = (reading.text(node, "name"), node)
    return fields


def _service(
    reading: Reading, key: Scalar, node: Node, given: Fields, declared: Mapping[str, ComposeNetwork]
) -> Service:
    about = reading.within(f"service {key.text!r}")
    table = about.table(node, "it")
    fields: Fields = dict(given)
    for entry in table.entries:
        name, read = _SERVICE.get(entry.key.text, ("", None))
        if read is not None:
            with suppress(BadValue):
                value = read(about, entry.value, entry.key.text)
                fields |= {name: (value, entry.value)} if name else value
        elif entry.key.text != OURS and not _is_extension(entry.key) and not _is_harmless(entry):
            _refuse(about, entry.key, "")
    service = networks.join(about, key, fields, declared)
    if (ours := table.get(OURS)) is not None:
        with suppress(BadValue):
            own = about.table(ours, OURS)
            fields = about.within(f"service {key.text!r}: {OURS}").phase_fields(own, fields)
    if fields.get("healthcheck", ("", key))[0] is None:
        del fields["healthcheck"]
    return service._replace(fields=fields)


def _refuse(reading: Reading, key: Scalar, inside: str) -> None:
    hint = _HINTS.get(key.text, "take it away, or use a fleet file")
    reading.wrong(key, f"{inside}{key.text!r} cannot be mapped to a fleet: {hint}")


def _is_extension(key: Scalar) -> bool:
    return key.text.startswith(_EXTENSION) and key.text != OURS


def _is_empty(node: Node) -> bool:
    return (isinstance(node, TableNode) and not node.entries) or (isinstance(node, Scalar) and node.value is None)


def _is_harmless(entry: TableEntry) -> bool:
    """What says only what is so anyway."""
    key, node = entry
    if key.text == "command":
        words = tuple(each.text for each in node.items if isinstance(each, Scalar)) if isinstance(node, Items) else ()
        return (tuple(node.text.split()) if isinstance(node, Scalar) else words) in _IDLE
    if key.text in _CONTAINERS:
        return isinstance(node, Scalar) and node.text in ("true", "false")
    return key.text == "restart" and isinstance(node, Scalar) and node.text == "no"


def _without_dollars(reading: Reading, value: Any) -> Any:
    """`$$` is a dollar; a variable would have to be filled in, and we do not."""
    if isinstance(value, TableEntry):
        return TableEntry(value.key, _without_dollars(reading, value.value))
    if isinstance(value, Items):
        return Items(value.line, value.column, tuple(_without_dollars(reading, each) for each in value.items))
    if isinstance(value, TableNode):
        return TableNode(value.line, value.column, tuple(_without_dollars(reading, each) for each in value.entries))
    if "$" not in value.text:
        return value
    if any(found == "$" for found in _DOLLAR.findall(value.text)):
        reading.wrong(value, "variables are not filled in: write the value, or $$ for a dollar sign")
    return Scalar(value.line, value.column, value.text.replace("$$", "$"), value.plain)


def _mount(reading: Reading, node: Node, field: str) -> Mount:
    """A folder or file of the host. Volumes that docker would keep by a name are refused."""
    if isinstance(node, TableNode):
        return _long_mount(reading, node, field)
    text = reading.text(node, field)
    source, colon, rest = text.partition(":")
    if not colon or not source.startswith((".", "/", "~")):
        raise reading.wrong(node, f"{field}: {text!r} is a volume by name; name a folder of the host, as ./data:/data")
    return reading.make(node, Mount.parse, f"{reading.resolve(source)}:{rest}")


def _long_mount(reading: Reading, node: TableNode, field: str) -> Mount:
    kind = node.get("type")
    if not (isinstance(kind, Scalar) and kind.text == "bind"):
        raise reading.wrong(kind or node, f"{field}: only 'type: bind' can be mapped to a fleet")
    given = reading.values(node, {"type": Reading.text, **MOUNT_FIELDS}, field)
    given.pop("type", None)
    if not {"source", "target"} <= given.keys():
        raise reading.wrong(node, f"{field}: source and target must be given")
    return reading.make(node, Mount, **given)


def _port(reading: Reading, node: Node, field: str) -> str:
    """A port that is published on the loopback alone, as ours are. Docker would publish others for all the world."""
    if isinstance(node, TableNode):
        given = reading.values(node, _PORT, field)
        address, local = given.get("host_ip", ""), given.get("published", "")
        port = f"{given.get('target', '')}/{given.get('protocol', 'tcp')}"
    else:
        address, local, port = ("", "", *reading.text(node, field).split(":"))[-3:]
    if address != LOOPBACK:
        raise reading.wrong(node, f"{field!r} cannot be mapped to a fleet: {_HINTS[field]}")
    text = f"{local}:{port}" if local else port
    reading.make(node, Port.parse, text)
    return text


def _depends_on(reading: Reading, node: Node, field: str) -> tuple[str, ...]:
    if not isinstance(node, TableNode):
        return reading.texts(node, field)
    for key, value in node.entries:
        with suppress(BadValue):
            _check_dependency(reading, value, f"{field}: {key.text!r}")
    return tuple(key.text for key, _ in node.entries)


def _check_dependency(reading: Reading, node: Node, what: str) -> None:
    for key, value in reading.table(node, what).entries:
        text = value.text if isinstance(value, Scalar) else ""
        allowed = {"condition": _CONDITIONS, "required": ("true",), "restart": ("false",)}.get(key.text, ())
        if text not in allowed:
            choices = f"; it can be {' or '.join(allowed)}" if allowed else ""
            shown = kind_of(value) if allowed else "given"
            reading.wrong(value, f"{what}: {key.text} is {shown}, which cannot be mapped to a fleet{choices}")


def _refuse_unhealthy(reading: Reading, services: TableNode, placed: list[Placed]) -> None:
    """Whoever waits for a service to be healthy needs one that can be."""
    checked = {each.phase.name for each in placed if each.phase.healthcheck is not None}
    for name, node in services.entries:
        waits = node.get("depends_on") if isinstance(node, TableNode) else None
        for key, value in waits.entries if isinstance(waits, TableNode) else ():
            condition = value.get("condition") if isinstance(value, TableNode) else None
            known = services.get(key.text) is not None
            if known and key.text not in checked and isinstance(condition, Scalar) and condition.text == _HEALTHY:
                text = f"depends_on: {key.text!r} has no healthcheck, so it is never {_HEALTHY}"
                reading.within(f"service {name.text!r}").wrong(condition, text)


def _healthcheck(reading: Reading, node: Node, field: str) -> Healthcheck | None:
    table = reading.table(node, field)
    given = reading.values(table, _HEALTH, field)
    if given.pop("disable", False) or ("test" in given and given["test"] is None):
        return None
    if "test" not in given:
        raise BadValue if table.get("test") is not None else reading.wrong(node, f"{field}: test must be given")
    defaults = {"interval": 30.0, "timeout": 30.0, "retries": 3}
    return reading.make(node, Healthcheck, command=given.pop("test"), **{**defaults, **given})


def _test(reading: Reading, node: Node, field: str) -> Command | None:
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
    raise reading.wrong(node, f"{field}: a list must begin with CMD, CMD-SHELL or NONE, and name a command")


def _span(reading: Reading, node: Node, field: str) -> float:
    """A duration as docker compose writes it: 1m30s."""
    text = node.text if isinstance(node, Scalar) else ""
    if not _SPAN.fullmatch(text):
        raise reading.wrong(node, f"{field}: must be a duration such as 30s or 1m30s, and is {kind_of(node)}")
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in _SPAN_PART.findall(text))


def _deploy(reading: Reading, node: Node, field: str) -> Fields:
    """The fields of a phase that `deploy` gives: how many, and their limits."""
    found: Fields = {}
    for key, value in reading.table(node, field).entries:
        with suppress(BadValue):
            if key.text == "replicas":
                found["count"] = (reading.whole(value, "deploy: replicas"), value)
            elif key.text == "resources":
                found |= _resources(reading, value)
            elif (key.text, value.text if isinstance(value, Scalar) else "") != ("mode", "replicated"):
                _refuse(reading, key, "deploy: ")
    return found


def _resources(reading: Reading, node: Node) -> Fields:
    found: Fields = {}
    for key, value in reading.table(node, "deploy: resources").entries:
        if key.text != "limits":
            _refuse(reading, key, "deploy: resources: ")
            continue
        for limit, bound in reading.table(value, "deploy: resources: limits").entries:
            if limit.text not in ("cpus", "memory", "pids"):
                _refuse(reading, limit, "deploy: resources: limits: ")
                continue
            with suppress(BadValue):
                found[limit.text] = (PHASE_FIELDS[limit.text](reading, bound, limit.text), bound)
    return found


_SERVICE: Mapping[str, tuple[str, Reader]] = {
    "image": ("image", Reading.text),
    "environment": ("env", Reading.environment),
    "labels": ("labels", Reading.pairs),
    "user": ("user", Reading.text),
    "working_dir": ("cwd", Reading.text),
    "volumes": ("mounts", Reading.list_of(_mount)),
    "mem_limit": ("memory", Reading.quantity),
    "cpus": ("cpus", Reading.number),
    "pids_limit": ("pids", Reading.whole),
    "runtime": ("runtime", Reading.text),
    "network_mode": ("network", Reading.text),
    "networks": ("networks", networks.read_joined),
    "expose": ("expose", networks.read_expose),
    "links": ("links", Reading.list_of(networks.read_link)),
    "container_name": ("container_name", networks.host_name),
    "ports": ("ports", Reading.list_of(_port)),
    "scale": ("count", Reading.whole),
    "deploy": ("", _deploy),
    "depends_on": ("wait_for", _depends_on),
    "healthcheck": ("healthcheck", _healthcheck),
}
"""What a service can have: the field of a phase that it becomes, and what reads it."""

_PORT: Mapping[str, Reader] = {
    "target": Reading.text,
    "published": Reading.text,
    "host_ip": Reading.text,
    "protocol": Reading.text,
}
_HEALTH: Mapping[str, Reader] = {
    "test": _test,
    "interval": _span,
    "timeout": _span,
    "retries": Reading.whole,
    "start_period": _span,
    "disable": Reading.flag,
}
