"""Decisions of the gate: pure functions of a policy and of what a box asked for."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from skerry.errors import printable
from skerry.gate.base import Policy, Refused
from skerry.model.rules import Address, Rule, normal_name

_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MOST_SHOWN = 100
_DIGITS = 3
"""At the end of the name of a member: agent-db-001."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols, and the metadata of one cloud
            "192.88.99.0/24",  # relays that lead to any address
            "168.63.129.16/32",  # the metadata of another cloud, at an address of the internet
            "3fff::/20",  # documentation; versions of Python differ
            "2001:db8::/32",
        ),
    )
)


def host_of(text: str) -> str:
    """A host in its one spelling, be it a name or an address. Raises Refused for what is neither, and for what some
    programs take for an address, such as 127.1 or 0x7f000001."""
    address = address_of(text)
    if address is not None:
        return str(address)
    try:
        name = normal_name(text)
    except ValueError:
        raise Refused(f"{shown(text)} is no host name") from None
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        raise Refused(f"{name} is no host name; an address is written as four numbers from 0 to 255, or as IPv6")
    return name


def address_of(text: str) -> Address | None:
    """The address that a host is, if it is one; IPv4 that is written as IPv6 is IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return None
        return address.ipv4_mapped or address
    return address


def shown(text: str) -> str:
    """Text of a box, fit for a message and the ledger."""
    return printable(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def ports_of(policy: Policy, name: str) -> frozenset[int]:
    """The ports on which a name may be reached; none if it may not be."""
    own = {port for rule in _secret_rules(policy) if rule.names(name) for port in rule.ports}
    denied = {port for rule in policy.rules.deny if rule.names(name) for port in rule.ports}
    return frozenset((policy.rules.ports_of(name) | _ports_of_member(policy, name) | own) - denied)


def is_member(policy: Policy, host: str, port: int) -> bool:
    """Whether that is a port of a member of the fleet."""
    return port in _ports_of_member(policy, host)


def _ports_of_member(policy: Policy, name: str) -> frozenset[int]:
    stem, _, number = name.rpartition("-")
    is_one = number.isdecimal() and len(number) >= _DIGITS
    each = policy.reach.get(f"{stem}-*", frozenset()) if is_one else frozenset()
    return policy.reach.get(name, frozenset()) | each


def rule_for(policy: Policy, host: str, port: int) -> str:
    """The text of the rule that lets a host be reached on a port. Raises Refused."""
    address = address_of(host)
    if address is not None:
        rule = policy.rules.by_address(address, port)
        if rule is None:
            raise Refused(_refusal(host, port, policy.rules.denies(address, port)))
        return rule.text
    if any(rule.names(host) and port in rule.ports for rule in policy.rules.deny):
        raise Refused(_refusal(host, port, is_denied=True))
    if is_member(policy, host, port):
        return f"reach {host}:{port}"
    rule = policy.rules.by_name(host, port)
    if rule is None:
        rule = next((rule for rule in _secret_rules(policy) if rule.names(host) and port in rule.ports), None)
    if rule is None:
        raise Refused(_refusal(host, port, is_denied=False))
    return rule.text


def check_address(policy: Policy, host: str, port: int, address: Address, is_own: Callable[[Address], bool]) -> None:
    """Raise Refused for an address of a host that may not be connected to: one that a rule denies, and one that is not
    of the internet or is this machine's own, unless a rule or the configuration names it."""
    is_known = any(address_of(each) == address for each in policy.hosts.get(host, ()))
    for part in _parts(address):
        if policy.rules.denies(part, port):
            raise Refused(f"{host} is at {part}, which a rule denies on port {port}")
        if is_known or policy.rules.opens(part, port):
            continue
        if not is_public(part) or is_own(part):
            kind = "is not an address of the internet" if not is_public(part) else "is this machine itself"
            raise Refused(f"{host} is at {part}, which {kind}; a rule has to name the address, as {part}:{port}")


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet: no private, shared, local, multicast or reserved one."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return address in _NAT64
    is_special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not is_special


def _parts(address: Address) -> Iterator[Address]:
    """An address and those within it, to which gateways would lead."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _secret_rules(policy: Policy) -> Iterator[Rule]:
    """Rules of the hosts of secrets, which need no other."""
    for secret in policy.secrets.values():
        yield from map(_parse, secret.hosts)


@lru_cache(1024)
def _parse(text: str) -> Rule:
    return Rule.parse(text, "secrets")


def _refusal(host: str, port: int, is_denied: bool) -> str:
    return f"a rule denies {host} on port {port}" if is_denied else f"no rule allows {host} on port {port}"
