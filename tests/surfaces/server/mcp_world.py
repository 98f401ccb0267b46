"""Clients of MCP over HTTP: the official one, with tokens of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from manager.world import config_of
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from surfaces.server.world import Served, serving

from skerry.model.tenants import Scope

MODES = pytest.mark.parametrize("mode", ["legacy", "auto"], ids=["with-a-handshake", "without"])


@asynccontextmanager
async def joined(
    served: Served, tenant: str | None = None, *scopes: Scope, mode: Any = "legacy", token: str | None = None
) -> AsyncIterator[Client]:
    """The official client with a token of its own."""
    headers = {"authorization": f"Bearer {token or await served.token(tenant, *scopes)}"}
    async with (
        asyncio.timeout(50),
        httpx2.AsyncClient(headers=headers, trust_env=False, timeout=30) as http,
        Client(streamable_http_client(f"{served.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return dict(result.structured_content)


async def error_of(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.structured_content["error"]["code"])


@asynccontextmanager
async def really(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    """A server whose sandboxes are real, and end with the test."""
    async with serving(folder, config=config_of(folder, provider="local"), **settings) as served:
        try:
            yield served
        finally:
            await served.server.manager.destroy_all(grace_s=0)
