"""Tenants of a server: whose a project is, what all its sandboxes may take together, and who speaks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, LimitReached
from skerry.model.spec import Cache, Network, Spec
from skerry.units import format_size


class Scope(StrEnum):
    """Permission of a token. What is not granted is refused."""

    READ = "sandbox:read"
    """See sandboxes, their events and their lines in the ledger."""
    CREATE = "sandbox:create"
    """Make sandboxes, also of snapshots, in pools and in fleets, and change how long they live."""
    EXEC = "sandbox:exec"
    """Run commands and terminals."""
    FILES = "sandbox:files"
    """Read and write files."""
    DESTROY = "sandbox:destroy"
    """Stop, pause and end sandboxes; remove snapshots and volumes."""
    NETWORK = "sandbox:network"
    """Change what sandboxes may reach, and give their secrets values."""
    PORTS = "port:open"
    """Reach ports of sandboxes, and make links to them."""
    IMAGES = "image:write"
    """Build, pull and remove images, which all tenants of the host share."""
    WEBHOOKS = "webhook:write"
    """Have events posted elsewhere."""
    TOKENS = "token:write"
    """See, make and revoke tokens of its own tenant, none of which can do more than itself."""
    ADMIN = "admin"
    """All of that, for every tenant, and what is the host's: tenants, tokens, reconcile, doctor."""


TENANT_SCOPES = frozenset(Scope) - {Scope.ADMIN, Scope.IMAGES, Scope.TOKENS}
"""What a token of a tenant may do if nothing else is said."""
_FORMS: Mapping[str, Callable[[float], str]] = {
    "cpus": "{:g}".format,
    "memory": format_size,
    "disk": format_size,
    "egress": lambda count: f"{format_size(count)} a second",
}
"""What a sandbox takes of a quota, and how that is shown."""


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most that all live sandboxes of a project may be promised together; None is any amount."""

    sandboxes: int | None = None
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    """Of boxes, and as much again of snapshots that are kept."""
    egress: int | None = None
    """Bytes a second."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidSpec(f"quota: {field} is {value}; it must be 0 or more", field=f"quota.{field}")

    def admit(self, spec: Spec, live: Iterable[Spec]) -> None:
        """Raise LimitReached if a sandbox of this spec is too much beside those that live, or InvalidSpec if it does
        not say how much it takes of what is bounded."""
        held = list(live)
        if self.sandboxes is not None and len(held) >= self.sandboxes:
            raise LimitReached(
                f"project {spec.project!r} may have {self.sandboxes} sandboxes and has {len(held)}: destroy some, or "
                "have its quota raised"
            )
        for field, form in _FORMS.items():
            most, asked = getattr(self, field), promised(spec, field)
            if most is None:
                continue
            if field == "egress" and spec.network not in (Network.NONE, Network.RULES):
                reason = f"on {spec.network} nothing bounds what a box sends, and the project has a quota of"
                advice = "use allow and egress, or no network"
                raise InvalidSpec(f"network: {reason} {form(most)}: {advice}", field="network")
            if field == "disk" and (volume := _unbounded(spec)) is not None:
                reason = f"nothing bounds what a volume holds, and the project has a quota of {form(most)} of disk"
                raise InvalidSpec(f"{volume}: {reason}: have it without, or have that bound taken away", field=volume)
            if asked is None:
                raise InvalidSpec(f"{field}: say how much: the project has a quota of {form(most)}", field=field)
            taken = sum(promised(each, field) or 0 for each in held)
            if taken + asked > most:
                raise LimitReached(
                    f"project {spec.project!r} may have {form(most)} of {field}, {form(taken)} is taken and "
                    f"{form(asked)} was asked for: destroy some, ask for less, or have its quota raised"
                )

    def admit_snapshot(self, spec: Spec, kept: int, *, with_memory: bool) -> None:
        """Raise LimitReached if a snapshot of a sandbox of this spec, which can be as large as its disk, and its memory
        if that is kept, is too much beside the bytes of those that are kept."""
        size = (spec.disk or 0) + ((spec.memory or 0) if with_memory else 0)
        if self.disk is not None and kept + size > self.disk:
            raise LimitReached(
                f"project {spec.project!r} may keep {format_size(self.disk)} of snapshots and has {format_size(kept)}, "
                f"and that of this sandbox may take {format_size(size)}: remove some, or have its quota raised"
            )


NO_QUOTA = Quota()


def _unbounded(spec: Spec) -> str | None:
    """The field by which a sandbox would have a volume that it can fill without a bound, if there is one."""
    if spec.data:
        return "data"
    return "cache" if spec.cache in (Cache.WRITE, Cache.OWN) else None


def promised(spec: Spec, field: str) -> Any:
    """How much of what a quota bounds a sandbox was promised; None if it did not say. One without a network sends
    nothing, whatever it may."""
    return 0 if field == "egress" and spec.network is Network.NONE else getattr(spec, field)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A project that others than the owner of the host use: with tokens of its own, and a quota."""

    name: str
    quota: Quota = NO_QUOTA
    note: str = ""
    created_at: float = msgspec.field(default_factory=time.time)

    def __post_init__(self) -> None:
        Spec(project=self.name)  # refuses what is no name of a project


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token as it is kept: everything but the token."""

    id: str
    """The part of it that may be seen: in lists, in the ledger, in logs."""
    digest: str
    """SHA-256 of the whole."""
    tenant: str | None = None
    """Its project; None speaks for all of the host."""
    scopes: tuple[Scope, ...] = ()
    note: str = ""
    created_at: float = msgspec.field(default_factory=time.time)
    created_by: str = ""
    expires_at: float | None = None
    last_used_at: float | None = None
    """About when it was good for a call for the last time; None is never."""

    def is_over(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever makes a call: what they are called in the ledger, and what they may do."""

    actor: str
    """`token:ID` or `uid:NUMBER`."""
    tenant: str | None
    """The one project that they see; None is all of them."""
    scopes: frozenset[Scope]

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def may(self, scope: Scope | None) -> bool:
        """Whether a call that needs this scope is theirs to make; None is any call."""
        return scope is None or self.is_admin or scope in self.scopes
