"""What a sandbox may reach, from E2B's words to rules of our gate. E2B opens everything and closes some of it; here
nothing is open but what the template allows, and a request narrows or names it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from skerry.errors import InvalidSpec, Unsupported
from skerry.surfaces.e2b.headers import Rules
from skerry.surfaces.e2b.kept import Network

_ALL = ("0.0.0.0/0", "::/0")


class Way(NamedTuple):
    """The rules of a sandbox."""

    allow: tuple[str, ...]
    deny: tuple[str, ...]


def read(given: Mapping[str, Any] | None) -> Network:
    """What a request says. Raises InvalidSpec, and Unsupported for what would leave a sandbox other than was asked."""
    given = {name: value for name, value in (given or {}).items() if value is not None}
    given.pop("rules", None)  # which `headers.py` reads
    if given.pop("egressProxy", None):
        raise Unsupported("network.egressProxy", "e2b", "the gate dials hosts itself")
    try:
        found = msgspec.convert(given, Network)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"network: {error}", field="network") from None
    for each in found.deny_out:
        if not _is_address(each):
            raise InvalidSpec(f"network: denyOut: {each!r} is no address; names are not denied", field="network")
    return found


def way_of(
    network: Network, internet: bool | None, allowed: Iterable[str], headers: Rules, hosts: Iterable[str]
) -> Way:
    """The rules for a sandbox of a template that allows so much. What a request allows is open beside what it denies;
    one that denies everything closes what the template allows. `hosts` have a secret for headers, which would
    open them: not those without headers any more, nor where all is closed but what is named."""
    closes_all = internet is False or any(each in _ALL for each in network.deny_out)
    allow = () if closes_all else tuple(allowed)
    named = tuple(each for each in network.allow_out if each not in _ALL)
    deny = tuple(each for each in network.deny_out if each not in (*_ALL, *named))
    closed = tuple(host for host in hosts if host not in named and (closes_all or host not in headers))
    return Way(tuple(dict.fromkeys((*allow, *named))), tuple(dict.fromkeys((*deny, *closed))))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
