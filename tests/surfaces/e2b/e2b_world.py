"""A server for E2B's clients, and requests as its SDKs send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from loopback import free_port
from manager.world import config_of
from surfaces.server.world import Served, serving

from skerry.config import Config
from skerry.model.tenants import Scope, Tenant
from skerry.providers.base import Provider


class E2b:
    """One client of the control plane, with a key of its own."""

    def __init__(self, served: Served, url: str, key: str, http: httpx.AsyncClient) -> None:
        self.served = served
        self.url = url
        self.key = key
        self.http = http

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"X-API-KEY": self.key, **options.pop("headers", {})}
        return await self.http.request(method, path, json=body, headers=headers, **options)

    async def create(self, **body: Any) -> dict[str, Any]:
        """A new sandbox, as the newest SDK asks for one."""
        answer = await self.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60, **body})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def inside(self, sandbox: dict[str, Any], path: str = "/health", port: int = 49983) -> httpx.Response:
        """A request for the sandbox itself, in plain mode."""
        headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(port)}
        if "envdAccessToken" in sandbox:
            headers["X-Access-Token"] = sandbox["envdAccessToken"]
        return await self.http.get(path, headers=headers)

    async def other(self, tenant: str, *scopes: Scope) -> E2b:
        """A client with a key of a tenant."""
        return E2b(self.served, self.url, await key_of(self.served, tenant, *scopes), self.http)


async def key_of(served: Served, tenant: str | None = None, *scopes: Scope) -> str:
    access = served.server.access
    if tenant is not None and tenant not in [each.id for each in await access.tenants()]:
        await access.add_tenant(Tenant(name=tenant))
    return (await access.issue(tenant=tenant, scopes=scopes or None, e2b=True)).text


@asynccontextmanager
async def e2b_serving(
    folder: Path, provider: Provider | None = None, config: Config | None = None, **settings: Any
) -> AsyncIterator[E2b]:
    """A server on a port of its own for E2B's clients, whose sandboxes end with it."""
    if provider is None and config is None:
        config = config_of(folder, provider="local")
    address = f"127.0.0.1:{free_port()}"
    async with (
        serving(folder, provider, config=config, e2b=True, e2b_listen=(address,), **settings) as served,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=30, trust_env=False) as http,
    ):
        try:
            yield E2b(served, f"http://{address}", await key_of(served), http)
        finally:
            await served.server.manager.destroy_all(grace_s=0)
