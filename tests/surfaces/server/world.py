"""A served installation: a real server on a port and a unix socket of its own, and clients of its tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from loopback import free_port
from manager.world import config_of

from skerry.config import Config, ServerSettings
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.tenants import Quota, Scope, Tenant
from skerry.providers.base import Provider
from skerry.store import Store
from skerry.surfaces.server.listen import run
from skerry.surfaces.server.server import Server


class Served:
    """A server that runs in this event loop."""

    def __init__(self, server: Server, url: str, socket_path: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.url = url
        self.socket_path = socket_path
        self._stack = stack

    async def token(self, tenant: str | None = None, *scopes: Scope, lifetime_s: float | None = None) -> str:
        """A new token, for a tenant that is made if it is not there."""
        access = self.server.access
        if tenant is not None and tenant not in [each.id for each in await access.tenants()]:
            await access.add_tenant(Tenant(name=tenant))
        return (await access.issue(tenant=tenant, scopes=scopes or None, lifetime_s=lifetime_s)).text

    async def client(self, tenant: str | None = None, *scopes: Scope, quota: Quota | None = None) -> httpx.AsyncClient:
        """A client with a new token; without a tenant it may do everything."""
        token = await self.token(tenant, *scopes)
        if quota is not None:
            assert tenant is not None
            await self.server.access.set_quota(tenant, quota)
        headers = {"authorization": f"Bearer {token}"}
        return await self.anonymous(headers=headers)

    async def anonymous(self, **options: Any) -> httpx.AsyncClient:
        """A client without a token."""
        client = httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False, **options)
        return await self._stack.enter_async_context(client)

    async def by_socket(self) -> httpx.AsyncClient:
        """A client on the unix socket, where it is known by its uid."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket_path))
        client = httpx.AsyncClient(base_url="http://skerry", timeout=30, transport=transport)
        return await self._stack.enter_async_context(client)


@asynccontextmanager
async def serving(
    folder: Path,
    provider: Provider | None = None,
    *,
    config: Config | None = None,
    has_gate: bool = False,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server with a provider object of the test's own, or with the providers of the host. These may have a gate,
    if the test ends it."""
    port = free_port()
    config = config or config_of(folder)
    settings.setdefault("e2b", False)  # its usual address is one for all tests
    options = ServerSettings(listen=(f"127.0.0.1:{port}",), **settings)
    config = msgspec.structs.replace(config, server=options, tool="server")
    if provider is not None:
        config = msgspec.structs.replace(config, provider=provider.name)
    async with AsyncExitStack() as stack:
        store = None if has_gate else await Store.open(config.database)
        if store is not None:
            stack.push_async_callback(store.aclose)
        providers = None if provider is None else {provider.name: provider}
        manager = await stack.enter_async_context(AsyncSandboxManager(config, store=store, providers=providers))
        server = Server(manager)
        stack.push_async_callback(server.aclose)
        ready = asyncio.Event()
        task = asyncio.create_task(run(server, ready))
        try:
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                waiting.cancel()
                task.result()
            async with AsyncExitStack() as clients:
                yield Served(server, f"http://127.0.0.1:{port}", Path(config.state_dir) / "server.sock", clients)
        finally:
            task.cancel()
            await asyncio.wait([task])
