"""The installation: who is calling, what its providers can do, how it is, and its upkeep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from skerry import providers
from skerry.errors import SkerryError
from skerry.manager import health
from skerry.manager.admission import HostRoom
from skerry.manager.decide import Verdict
from skerry.model.tenants import Quota, Scope
from skerry.providers.base import OPTIONAL_FIELDS, Capability, Provider
from skerry.surfaces.rest.route import PREFIX, Call, Routes
from skerry.surfaces.rest.tenants import Usage
from skerry.surfaces.rest.views import Page
from skerry.version import __version__

routes = Routes("system")


class WhoView(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever makes the call."""

    actor: str
    """As the ledger names them."""
    tenant: str | None
    """The project that they see; null is all of them."""
    scopes: tuple[Scope, ...]
    admin: bool
    quota: Quota | None
    """Of the tenant."""
    used: Usage | None


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """The server."""

    version: str
    api: str


class HowView(msgspec.Struct, frozen=True):
    """How something is held or found on this host, or why it is not."""

    by: str = ""
    why_not: str = ""


class ProviderView(msgspec.Struct, frozen=True, kw_only=True):
    """A provider: what it can do, and whether it works here."""

    name: str
    default: bool
    available: bool
    isolation: str
    """The wall between code and host: none, namespace, container or vm."""
    capabilities: tuple[Capability, ...]
    honours: tuple[str, ...]
    """Which fields of a spec that not every provider takes it does."""
    refuses: tuple[str, ...]
    """And which it does not."""
    needs_image: bool
    details: dict[str, HowView]
    """How limits are held, by field; for admins."""
    reason: str
    """Why it does not work; for admins, as `fix` is."""
    fix: str


class DoctorView(msgspec.Struct, frozen=True, kw_only=True):
    """How the installation is."""

    ok: bool
    """Whether the default provider works."""
    default_provider: str
    host: dict[str, Any]
    gate: dict[str, Any]
    ledger: dict[str, Any]
    providers: tuple[ProviderView, ...]


class Reconcile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to compare."""

    dry_run: bool = False
    """Tell the verdicts, and do nothing."""
    rebuild: bool = False
    """Make anew what runs on an image that has a newer one by its name; volumes are kept."""


class Prune(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be forgotten."""

    older_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 86400.0
    """Seconds since the end of a sandbox."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """How much was forgotten."""

    records: int


@routes.get("/whoami", None)
async def whoami(call: Call) -> WhoView:
    """Who makes the call, what they may do, and how much of their quota is used."""
    principal = call.principal
    quota, used = None, None
    if principal.tenant is not None:
        quota = await call.server.access.quota(principal.tenant)
        used = Usage.of(await call.manager.list())
    return WhoView(
        actor=principal.actor,
        tenant=principal.tenant,
        scopes=tuple(sorted(principal.scopes)),
        admin=principal.is_admin,
        quota=quota,
        used=used,
    )


@routes.get("/version", None)
async def version(call: Call) -> VersionView:
    """The version of the server, and of the API."""
    return VersionView(version=__version__, api=PREFIX.strip("/"))


@routes.get("/providers", Scope.READ)
async def list_providers(call: Call) -> Page[ProviderView]:
    """All that are installed: what each can do, and whether it works here, as it was seen some seconds ago."""
    return Page([*await _providers(call, fresh=False)])


@routes.get("/doctor", Scope.ADMIN)
async def doctor(call: Call) -> DoctorView:
    """How the host, the gate, the ledger and the providers are, and what to do where one does not work."""
    config = call.server.config
    found = tuple(await _providers(call, fresh=True))
    return DoctorView(
        ok=any(each.default and each.available for each in found),
        default_provider=config.provider,
        host={**health.host(config), "room": msgspec.to_builtins(await call.server.manager.handles.room())},
        gate=await health.gate(config, call.server.manager.list),
        ledger=health.ledger(config),
        providers=found,
    )


@routes.get("/host", Scope.ADMIN)
async def host(call: Call) -> HostRoom:
    """What the host of the server has left for sandboxes, what these were promised, and what has to stay free."""
    return await call.server.manager.handles.room()


@routes.post("/reconcile", Scope.ADMIN)
async def reconcile(call: Call, body: Reconcile) -> Page[Verdict]:
    """Compare the registry with every provider, repair the difference, and tell the verdict for each sandbox."""
    return Page([*await call.server.manager.reconcile(dry_run=body.dry_run, rebuild=body.rebuild)])


@routes.post("/prune", Scope.DESTROY)
async def prune(call: Call, body: Prune) -> Pruned:
    """Forget sandboxes that have ended; a tenant its own."""
    return Pruned(records=await call.manager.prune(older_s=body.older_s))


async def _providers(call: Call, *, fresh: bool) -> list[ProviderView]:
    findings = await call.server.examiner.all(fresh=fresh)
    default, is_admin = call.server.config.provider, call.principal.is_admin
    return [_view(each, _class_of(call, each["name"]), default, is_admin=is_admin) for each in findings]


def _class_of(call: Call, name: str) -> type[Provider] | None:
    """The class of a provider; None if it cannot be loaded, which the finding tells of."""
    loaded = call.server.manager.loaded_provider(name)
    if loaded is not None:
        return type(loaded)
    try:
        return providers.provider_class(name)
    except SkerryError:
        return None


def _view(found: Mapping[str, Any], cls: type[Provider] | None, default: str, *, is_admin: bool) -> ProviderView:
    """What is found of a provider. Paths and versions of the host are for its owner alone."""
    details = {field: HowView(**how) for field, how in found.get("details", {}).items()}
    honours = frozenset() if cls is None else cls.honours
    return ProviderView(
        name=found["name"],
        default=found["name"] == default,
        available=found["available"],
        isolation="" if cls is None else cls.isolation.name.lower(),
        capabilities=() if cls is None else tuple(sorted(cls.capabilities)),
        honours=tuple(sorted(honours)),
        refuses=tuple(sorted(OPTIONAL_FIELDS - honours)),
        needs_image=cls is not None and cls.needs_image,
        details=details if is_admin else {},
        reason=found["reason"] if is_admin else "",
        fix=found["fix"] if is_admin else "",
    )
