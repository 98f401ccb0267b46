"""Networks of a docker-compose file: services that share one reach each other's ports through the gate, by all names
that docker would give them. A network that the engine has (`external`) is used as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from skerry.fleet.fields import INTERNAL, BadValue, Fields, Reader, Reading
from skerry.fleet.model import suggestion
from skerry.fleet.tree import Items, Node, Scalar, TableNode
from skerry.model.rules import normal_name
from skerry.model.spec import Network

_DEFAULT = "default"  # the network of services that name none
_PORTS = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?(?:/tcp)?")
_MOST_PORTS = 64
_OWN = ("networks", "expose", "links", "container_name")
"""Fields that say how a service is reached, and are none of a phase."""


class ComposeNetwork(msgspec.Struct, frozen=True, kw_only=True):
    engine: str | None = None
    """The engine's network that it stands for."""
    internal: bool = False


class Link(NamedTuple):
    """Service that another reaches, also by a name of its own."""

    service: str
    alias: str
    place: Node


class Service(NamedTuple):
    """A service on its way to become a phase."""

    key: Scalar
    about: Reading
    fields: Fields
    joined: Mapping[str, Sequence[str]]
    """Its names on each network that it shares with others."""
    ports: frozenset[int]
    links: Sequence[Link]


def read_networks(reading: Reading, node: Node | None) -> dict[str, ComposeNetwork]:
    """The networks of a file, by name; mistakes are noted."""
    found = {_DEFAULT: ComposeNetwork()}
    with suppress(BadValue):
        for key, value in reading.table(node, "networks").entries if node is not None else ():
            found[key.text] = ComposeNetwork()
            with suppress(BadValue):
                found[key.text] = _network(reading.within(f"network {key.text!r}"), key, value)
    return found


def _network(about: Reading, key: Scalar, node: Node) -> ComposeNetwork:
    table = about.table(node, "it")
    known = TableNode(
        table.line, table.column, tuple(each for each in table.entries if not each.key.text.startswith("x-"))
    )
    given = about.values(known, _NETWORK, "")
    engine = given.get("name", key.text) if given.get("external") else None
    return ComposeNetwork(engine=engine, internal=given.get("internal", False))


def _driver(reading: Reading, node: Node, field: str) -> str:
    text = reading.text(node, field)
    if text != "bridge":
        raise reading.wrong(node, f"{field}: {text!r} cannot be mapped to a fleet: name a network that the engine has")
    return text


def join(about: Reading, key: Scalar, fields: Fields, declared: Mapping[str, ComposeNetwork]) -> Service:
    """The service with the network that its fields give it, and without those that are none of a phase."""
    given = {name: fields.pop(name) for name in _OWN if name in fields}
    names: dict[str, Sequence[str]] = {_DEFAULT: ()}
    names, place = given.get("networks", (names, key))
    if "network" in fields:
        if "networks" in given:
            about.wrong(place, "networks: it has network_mode too; take one of both away")
        names = {}
    for node in _places(place) if "networks" in given else ():
        if isinstance(node, Scalar) and node.text in names and node.text not in declared:
            about.wrong(node, f"networks: there is no network {node.text!r}{suggestion(node.text, declared)}")
    names = {name: aliases for name, aliases in names.items() if name in declared}
    engines = [network.engine for name in names if (network := declared[name]).engine is not None]
    if engines:
        fields["network"] = (engines[0], place)
        if len(names) > 1:
            about.wrong(place, f"networks: {engines[0]!r} is one of the engine, and a sandbox is on no other then")
        names = {}
    elif names and all(declared[name].internal for name in names):
        fields[INTERNAL] = (True, place)
    if "container_name" in given:
        own, at = given["container_name"]
        if fields.get("count", (1, key))[0] != 1:
            about.wrong(at, "container_name: there are several of it; give an alias in a network instead")
        names = {name: (*aliases, own) for name, aliases in names.items()}
    links = given.get("links", ((), key))[0]
    return Service(key, about, fields, names, frozenset(given.get("expose", ((), key))[0]), links)


def connect(services: Sequence[Service]) -> None:
    """Give each service what it reaches by its networks, unless it says that itself; a link is waited for as well."""
    known = {service.key.text: service for service in services}
    for service in services:
        fields = service.fields
        links = [link for link in service.links if _is_possible(service, link, known)]
        _wait_for(fields, links, service.key)
        chosen = fields.get("network", (Network.RULES.value, None))[0]
        if "reach" not in fields and chosen == Network.RULES:
            entries = dict.fromkeys(each for other in services for each in _reach(service, other, links))
            if entries:
                fields["reach"] = (tuple(entries), service.key)


def _is_possible(service: Service, link: Link, known: Mapping[str, Service]) -> bool:
    other = known.get(link.service)
    if other is None or other is service:
        why = f"there is no other service of that name{suggestion(link.service, known)}"
    elif not service.joined.keys() & other.joined.keys():
        why = "they share no network"
    elif not _ports(other):
        why = f"say in its 'expose' which ports {link.service} has"
    else:
        return True
    service.about.wrong(link.place, f"links: {link.service!r} cannot be reached: {why}")
    return False


def _wait_for(fields: Fields, links: Sequence[Link], key: Scalar) -> None:
    """Join links to what is waited for; each has a place of its own there, for what may be wrong with it."""
    waits, place = fields.get("wait_for", ((), Items(key.line, key.column, ())))
    more = {link.service: link.place for link in links if link.service not in waits}
    if more:
        node = Items(place.line, place.column, (*_places(place), *more.values()))
        fields["wait_for"] = ((*waits, *more), node)


def _places(node: Node) -> tuple[Node, ...]:
    """The places of what a list holds, or of the keys of a table; one value alone is a list of it."""
    if isinstance(node, TableNode):
        return tuple(entry.key for entry in node.entries)
    return node.items if isinstance(node, Items) else (node,)


def _reach(service: Service, other: Service, links: Sequence[Link]) -> Iterator[str]:
    """What a service reaches of another, by each name that it has where both are."""
    name = other.key.text
    shared = service.joined.keys() & other.joined.keys()
    if other is service or not shared:
        return
    aliases = [alias for network, given in other.joined.items() if network in shared for alias in given]
    aliases += [link.alias for link in links if link.service == name]
    for port in sorted(_ports(other)):
        yield f"{name}:{port}"
        yield from (f"{alias}={name}:{port}" for alias in aliases if alias != name)


def _ports(service: Service) -> frozenset[int]:
    """The ports that it exposes or publishes."""
    published = service.fields.get("ports", ((), None))[0]
    numbers = (str(text).rpartition(":")[2].partition("/")[0] for text in published)
    return service.ports | {int(number) for number in numbers if number.isdecimal()}


def read_joined(reading: Reading, node: Node, field: str) -> dict[str, Sequence[str]]:
    """Networks of a service, each with the names that it has there."""
    if not isinstance(node, TableNode):
        return dict.fromkeys(reading.texts(node, field), ())
    found: dict[str, Sequence[str]] = {}
    for key, value in node.entries:
        with suppress(BadValue):
            what = f"{field}: {key.text!r}"
            given = reading.values(reading.table(value, what), {"aliases": Reading.list_of(host_name)}, what)
            found[key.text] = given.get("aliases", ())
    return found


def host_name(reading: Reading, node: Node, field: str) -> str:
    text = reading.text(node, field)
    try:
        return normal_name(text)
    except ValueError as error:
        raise reading.wrong(node, f"{field}: {text!r}: {error}") from None


def read_expose(reading: Reading, node: Node, field: str) -> tuple[int, ...]:
    """Ports, or ranges of them."""
    found = [port for ports in Reading.list_of(_exposed)(reading, node, field) for port in ports]
    if len(found) > _MOST_PORTS:
        raise reading.wrong(node, f"{field}: {len(found)} ports; at most {_MOST_PORTS}")
    return tuple(found)


def _exposed(reading: Reading, node: Node, field: str) -> range:
    text = reading.text(node, field)
    match = _PORTS.fullmatch(text)
    first, last = (int(match["first"]), int(match["last"] or match["first"])) if match is not None else (0, 0)
    if not 0 < first <= last < 65536:
        hint = "; UDP goes nowhere" if text.endswith("/udp") else ""
        raise reading.wrong(node, f"{field}: {text!r} is no port, such as 5432 or 8000-8010{hint}")
    return range(first, last + 1)


def read_link(reading: Reading, node: Node, field: str) -> Link:
    """A service, or `SERVICE:NAME`."""
    service, _, alias = reading.text(node, field).partition(":")
    name = host_name(reading, Scalar(node.line, node.column, alias or service, plain=False), field)
    return Link(service, name, node)


_NETWORK: Mapping[str, Reader] = {
    "name": Reading.text,
    "driver": _driver,
    "internal": Reading.flag,
    "external": Reading.flag,
}
"""What a network can have; all else cannot be mapped."""
