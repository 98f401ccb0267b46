"""Creation of one container: its member, its volumes, its network card, and the request that starts it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from skerry.errors import Conflict, LimitReached, NotFound, ProviderError, Unsupported
from skerry.model.spec import Network, SandboxId, Spec
from skerry.providers.base import Enforcement, log
from skerry.providers.incus import images, instances, profile
from skerry.providers.incus.api import PROVIDER, AddressTaken, IncusApi, IncusConfig
from skerry.providers.incus.cluster import Cluster
from skerry.providers.incus.images import IncusImageConfig, IncusSnapshots
from skerry.providers.incus.info import IncusInfo
from skerry.providers.incus.profile import Card, InstanceFrame
from skerry.providers.incus.volumes import IncusAgentVolume, IncusVolumes
from skerry.providers.shared import layout, volume_plan
from skerry.providers.shared.limits import BoxLimits

_FILTERS = ("mac_filtering", "ipv4_filtering", "ipv6_filtering")
_NAME_TAKEN = ("already exists", "unique constraint failed")


class IncusCreator:
    """Makes containers. It undoes nothing: whoever asked for one destroys what is left of it."""

    def __init__(
        self,
        api: IncusApi,
        config: IncusConfig,
        agent: IncusAgentVolume,
        volumes: IncusVolumes,
        snapshots: IncusSnapshots,
    ) -> None:
        self._api = api
        self._timeout_s = config.start_timeout_s
        self._agent = agent
        self._volumes = volumes
        self._snapshots = snapshots
        self._networks = Networks(api, config.network)
        self._cluster = Cluster(api)

    def check(self, spec: Spec) -> None:
        """Refuse what can be told to be wrong without asking anybody."""
        if spec.snapshot is None:
            images.check_name(image_name(spec))
        for mount in spec.mounts:
            volume_plan.check_source(mount)

    async def check_network(self, spec: Spec) -> None:
        """Raise Unsupported if there is no network of the name that a box asks for."""
        if spec.network not in frozenset(Network):
            await self._networks.find(spec.network)

    async def origin(self, spec: Spec) -> dict[str, Enforcement]:
        """Tell the image. A snapshot may be taken only once there is a place for its box."""
        if spec.snapshot is not None:
            return {}
        image = await self._image(spec)
        layout.check_command(spec, image.command)
        return {"image": Enforcement(by=f"{spec.image} at {image.id[:12]}")}

    async def make(self, id: SandboxId, spec: Spec, limits: BoxLimits, info: IncusInfo) -> None:
        """Make and start a container."""
        wanted = volume_plan.wanted(PROVIDER, id, spec)
        home = await self._volumes.home(info.pool, wanted) if info.server.server_clustered else None
        async with self._cluster.member(id, spec, info, home) as member, self._networks.reserving(id):
            image, agent, card = await self._image(spec), await self._agent.devices(info, member), None
            layout.check_command(spec, image.command)
            if spec.network not in (Network.NONE, Network.RULES):
                card = await self._networks.card(id, spec.network)
            await self._volumes.make(info.pool, wanted, member, spec.disk)
            frame = InstanceFrame(
                image=image,
                limits=limits,
                argv=await self._agent.argv(),
                info=info,
                agent=agent,
                volumes=wanted,
                labels=layout.labels(PROVIDER, id, spec, image_name(spec)),
                card=card,
            )
            await self._start(id, spec, frame, {"target": member} if member else {})

    async def _start(self, id: SandboxId, spec: Spec, frame: InstanceFrame, query: dict[str, str]) -> None:
        """Make it; with another address if Incus says that a container elsewhere has this one. Raises Conflict only for
        the box's name, as then nothing is ours."""
        refused: set[str] = set()
        while True:
            body = profile.instance(id, spec, frame)
            try:
                await self._api.do("POST", "/1.0/instances", query=query, json=body, timeout_s=self._timeout_s)
                return
            except AddressTaken:
                if frame.card is None:
                    raise
                log.info("incus: sandbox %s is made with another address, %s is taken", id, frame.card.address)
                refused.add(frame.card.address)
            except Conflict as error:
                if any(sign in str(error).lower() for sign in _NAME_TAKEN):
                    raise
                raise ProviderError(str(error)) from error
            with suppress(NotFound):
                await self._api.do("DELETE", instances.path(id), timeout_s=self._timeout_s)
            frame = msgspec.structs.replace(frame, card=await self._networks.card(id, spec.network, refused))

    async def _image(self, spec: Spec) -> IncusImageConfig:
        if spec.snapshot is not None:
            return await self._snapshots.resolve(spec.snapshot)
        return await images.resolve(self._api, image_name(spec))


def image_name(spec: Spec) -> str:
    """The name of the image that a box is made of."""
    return layout.image_name(spec) if spec.snapshot is None else f"{images.SNAPSHOTS}{spec.snapshot}"


class Networks:
    """Gives out network cards: each has an address that nobody else has, and no way to pretend another."""

    def __init__(self, api: IncusApi, name: str) -> None:
        self._api = api
        self._name = name
        self._given: dict[SandboxId, str] = {}
        """Addresses of boxes that are being made, which Incus does not know yet."""

    @asynccontextmanager
    async def reserving(self, id: SandboxId) -> AsyncIterator[None]:
        """Keep the address of a box from others while it is made."""
        try:
            yield
        finally:
            self._given.pop(id, None)

    async def card(self, id: SandboxId, asked: str, refused: Set[str] = frozenset()) -> Card:
        """Give out a card with a free address, none of those that Incus has refused. Raises LimitReached."""
        network = await self.find(asked)
        name, own = str(network["name"]), ipaddress.IPv4Interface(network["config"]["ipv4.address"])
        taken = await self._leased(name) | {*self._given.values()} | refused
        address = _choose_address(f"{id}{len(refused) or ''}", own, taken)
        if address is None:
            raise LimitReached(
                f"incus: network {name!r} has no address left in {own.network}: end something, or widen its subnet"
            )
        self._given[id] = address
        # Who asks for a network by its name wants to meet the others there.
        filters = (*_FILTERS, "port_isolation") if asked == Network.BRIDGE else _FILTERS
        device = {"type": "nic", "network": name, "name": "eth0", "ipv4.address": address}
        return Card(
            address=address,
            device={**device, **{f"security.{each}": "true" for each in filters}},
            lxc=(f"lxc.net.0.ipv4.address = {address}/{own.network.prefixlen}", f"lxc.net.0.ipv4.gateway = {own.ip}"),
            resolver=str(own.ip),
        )

    async def _leased(self, network: str) -> set[str]:
        """Addresses that are taken; while a member of a cluster is away, only those that containers ask for."""
        try:
            leases = await self._api.get(f"/1.0/networks/{network}/leases", list[dict[str, Any]])
        except ProviderError as error:
            log.debug("incus: leases of network %s are not told: %s", network, error)
            found = await instances.listed(self._api)
            return {card.get("ipv4.address", "") for each in found for card in each.devices.values()}
        return {str(lease["address"]) for lease in leases}

    async def find(self, asked: str) -> dict[str, Any]:
        """Find a managed bridge: the one of that name, or the one for boxes that ask for any. Raises Unsupported."""
        wanted_name = self._name if asked == Network.BRIDGE else asked
        found = await self._api.get("/1.0/networks", list[dict[str, Any]], query={"recursion": "1"})
        bridges = [each for each in found if each.get("managed") and each.get("type") == "bridge"]
        meant = [each for each in bridges if each["name"] == wanted_name] if wanted_name else bridges
        if len(meant) != 1:
            has = ", ".join(str(each["name"]) for each in bridges) or "none"
            missing = f"there is no managed bridge {wanted_name or 'at all'}: `incus network create NAME`, or"
            wanted = missing if wanted_name or not bridges else "there are several managed bridges:"
            other = "set providers.incus.network" if asked == Network.BRIDGE else "name another"
            raise Unsupported("network", PROVIDER, f"{wanted} {other} (it has {has})")
        if "/" not in meant[0]["config"].get("ipv4.address", ""):
            raise Unsupported("network", PROVIDER, f"bridge {meant[0]['name']!r} has no IPv4 subnet; give it one")
        return meant[0]


def _choose_address(seed: str, own: ipaddress.IPv4Interface, taken: set[str]) -> str | None:
    """The first free address from a place that the seed gives, so that many at once seldom want the same."""
    first, count = int(own.network.network_address) + 1, own.network.num_addresses - 2
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    addresses = (str(ipaddress.IPv4Address(first + (start + step) % count)) for step in range(count))
    return next((address for address in addresses if address not in taken and address != str(own.ip)), None)
