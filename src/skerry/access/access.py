"""Tenants and tokens of an installation: made, shown, revoked, and checked at every call."""

from __future__ import annotations

import hmac
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from skerry.errors import AccessDenied, Conflict, InvalidSpec, NotFound
from skerry.model.tenants import TENANT_SCOPES, Principal, Quota, Scope, Tenant, Token
from skerry.store import Store
from skerry.store.documents import Document

_PREFIX = "skerry"
_FORM = re.compile(r"skerry_([0-9a-f]{12})_([A-Za-z0-9_-]{43})_([0-9a-f]{8})")
_FORM_E2B = re.compile(r"e2b_([0-9a-f]{12})([0-9a-f]{64})([0-9a-f]{8})")
"""That which older clients of E2B take for a key: they look before they send it."""
_KEPT_S = 2.0
"""How long a token or a quota is believed that was just read: a revoked one ends within that."""
_MOST_KEPT = 10_000
_LONGEST_S = 100 * 365 * 86400.0


class IssuedToken(NamedTuple):
    """A new token. Its text is shown here, once, and kept nowhere."""

    text: str
    token: Token


class Access:
    """The tenants and tokens of a registry."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tenants = store.documents("tenant", Tenant)
        self._tokens = store.documents("token", Token)
        self._kept: dict[str, tuple[float, Token | Quota | None]] = {}
        self._used: dict[str, float] = {}
        """When tokens were used for the last time, as far as that is not written down."""

    # tenants

    async def add_tenant(self, tenant: Tenant) -> Document[Tenant]:
        """Make a tenant. Raises Conflict if there is one of that name."""
        self._tell("tenant", "create", name=tenant.name, quota=msgspec.to_builtins(tenant.quota))
        return await self._tenants.add(tenant.name, tenant)

    async def tenant(self, name: str) -> Document[Tenant]:
        """A tenant by its name. Raises NotFound."""
        return await self._tenants.get(name)

    async def tenants(self, *, after: str = "", limit: int = 1000) -> Sequence[Document[Tenant]]:
        """Tenants, by name."""
        return await self._tenants.list(after=after, limit=limit)

    async def set_quota(
        self, name: str, quota: Quota, *, note: str | None = None, version: int | None = None
    ) -> Document[Tenant]:
        """Give a tenant another quota; what it has already it keeps. Raises NotFound, and Conflict if it has another
        version by now."""
        found = await self._tenants.get(name)
        body = msgspec.structs.replace(found.body, quota=quota, note=found.body.note if note is None else note)
        self._tell("tenant", "change", name=name, quota=msgspec.to_builtins(quota))
        changed = await self._tenants.replace(name, body, version=found.version if version is None else version)
        self._kept.clear()
        return changed

    async def shut_out(self, name: str) -> None:
        """Make all tokens of a tenant worthless, and forget what is kept for it beside sandboxes: webhooks, pools."""
        for token in await self.tokens(name):
            await self.revoke(token.id)
        await self._store.forget_documents(name)

    async def remove_tenant(self, name: str) -> None:
        """Forget a tenant and all that is its own; its sandboxes are the caller's to end. Raises NotFound."""
        await self._tenants.get(name)
        self._tell("tenant", "remove", name=name)
        await self.shut_out(name)  # first: without its tenant a token would have no quota
        await self._tenants.remove(name)
        self._kept.clear()

    async def quota(self, name: str) -> Quota:
        """The quota of a project; one that is no tenant's has none."""
        kept = self._recall(f"quota {name}")
        if isinstance(kept, Quota):
            return kept
        try:
            quota = (await self._tenants.get(name)).body.quota
        except NotFound:
            quota = Quota()
        self._keep(f"quota {name}", quota)
        return quota

    # tokens

    async def issue(
        self,
        *,
        tenant: str | None = None,
        scopes: Iterable[Scope] | None = None,
        lifetime_s: float | None = None,
        note: str = "",
        created_by: str = "",
        e2b: bool = False,
    ) -> IssuedToken:
        """Make a token for a tenant, or without one for all of the host; with `e2b` in the form of E2B's keys. Raises
        NotFound for a tenant that is not there, and InvalidSpec for scopes that it cannot have."""
        if tenant is not None:
            await self._tenants.get(tenant)
        granted = frozenset(scopes if scopes is not None else TENANT_SCOPES if tenant is not None else {Scope.ADMIN})
        if tenant is not None and (beyond := granted & {Scope.ADMIN}):
            raise InvalidSpec(f"scopes: a token of a tenant cannot have {', '.join(beyond)}", field="scopes")
        if lifetime_s is not None and lifetime_s <= 0:
            raise InvalidSpec("lifetime: a token that is over at once is of no use", field="lifetime")
        if lifetime_s is not None and lifetime_s > _LONGEST_S:
            raise InvalidSpec("lifetime: give none for a token that is good for ever", field="lifetime")
        id = secrets.token_hex(6)
        body = f"e2b_{id}{secrets.token_hex(32)}" if e2b else f"{_PREFIX}_{id}_{secrets.token_urlsafe(32)}"
        text = f"{body}{'' if e2b else '_'}{_checksum(body)}"
        token = Token(
            id=id,
            digest=_digest(text),
            tenant=tenant,
            scopes=tuple(sorted(granted)),
            note=note,
            created_by=created_by,
            expires_at=None if lifetime_s is None else time.time() + lifetime_s,
        )
        self._tell("token", "create", id=id, of=tenant, scopes=list(token.scopes), expires_at=token.expires_at)
        await self._tokens.add(id, token, project=tenant or "")
        return IssuedToken(text, token)

    async def tokens(self, tenant: str | None = None) -> Sequence[Token]:
        """Tokens, all or those of a tenant."""
        found = await self._tokens.list(limit=100_000)
        return [self._with_use(each.body) for each in found if tenant in (None, each.body.tenant)]

    async def token(self, id: str) -> Token:
        """A token by its id. Raises NotFound."""
        return self._with_use((await self._tokens.get(id)).body)

    async def revoke(self, id: str) -> None:
        """Make a token worthless, and those of its tenant that were made with it: on this server at once and on others
        within seconds. Raises NotFound."""
        token = await self.token(id)
        self._tell("token", "revoke", id=id, of=token.tenant)
        await self._tokens.remove(id)
        self._kept.pop(id, None)
        if Scope.TOKENS in token.scopes and Scope.ADMIN not in token.scopes:
            for other in await self.tokens(token.tenant):
                if other.created_by == f"token:{id}":
                    with suppress(NotFound):  # somebody else revoked it just now
                        await self.revoke(other.id)

    async def check(self, text: str) -> Principal:
        """Whoever a token speaks for. Raises AccessDenied, with the same words whatever is wrong."""
        match = _FORM.fullmatch(text) or _FORM_E2B.fullmatch(text)
        if match is None or _checksum(text[: match.start(3)].removesuffix("_")) != match[3]:
            raise AccessDenied("the token is not valid")
        token = await self._find(match[1])
        if token is None or not hmac.compare_digest(token.digest, _digest(text)) or token.is_over(time.time()):
            raise AccessDenied("the token is not valid")
        self._used[token.id] = time.time()
        return Principal(actor=f"token:{token.id}", tenant=token.tenant, scopes=frozenset(token.scopes))

    async def note_uses(self) -> None:
        """Write down when tokens were used, of those that were since the last time. No call waits for it. Raises
        StoreError, and then they are written the next time."""
        for id, at in tuple(self._used.items()):
            with suppress(NotFound, Conflict):  # it was revoked, or another server writes the same just now
                found = await self._tokens.get(id)
                if at > (found.body.last_used_at or 0.0):
                    body = msgspec.structs.replace(found.body, last_used_at=at)
                    await self._tokens.replace(id, body, version=found.version)
            if self._used.get(id) == at:
                del self._used[id]

    def _with_use(self, token: Token) -> Token:
        used_at = max(token.last_used_at or 0.0, self._used.get(token.id, 0.0))
        return msgspec.structs.replace(token, last_used_at=used_at or None)

    async def _find(self, id: str) -> Token | None:
        kept = self._recall(id)
        if isinstance(kept, Token):
            return kept
        try:
            token = (await self._tokens.get(id)).body
        except NotFound:
            return None
        self._keep(id, token)
        return token

    def _tell(self, kind: str, action: str, **facts: Any) -> None:
        """Write down what is about to be done. Raises LedgerFull or LedgerError."""
        self._store.ledger.append(kind, None, action=action, **{name: value for name, value in facts.items() if value})

    def _recall(self, key: str) -> Token | Quota | None:
        until, value = self._kept.get(key, (0.0, None))
        return value if time.monotonic() < until else None

    def _keep(self, key: str, value: Token | Quota) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = time.monotonic() + _KEPT_S, value


def admin(actor: str) -> Principal:
    """Somebody who may do everything, by what they are on this host."""
    return Principal(actor=actor, tenant=None, scopes=frozenset({Scope.ADMIN}))


def _checksum(body: str) -> str:
    """So that a token that was mistyped, or is none, is told from one that was revoked without asking anybody."""
    return f"{zlib.crc32(body.encode()):08x}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
