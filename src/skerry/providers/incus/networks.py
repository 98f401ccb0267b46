"""The network card of a box on a bridge: an address that nobody else has, and no way to pretend another."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from skerry.errors import LimitReached, ProviderError, Unsupported
from skerry.providers.incus import instances
from skerry.providers.incus.api import PROVIDER, Api
from skerry.spec import SandboxId

_FILTERS = ("mac_filtering", "ipv4_filtering", "ipv6_filtering", "port_isolation")


class Card(msgspec.Struct, frozen=True):
    address: str
    device: dict[str, str]
    lxc: tuple[str, ...]
    """PID 1 of a box asks nobody for an address: the container is made with it."""
    resolver: str


class Networks:
    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name
        self._given: dict[SandboxId, str] = {}
        """Addresses of boxes that are being made, which Incus does not know yet."""

    @asynccontextmanager
    async def reserving(self, id: SandboxId) -> AsyncIterator[None]:
        """For as long as the box is made, its address is nobody else's."""
        try:
            yield
        finally:
            self._given.pop(id, None)

    async def card(self, id: SandboxId, refused: Set[str] = frozenset()) -> Card:
        """With an address that is free as far as is known, and none of those that Incus has refused."""
        network = await self._network()
        name, own = str(network["name"]), ipaddress.IPv4Interface(network["config"]["ipv4.address"])
        taken = await self._leased(name) | {*self._given.values()} | refused
        address = choose(f"{id}{len(refused) or ''}", own, taken)
        if address is None:
            raise LimitReached(
                f"incus: network {name!r} has no address left in {own.network}: end something, or widen its subnet"
            )
        self._given[id] = address
        device = {"type": "nic", "network": name, "name": "eth0", "ipv4.address": address}
        return Card(
            address=address,
            device={**device, **{f"security.{each}": "true" for each in _FILTERS}},
            lxc=(
                f"lxc.net.0.ipv4.address = {address}/{own.network.prefixlen}",
                f"lxc.net.0.ipv4.gateway = {own.ip}",
            ),
            resolver=str(own.ip),
        )

    async def _leased(self, network: str) -> set[str]:
        """Of the members of a cluster each has to tell its own; while one is away, what containers ask for is known."""
        try:
            leases = await self._api.get(f"/1.0/networks/{network}/leases", list[dict[str, Any]])
        except ProviderError:
            found = await instances.listed(self._api)
            return {card.get("ipv4.address", "") for each in found for card in each.devices.values()}
        return {str(lease["address"]) for lease in leases}

    async def _network(self) -> dict[str, Any]:
        found = await self._api.get("/1.0/networks", list[dict[str, Any]], query={"recursion": "1"})
        bridges = [each for each in found if each.get("managed") and each.get("type") == "bridge"]
        meant = [each for each in bridges if each["name"] == self._name] if self._name else bridges
        if len(meant) != 1:
            has = ", ".join(str(each["name"]) for each in bridges) or "none"
            missing = f"there is no managed bridge {self._name or 'at all'}: `incus network create NAME`, or"
            wanted = missing if self._name or not bridges else "there are several managed bridges:"
            raise Unsupported("network", PROVIDER, f"{wanted} set providers.incus.network (it has {has})")
        if "/" not in meant[0]["config"].get("ipv4.address", ""):
            raise Unsupported("network", PROVIDER, f"bridge {meant[0]['name']!r} has no IPv4 subnet; give it one")
        return meant[0]


def choose(seed: str, own: ipaddress.IPv4Interface, taken: set[str]) -> str | None:
    """The first free address from a place that the seed gives, so that many at once seldom want the same."""
    first, count = int(own.network.network_address) + 1, own.network.num_addresses - 2
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    for step in range(count):
        address = str(ipaddress.IPv4Address(first + (start + step) % count))
        if address not in taken and address != str(own.ip):
            return address
    return None
