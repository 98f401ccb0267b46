"""Tenants and tokens of a server, which it keeps: the interface of `Access` at home, as far as commands use it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from skerry.access.access import IssuedToken
from skerry.model.tenants import Quota, Scope, Tenant, Token
from skerry.remote.api import LONG_S, Api, segment
from skerry.store.documents import Document


class _TokenView(msgspec.Struct, kw_only=True):
    """A token as a server shows it."""

    id: str
    tenant: str | None = None
    scopes: tuple[Scope, ...] = ()
    note: str = ""
    created_at: float = 0.0
    created_by: str = ""
    expires_at: float | None = None
    last_used_at: float | None = None

    def token(self) -> Token:
        fields = {field: getattr(self, field) for field in self.__struct_fields__}
        return Token(digest="", **fields)  # which no server tells


class _Issued(msgspec.Struct):
    token: str
    info: _TokenView


class _TenantView(msgspec.Struct, kw_only=True):
    """A tenant as a server shows it."""

    name: str
    quota: Quota = Quota()
    note: str = ""
    created_at: float = 0.0
    version: int = 1

    def document(self) -> Document[Tenant]:
        body = Tenant(name=self.name, quota=self.quota, note=self.note, created_at=self.created_at)
        return Document(self.name, "", self.version, self.created_at, body)


class RemoteAccess:
    """The tenants and tokens of a server. All of it raises SkerryError as the server tells it."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def issue(
        self,
        *,
        tenant: str | None = None,
        scopes: Sequence[Scope] | None = None,
        lifetime_s: float | None = None,
        note: str = "",
        created_by: str = "",
        e2b: bool = False,
    ) -> IssuedToken:
        """Make a token. By whom, the server knows itself."""
        body = {"tenant": tenant, "scopes": scopes, "lifetime": lifetime_s, "note": note, "e2b": e2b}
        made = await self._api.send("POST", "/tokens", _Issued, body)
        return IssuedToken(made.token, made.info.token())

    async def tokens(self, tenant: str | None = None) -> Sequence[Token]:
        """The tokens that the caller sees, or those of a tenant."""
        return [each.token() for each in await self._api.pages("/tokens", _TokenView, {"tenant": tenant})]

    async def revoke(self, id: str) -> None:
        """Make a token worthless. Raises NotFound."""
        await self._api.order("DELETE", f"/tokens/{segment(id)}")

    async def add_tenant(self, tenant: Tenant) -> Document[Tenant]:
        """Make a tenant. Raises Conflict if there is one of that name."""
        body = {"name": tenant.name, "quota": tenant.quota, "note": tenant.note}
        return (await self._api.send("POST", "/tenants", _TenantView, body)).document()

    async def tenant(self, name: str) -> Document[Tenant]:
        """A tenant. Raises NotFound."""
        return (await self._api.get(f"/tenants/{segment(name)}", _TenantView)).document()

    async def tenants(self) -> Sequence[Document[Tenant]]:
        """All tenants, by name."""
        return [each.document() for each in await self._api.pages("/tenants", _TenantView)]

    async def set_quota(
        self, name: str, quota: Quota, *, note: str | None = None, version: int | None = None
    ) -> Document[Tenant]:
        """Give a tenant another quota; what it has already it keeps. Raises NotFound, and Conflict if it has another
        version by now."""
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        body = {"quota": quota, "note": note}
        path = f"/tenants/{segment(name)}"
        return (await self._api.send("PATCH", path, _TenantView, body, headers=headers)).document()

    async def end_tenant(self, name: str, *, destroy: bool) -> None:
        """Remove a tenant, its sandboxes before if they are to end. Raises NotFound, and Conflict if it has any."""
        path = f"/tenants/{segment(name)}"
        await self._api.order("DELETE", path, query={"destroy": destroy}, timeout_s=LONG_S)
