"""What keeps tenants and tokens, for the commands about them: the registry, or the server that the settings name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from skerry.cli.registry import with_manager
from skerry.errors import Conflict

if TYPE_CHECKING:
    from skerry.access.access import IssuedToken
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.model.tenants import Quota, Scope, Tenant, Token
    from skerry.store.documents import Document

T = TypeVar("T")


class Keeper(Protocol):
    """What commands ask of it."""

    async def issue(
        self,
        *,
        tenant: str | None,
        scopes: Sequence[Scope] | None,
        lifetime_s: float | None,
        note: str,
        created_by: str,
        e2b: bool,
    ) -> IssuedToken: ...

    async def tokens(self, tenant: str | None = None) -> Sequence[Token]: ...

    async def revoke(self, id: str) -> None: ...

    async def add_tenant(self, tenant: Tenant) -> Document[Tenant]: ...

    async def tenant(self, name: str) -> Document[Tenant]: ...

    async def tenants(self) -> Sequence[Document[Tenant]]: ...

    async def set_quota(
        self, name: str, quota: Quota, *, note: str | None = None, version: int | None = None
    ) -> Document[Tenant]: ...

    async def end_tenant(self, name: str, *, destroy: bool) -> None: ...


def with_keeper(work: Callable[[Keeper], Awaitable[T]]) -> T:
    """Open what keeps tenants and tokens for one piece of work."""

    async def main(manager: AsyncSandboxManager) -> T:
        return await work(_keeper_of(manager))

    return with_manager(main)


def _keeper_of(manager: AsyncSandboxManager) -> Keeper:
    from skerry.remote.manager import AsyncRemoteManager

    if isinstance(manager, AsyncRemoteManager):
        from skerry.remote.access import RemoteAccess

        return RemoteAccess(manager.api)
    return _at_home(manager)


def _at_home(manager: AsyncSandboxManager) -> Keeper:
    from skerry.access.access import Access
    from skerry.model.records import Filter

    class AtHome(Access):
        """The registry of this machine, and the manager that ends sandboxes of a tenant."""

        async def end_tenant(self, name: str, *, destroy: bool) -> None:
            mine = Filter(project=name)
            await self.tenant(name)
            if destroy:
                await self.shut_out(name)  # so that no more are made meanwhile
                await manager.destroy_all(mine)
            if left := await manager.count(mine):
                raise Conflict(f"tenant {name!r} has {left} sandboxes: end them first, or use --destroy")
            await self.remove_tenant(name)

    return AtHome(manager.store)
