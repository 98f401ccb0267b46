"""Rules and secrets over REST, on real boxes with a real gate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gate.installation import installed
from gate.own_gate import config_with_gate, end_gates, fetch, web
from gate.world import running_world
from loopback import free_port
from surfaces.server.world import Served

from skerry.config import Config, ServerSettings
from skerry.surfaces.server.listen import run
from skerry.surfaces.server.server import Server


@pytest.fixture
def config(folder: Path) -> Iterator[Config]:
    """An installation of its own; its gate is ended after the test."""
    yield config_with_gate(folder)
    end_gates(folder)


@asynccontextmanager
async def serving_gated(config: Config) -> AsyncIterator[Served]:
    """A server on a registry that the gate has too."""
    port = free_port()
    settings = ServerSettings(listen=(f"127.0.0.1:{port}",))
    config = msgspec.structs.replace(config, server=settings, tool="server")
    async with Server.open(config) as server, AsyncExitStack() as clients:
        ready = asyncio.Event()
        task = asyncio.create_task(run(server, ready))
        try:
            await asyncio.wait_for(ready.wait(), 20)
            yield Served(server, f"http://127.0.0.1:{port}", Path(config.state_dir) / "server.sock", clients)
            await server.manager.destroy_all()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def gated(config: Config) -> AsyncIterator[Served]:
    async with serving_gated(config) as served:
        yield served


@pytest.fixture
async def site() -> AsyncIterator[int]:
    """The port of a web server that says hello."""
    async with web() as port:
        yield port


async def made(client: httpx.AsyncClient, **body: Any) -> str:
    answer = await client.post("/v1/sandboxes", json=body)
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def test_rules_hold_as_soon_as_they_are_changed(gated: Served, site: int) -> None:
    client = await gated.client("acme")
    id = await made(client, network="rules")
    sandbox = await gated.server.manager.get(id)
    page, rule = f"http://web.test:{site}/", f"web.test:{site}"
    assert "hello" not in await fetch(sandbox, page)
    allowed = (await client.post(f"/v1/sandboxes/{id}/network/allow", json={"rules": [rule]})).json()
    assert (allowed["network"], allowed["allow"]) == ("rules", [rule])
    assert await fetch(sandbox, page) == "hello"
    assert (await client.get(f"/v1/sandboxes/{id}/network")).json() == allowed
    denied = (await client.post(f"/v1/sandboxes/{id}/network/deny", json={"rules": [rule]})).json()
    assert (denied["allow"], denied["deny"]) == ([], [rule])
    assert "hello" not in await fetch(sandbox, page)
    tag = (await client.get(f"/v1/sandboxes/{id}/network")).headers["etag"]
    body, headers = {"allow": ["pypi.org"], "deny": []}, {"if-match": tag}
    whole = (await client.put(f"/v1/sandboxes/{id}/network", json=body, headers=headers)).json()
    assert (whole["allow"], whole["deny"]) == (["pypi.org"], [])
    stale = await client.put(f"/v1/sandboxes/{id}/network", json={"allow": []}, headers=headers)
    assert (stale.status_code, stale.json()["code"]) == (412, "conflict")
    for wrong in ({"rules": ["https://x.org/"]}, {"rules": "x.org"}, {}):
        assert (await client.post(f"/v1/sandboxes/{id}/network/allow", json=wrong)).status_code == 400


async def test_a_value_goes_in_and_never_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "the-servers-own")  # which is none of a tenant's business
    with running_world() as world, installed(folder, world) as config:
        async with serving_gated(config) as served:
            client, other = await served.client("acme"), await served.client("other")
            host = world.rule("api.test", "https")
            id = await made(client, secrets={"API_TOKEN": {"hosts": [host]}})
            sandbox = await served.server.manager.get(id)

            async def sent() -> str:
                """What came to the host of the secret."""
                before = len(world.seen())
                await sandbox.exec(f'curl -fsS -H "X-Token: $API_TOKEN" https://{host}/hello', timeout_s=30)
                return json.dumps(world.seen()[before:])

            assert "the-servers-own" not in await sent()
            url = f"/v1/sandboxes/{id}/secrets"
            answer = await client.put(url, json={"values": {"API_TOKEN": "Zq7-value-9yK"}})
            assert (answer.status_code, answer.text) == (204, "")
            assert "Zq7-value-9yK" in await sent()
            for path in (f"/v1/sandboxes/{id}", f"/v1/sandboxes/{id}/network", "/v1/ledger?limit=1000"):
                shown = await client.get(path)
                assert shown.status_code == 200
                assert "Zq7" not in shown.text
            assert (await client.get(url)).status_code == 405
            for values in ({"NONE": "Zq7-value-9yK"}, {"API_TOKEN": ["Zq7-value-9yK"]}):
                wrong = await client.put(url, json={"values": values})
                assert (wrong.status_code, "Zq7" in wrong.text) == (400, False)
            assert (await other.put(url, json={"values": {"API_TOKEN": "x"}})).status_code == 404


async def test_a_tenant_opens_no_address_and_nothing_of_another(gated: Served) -> None:
    client, other, admin = await gated.client("acme"), await gated.client("other"), await gated.client()
    id = await made(client, network="rules")
    for rule in ("127.0.0.1:22", "169.254.169.254", "10.0.0.0/8", "[::1]:80", "192.168.0.0/16:443"):
        assert (await client.post(f"/v1/sandboxes/{id}/network/allow", json={"rules": [rule]})).status_code == 403
        assert (await client.put(f"/v1/sandboxes/{id}/network", json={"allow": [rule]})).status_code == 403
        assert (await client.post("/v1/sandboxes", json={"allow": [rule]})).status_code == 403
    assert (await admin.post(f"/v1/sandboxes/{id}/network/allow", json={"rules": ["10.0.0.1"]})).status_code == 200
    assert (await other.get(f"/v1/sandboxes/{id}/network")).status_code == 404
    assert (await other.put(f"/v1/sandboxes/{id}/network", json={"allow": []})).status_code == 404
    plain = await made(client)
    answer = await client.post(f"/v1/sandboxes/{plain}/network/allow", json={"rules": ["pypi.org"]})
    assert (answer.status_code, answer.json()["code"]) == (409, "wrong_state")
