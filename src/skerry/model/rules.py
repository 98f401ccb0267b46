"""Rules of a sandbox's network: which names, addresses and ports its code may reach. What no rule allows is refused,
and what a rule denies is refused whatever else allows it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from skerry.errors import InvalidSpec

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

WEB_PORTS = frozenset({80, 443})
"""Ports of a rule that names none."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_SET = re.compile(r"[a-z][a-z0-9-]{0,62}")
_REACH = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<member>[a-z0-9][a-z0-9._-]{0,62}):(?P<port>[0-9]{1,5})")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_NAME = 253
_TWO_WAYS = frozenset("\u00df\u1e9e\u03c2\u200c\u200d")
"""Letters that the two versions of IDNA spell differently: of one name they make two, which may be of two owners."""
_WIDEST = {4: 8, 6: 7}
"""Bits of the largest networks that are private: 10.0.0.0/8, fc00::/7."""
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule: a name or all below it, or a network, and ports."""

    text: str
    """The rule in its one spelling, as the ledger names it."""
    name: str = ""
    below: bool = False
    """Whether it means the names below `name` and not that itself: `*.example.org`."""
    network: IpNetwork | None = None
    ports: frozenset[int] = WEB_PORTS

    @classmethod
    def parse(cls, text: str, field: str = "allow") -> Rule:
        """A rule from `NAME`, `*.NAME`, an address or a network in CIDR notation, each with `:PORT` if not 80 and 443.
        Raises InvalidSpec."""
        if not isinstance(text, str):
            raise InvalidSpec(f"{field}: {text!r} is no rule; rules are texts, one by one", field=field)
        if "://" in text:
            bare = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
            raise InvalidSpec(f"{field}: {text!r}: a rule is a name and no URL; write {bare}", field=field)
        host, port = _split(text, field)
        ports = frozenset({port}) if port is not None else WEB_PORTS
        suffix = "" if port is None else f":{port}"
        network = _network(host, field)
        if network is not None:
            shown = str(network.network_address) if network.num_addresses == 1 else str(network)
            return cls(
                text=(f"[{shown}]" if network.version == 6 and suffix else shown) + suffix, network=network, ports=ports
            )
        below = host.startswith("*.")
        if "*" in host.removeprefix("*."):
            reason = "a * stands alone before a name, as in *.example.org; nothing stands for all names"
            raise InvalidSpec(f"{field}: {text!r}: {reason}", field=field)
        try:
            name = normal_name(host.removeprefix("*.") if below else host)
        except ValueError as error:
            raise InvalidSpec(f"{field}: {text!r}: {error}", field=field) from None
        if _is_number_like(name):
            reason = "an address is written as four numbers from 0 to 255, or as IPv6"
            raise InvalidSpec(f"{field}: {text!r}: {reason}", field=field)
        return cls(text=("*." if below else "") + name + suffix, name=name, below=below, ports=ports)

    def names(self, name: str) -> bool:
        """Whether the rule is about that name, which is in its one spelling."""
        if not self.name:
            return False
        return name.endswith(f".{self.name}") if self.below else name == self.name

    def covers(self, address: Address) -> bool:
        """Whether the rule is about that address."""
        return self.network is not None and address in self.network


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """A port of other members of a fleet, and the name by which a member reaches it."""

    name: str
    member: str
    """A phase, which stands for each of its members, or one member."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Reach:
        """From `MEMBER:PORT`, or `NAME=MEMBER:PORT` where it is to be known by another name. Raises InvalidSpec."""
        match = _REACH.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            reason = "is not NAME:PORT, such as db:5432, with a port from 1 to 65535"
            raise InvalidSpec(f"reach: {text!r} {reason}", field="reach")
        try:
            name = normal_name(match["name"] or match["member"])
        except ValueError as error:
            raise InvalidSpec(f"reach: {text!r}: {error}", field="reach") from None
        if _is_number_like(name) or name == "localhost":
            reason = "programs take that for an address; give it another name, as in db=5:5432"
            raise InvalidSpec(f"reach: {text!r}: {reason}", field="reach")
        return cls(name=name, member=match["member"], port=int(match["port"]))

    @property
    def is_alias(self) -> bool:
        """Whether it is known by that name alone, and not by those of the members too."""
        return self.name != self.member


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """All rules of a sandbox, with sets spelled out."""

    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()

    @classmethod
    def of(
        cls, allow: Iterable[str], deny: Iterable[str] = (), sets: Mapping[str, Iterable[str]] | None = None
    ) -> Rules:
        """Rules from their texts; `sets` are the installation's own, beside those that are known. Raises InvalidSpec
        for a set that there is not."""
        known = {**known_sets(), **(sets or {})}
        return cls(allow=tuple(_expand(allow, known, "allow")), deny=tuple(_expand(deny, known, "deny")))

    def ports_of(self, name: str) -> frozenset[int]:
        """The ports on which a name may be reached; none if it may not be."""
        allowed = {port for rule in self.allow if rule.names(name) for port in rule.ports}
        return frozenset(allowed - {port for rule in self.deny if rule.names(name) for port in rule.ports})

    def by_name(self, name: str, port: int) -> Rule | None:
        """The rule that lets a name be reached on a port; None if none does, or one denies it."""
        return self._find(lambda rule: rule.names(name), port)

    def by_address(self, address: Address, port: int) -> Rule | None:
        """The rule that lets an address itself be reached on a port; None if none does, or one denies it."""
        return self._find(lambda rule: rule.covers(address), port)

    def opens(self, address: Address, port: int) -> bool:
        """Whether a rule means an address even if it is private: one for half of the internet or more does not."""
        return any(
            rule.covers(address) and port in rule.ports and rule.network.prefixlen >= _WIDEST[rule.network.version]
            for rule in self.allow
            if rule.network is not None
        )

    def denies(self, address: Address, port: int) -> bool:
        """Whether an address is denied, whatever name led to it."""
        return any(rule.covers(address) and port in rule.ports for rule in self.deny)

    def _find(self, is_meant: Any, port: int) -> Rule | None:
        if any(is_meant(rule) and port in rule.ports for rule in self.deny):
            return None
        return next((rule for rule in self.allow if is_meant(rule) and port in rule.ports), None)


def normal_name(text: str) -> str:
    """A host name in its one spelling: lower case, A-labels, no dot at its end. Raises ValueError."""
    name = text.removesuffix(".")
    if not name.isascii():
        if not _TWO_WAYS.isdisjoint(name):
            raise ValueError("programs differ in how they spell it; write it as DNS has it, with xn--")
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            raise ValueError("it is no host name") from None
    name = name.lower()
    if not 0 < len(name) <= _MAX_NAME or not all(map(_LABEL.fullmatch, name.split("."))):
        raise ValueError("it is no host name")
    return name


def refuse_text(texts: Iterable[str], field: str) -> None:
    """Raise InvalidSpec for a text where a list of texts is meant: its letters would be taken for them."""
    if isinstance(texts, str):
        raise InvalidSpec(f"{field}: {texts!r} is one text; give a list of texts", field=field)


def is_set_name(text: str) -> bool:
    """Whether a text stands for a set of rules: it has no dot."""
    return isinstance(text, str) and _SET.fullmatch(text) is not None


@cache
def known_sets() -> Mapping[str, tuple[str, ...]]:
    """Named sets of rules that come with skerry."""
    import tomllib

    text = resources.files("skerry.model").joinpath("sets.toml").read_text()
    return {name: tuple(rules["allow"]) for name, rules in tomllib.loads(text).items()}


def check_texts(texts: Iterable[str], field: str) -> tuple[str, ...]:
    """Rules and names of sets in their one spelling, without doubles. Raises InvalidSpec."""
    refuse_text(texts, field)
    return tuple(dict.fromkeys(text if is_set_name(text) else Rule.parse(text, field).text for text in texts))


def _expand(texts: Iterable[str], sets: Mapping[str, Iterable[str]], field: str) -> Iterable[Rule]:
    for text in texts:
        if not is_set_name(text):
            yield Rule.parse(text, field)
        elif text in sets:
            yield from (Rule.parse(each, field) for each in sets[text])
        else:
            reason = f"a name has a dot in it, and no set is called so; there are {', '.join(sorted(sets))}"
            raise InvalidSpec(f"{field}: {text!r}: {reason}", field=field)


def _split(text: str, field: str) -> tuple[str, int | None]:
    """Host and port of a rule."""
    host, colon, port = text.rpartition(":")
    if text.count(":") > 1 and not text.startswith("["):  # IPv6 without a port
        host, colon, port = text, "", ""
    if not colon:
        return text.removeprefix("[").removesuffix("]"), None
    if text.startswith("["):
        if not host.endswith("]"):  # the colon was one of the address
            return text.removeprefix("[").removesuffix("]"), None
        host = host[1:-1]
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise InvalidSpec(f"{field}: {text!r}: {port!r} is no port; 1 to 65535", field=field)
    return host, int(port)


def _network(host: str, field: str) -> IpNetwork | None:
    """The network that a rule means, if it means one; IPv4 that is written as IPv6 is IPv4."""
    try:
        network = ipaddress.ip_network(host)
        if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
            first = int(network.network_address) & 0xFFFFFFFF
            return ipaddress.IPv4Network((first, network.prefixlen - _MAPPED.prefixlen))
        return network
    except ValueError:
        if "/" in host:
            try:
                wider = ipaddress.ip_network(host, strict=False)
            except ValueError:
                return None
            raise InvalidSpec(
                f"{field}: {host!r} has bits beyond its mask; did you mean {wider}?", field=field
            ) from None
        return None


def _is_number_like(name: str) -> bool:
    """Whether programs may take a name for an address: its last part is a number, also as 0x7f."""
    last = name.rpartition(".")[2]
    return last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last) is not None
