"""Networks of sandboxes: rules of what they may reach, and values of their secrets, which go in and never out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from skerry.model.spec import Spec
from skerry.model.tenants import Scope
from skerry.sandbox.network import AsyncSandboxNetwork, NetworkRules
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.specs import refuse_addresses

routes = Routes("network")


class SetRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules that take the place of those there are; what is left out stays as it is."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None


class MoreRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules beside those there are: `pypi.org`, `*.example.org`, `db.example.org:5432`, or the name of a set."""

    rules: tuple[str, ...]


class SecretValues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values of secrets by their names."""

    values: dict[str, str]

    def __repr__(self) -> str:
        return f"SecretValues({', '.join(sorted(self.values))})"


@routes.get("/sandboxes/{id}/network", Scope.READ)
async def show(call: Call, id: str) -> NetworkRules:
    """What a sandbox may reach, also when it has ended; of its secrets the names and hosts."""
    record = await call.manager.record(id)
    call.tag(record.version)
    return NetworkRules.of(record.spec)


@routes.put("/sandboxes/{id}/network", Scope.NETWORK, headers=("If-Match",))
async def set(call: Call, id: str, body: SetRules) -> NetworkRules:
    """Have these rules and no others. They hold when this is answered, and connections that they forbid have ended."""
    _check(call, body.allow or ())

    def decide(spec: Spec) -> tuple[Sequence[str], Sequence[str]]:
        return spec.allow if body.allow is None else body.allow, spec.deny if body.deny is None else body.deny

    version, found = call.match(), await call.manager.record(id)
    with call.matching():
        record = await call.manager.handles.networks.change(found.id, decide, version)
    call.tag(record.version)
    return NetworkRules.of(record.spec)


@routes.post("/sandboxes/{id}/network/allow", Scope.NETWORK)
async def allow(call: Call, id: str, body: MoreRules) -> NetworkRules:
    """Allow more, and deny it no longer by the same rules."""
    _check(call, body.rules)
    return await (await _network(call, id)).allow(*body.rules)


@routes.post("/sandboxes/{id}/network/deny", Scope.NETWORK)
async def deny(call: Call, id: str, body: MoreRules) -> NetworkRules:
    """Deny it whatever allows it, and allow it no longer by the same rules."""
    return await (await _network(call, id)).deny(*body.rules)


@routes.put("/sandboxes/{id}/secrets", Scope.NETWORK)
async def provide(call: Call, id: str, body: SecretValues) -> None:
    """Give secrets of a sandbox values, which the next request to their hosts has. They are in the memory of the gate
    alone: no call shows them, and after a restart of the host they have to be given again."""
    await (await _network(call, id)).provide(body.values)


def _check(call: Call, rules: tuple[str, ...]) -> None:
    if not call.principal.is_admin:
        refuse_addresses(rules)


async def _network(call: Call, id: str) -> AsyncSandboxNetwork:
    return (await call.sandbox(id)).network
