"""Tokens: made, listed and revoked. Whoever is no admin sees those of its own tenant, and can pass on what it has."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import msgspec

from skerry.errors import LimitReached, NotFound, NotPermitted
from skerry.model.tenants import Principal, Scope, Token
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.views import Page, PageQuery, page_of
from skerry.units import parse_duration

routes = Routes("tokens")
_MOST_OF_ONE = 100
"""Tokens of a tenant beyond which it makes no more itself: each has limits of its own."""


class CreateToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A token to be."""

    tenant: str | None = None
    """The project that it sees; without one, all of the host, unless whoever makes it sees only one."""
    scopes: tuple[Scope, ...] | None = None
    """What it may do; without any said, what is usual: everything for one of the host, and for one of a tenant all but
    to change images and make tokens."""
    lifetime: float | str | None = None
    """Seconds, or as people write it: 30d; null is for ever."""
    note: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    e2b: bool = False
    """In the form of E2B's keys."""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without what makes it one."""

    id: str
    """The part of it that may be seen: the ledger and logs have it."""
    tenant: str | None
    scopes: tuple[Scope, ...]
    note: str
    created_at: float
    created_by: str
    expires_at: float | None
    expired: bool
    last_used_at: float | None
    """When it was used for the last time, to about a minute; null is never."""

    @classmethod
    def of(cls, token: Token) -> TokenView:
        return cls(
            id=token.id,
            tenant=token.tenant,
            scopes=token.scopes,
            note=token.note,
            created_at=token.created_at,
            created_by=token.created_by,
            expires_at=token.expires_at,
            expired=token.is_over(time.time()),
            last_used_at=token.last_used_at,
        )


class IssuedView(msgspec.Struct, frozen=True, kw_only=True):
    """A new token, which is shown here once and kept nowhere."""

    token: str
    """What goes into `Authorization: Bearer`."""
    info: TokenView


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tokens, and from where on."""

    tenant: str | None = None


@routes.post("/tokens", Scope.TOKENS, status=201)
async def create(call: Call, body: CreateToken) -> IssuedView:
    """Make a token. One that no admin makes can do no more than the token it is made with, lives no longer, and ends
    with it when that is revoked."""
    lifetime_s = None if body.lifetime is None else parse_duration(body.lifetime, "lifetime")
    tenant: str | None = body.tenant
    scopes: Iterable[Scope] | None = body.scopes
    if not call.principal.is_admin:
        tenant, scopes = _narrower(call.principal, tenant, scopes)
        if tenant is not None and len(await call.server.access.tokens(tenant)) >= _MOST_OF_ONE:
            raise LimitReached(
                f"tenant {tenant!r} has {_MOST_OF_ONE} tokens: revoke some, also those that have expired"
            )
        lifetime_s = _shorter(lifetime_s, await _left_s(call))
    issued = await call.server.access.issue(
        tenant=tenant,
        scopes=scopes,
        lifetime_s=lifetime_s,
        note=body.note,
        created_by=call.principal.actor,
        e2b=body.e2b,
    )
    return IssuedView(token=issued.text, info=TokenView.of(issued.token))


@routes.get("/tokens", Scope.TOKENS)
async def list(call: Call, query: ListQuery) -> Page[TokenView]:
    """List tokens, also those that have expired, without what makes them ones."""
    tokens = [each for each in await call.server.access.tokens(query.tenant) if _sees(call.principal, each)]
    return page_of([TokenView.of(each) for each in tokens], query)


@routes.get("/tokens/{id}", Scope.TOKENS)
async def show(call: Call, id: str) -> TokenView:
    """Show a token, without what makes it one."""
    return TokenView.of(await _find(call, id))


@routes.delete("/tokens/{id}", Scope.TOKENS)
async def revoke(call: Call, id: str) -> None:
    """Make a token worthless, on this server at once and on others within seconds; streams that it has open are ended
    within seconds too. Those that a tenant made with it go as well."""
    await call.server.access.revoke((await _find(call, id)).id)


async def _find(call: Call, id: str) -> Token:
    """A token that the caller sees. Raises NotFound."""
    token = await call.server.access.token(id)
    if not _sees(call.principal, token):
        raise NotFound(f"there is no token {id!r}")
    return token


def _sees(principal: Principal, token: Token) -> bool:
    """Whether a token is theirs to look at and to revoke: an admin's is an admin's alone."""
    if principal.is_admin:
        return True
    return principal.tenant in (None, token.tenant) and Scope.ADMIN not in token.scopes


def _narrower(
    principal: Principal, tenant: str | None, scopes: Iterable[Scope] | None
) -> tuple[str | None, Iterable[Scope]]:
    """Tenant and scopes of a token that is made by somebody who is no admin. Raises NotPermitted."""
    if principal.tenant is not None and tenant not in (None, principal.tenant):
        raise NotPermitted("tenant: a tenant makes tokens of its own alone")
    granted = principal.scopes - {Scope.TOKENS} if scopes is None else frozenset(scopes)
    if beyond := sorted(granted - principal.scopes):
        raise NotPermitted(f"scopes: the token that asks does not have {', '.join(beyond)}")
    return principal.tenant or tenant, granted


def _shorter(asked_s: float | None, left_s: float | None) -> float | None:
    given = [each for each in (asked_s, left_s) if each is not None]
    return min(given, default=None)


async def _left_s(call: Call) -> float | None:
    """How long the token that makes the call is good; None if it is for ever."""
    kind, _, id = call.principal.actor.partition(":")
    if kind != "token":
        return None
    expires_at = (await call.server.access.token(id)).expires_at
    return None if expires_at is None else max(1.0, expires_at - time.time())
