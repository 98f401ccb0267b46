"""Pools over REST: kept by the server, opened again by the next one, and each tenant's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from surfaces.server.world import Served, serving

from skerry.model.records import Filter
from skerry.model.tenants import Quota, Scope
from skerry.providers.mock import Mock


async def pool(client: httpx.AsyncClient, name: str = "fast") -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/pools/{name}")).json()
    return found


async def is_full(client: httpx.AsyncClient, name: str = "fast") -> bool:
    stats = (await pool(client, name)).get("stats")
    return stats is not None and stats["ready"] == stats["size"]


async def full(client: httpx.AsyncClient, name: str = "fast") -> None:
    async for _ in ticks():
        if await is_full(client, name):
            return


async def ticks() -> AsyncIterator[None]:
    """Looks until a test is content, or its time is over."""
    async with asyncio.timeout(20):
        while True:
            yield None
            await asyncio.sleep(0.02)


async def test_a_pool_hands_out_what_is_warm_and_counts_its_hits(served: Served) -> None:
    client = await served.client("acme")
    made = await client.post("/v1/pools", json={"name": "fast", "size": 2, "spec": {"memory": "64M"}})
    assert (made.status_code, made.json()["id"], made.json()["project"]) == (201, "acme/fast", "acme")
    await full(client)
    warm = {record.id for record in await served.server.manager.list()}
    body = {"name": "job", "env": {"A": "1"}, "labels": {"x": "y"}, "lifetime": "1h"}
    taken = (await client.post("/v1/pools/fast/acquire", json=body)).json()
    assert (taken["id"] in warm, taken["name"], taken["labels"]) == (True, "job", {"x": "y"})
    found = await pool(client)
    assert (found["hit_rate"], found["stats"]["hits"], found["error"]) == (1.0, 1, "")
    assert [each["name"] for each in (await client.get("/v1/pools")).json()["items"]] == ["fast"]


async def test_a_pool_that_is_removed_takes_with_it_what_nobody_has(served: Served) -> None:
    client = await served.client("acme")
    await client.post("/v1/pools", json={"name": "fast", "size": 2})
    await full(client)
    kept = (await client.post("/v1/pools/fast/acquire", json={})).json()["id"]
    assert (await client.delete("/v1/pools/fast")).status_code == 204
    assert (await client.get("/v1/pools/fast")).status_code == 404
    async for _ in ticks():
        if [record.id for record in await served.server.manager.list()] == [kept]:
            break


async def test_pools_of_another_tenant_are_unknown_and_names_do_not_collide(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    await ours.post("/v1/pools", json={"name": "fast", "size": 1})
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/acquire")):
        body = {} if method == "POST" else None
        answers = [
            await theirs.request(method, f"/v1/pools/{name}{path}{query}", json=body)
            for name, query in (("fast", ""), ("never", ""), ("fast", "?project=acme"))
        ]
        assert {answer.status_code for answer in answers} == {404}
        told = [answer.json()["detail"] for answer in answers[:2]]
        assert told[0].replace("fast", "") == told[1].replace("never", "")
    assert (await theirs.get("/v1/pools")).json()["items"] == []
    assert (await theirs.post("/v1/pools", json={"name": "fast", "size": 1})).status_code == 201
    assert (await ours.post("/v1/pools", json={"name": "fast", "size": 1})).status_code == 409
    owner = await served.client()
    assert [each["id"] for each in (await owner.get("/v1/pools")).json()["items"]] == ["acme/fast", "other/fast"]
    assert (await owner.get("/v1/pools/fast?project=other")).json()["project"] == "other"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "Fast"}, 400),
        ({"name": "a", "size": 0}, 400),
        ({"name": "a", "size": 101}, 400),
        ({"name": "a", "max_age": "0s"}, 400),
        ({"name": "a", "spec": {"env": {"A": "1"}}}, 400),
        ({"name": "a", "spec": {"name": "x"}}, 400),
        ({"name": "a", "spec": {"project": "other"}}, 400),
        ({"name": "a", "spec": {"mounts": ["/etc:/mnt"]}}, 403),
        ({"name": "a", "spec": {"network": "host"}}, 403),
        ({"name": "a", "spec": {"labels": {"skerry.pool": "x"}}}, 400),
    ],
)
async def test_what_no_pool_can_be_is_refused(served: Served, body: dict[str, object], status: int) -> None:
    client = await served.client("acme")
    assert (await client.post("/v1/pools", json=body)).status_code == status
    assert (await client.get("/v1/pools")).json()["items"] == []


async def test_an_acquire_needs_its_scope_and_gives_no_labels_of_ours(served: Served) -> None:
    client, reader = await served.client("acme"), await served.client("acme", Scope.READ)
    await client.post("/v1/pools", json={"name": "fast", "size": 1})
    assert (await reader.post("/v1/pools/fast/acquire", json={})).status_code == 403
    body = {"labels": {"skerry.fleet": "x"}}
    assert (await client.post("/v1/pools/fast/acquire", json=body)).status_code == 400


async def test_a_pool_keeps_to_the_quota_also_when_that_changes(served: Served) -> None:
    client = await served.client("acme", quota=Quota(sandboxes=1))
    await client.post("/v1/pools", json={"name": "fast", "size": 2})
    async for _ in ticks():
        if "may have 1 sandboxes" in (await pool(client))["error"]:
            break
    assert len(await served.server.manager.list(Filter(project="acme"))) == 1
    await served.server.access.set_quota("acme", Quota(sandboxes=2))
    await full(client)


async def test_a_pool_is_opened_again_by_the_next_server(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider) as served:
        client = await served.client("acme")
        await client.post("/v1/pools", json={"name": "fast", "size": 1, "spec": {"memory": "64M"}})
        await full(client)
    assert mock_provider.host.boxes == {}
    async with serving(tmp_path, mock_provider) as served:
        client = await served.client("acme")
        await full(client)
        assert (await client.post("/v1/pools/fast/acquire", json={})).status_code == 201
        assert (await pool(client))["stats"]["hits"] == 1


async def test_a_pool_that_cannot_be_opened_says_why(served: Served) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/pools", json={"name": "fast", "size": 1, "spec": {"provider": "nowhere"}})
    assert answer.status_code == 201
    async for _ in ticks():
        if "nowhere" in (await pool(client))["error"]:
            break
    assert (await client.delete("/v1/pools/fast")).status_code == 204


async def test_the_pools_of_a_tenant_go_with_it(served: Served) -> None:
    client, owner = await served.client("acme"), await served.client()
    await client.post("/v1/pools", json={"name": "fast", "size": 2})
    await full(client)
    assert (await owner.delete("/v1/tenants/acme?destroy=true")).status_code == 204
    assert (await owner.get("/v1/pools")).json()["items"] == []
    assert await served.server.manager.list() == []
