"""The ledger over REST: pages, filters, what a tenant sees, and lines as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from manager.world import config_of
from surfaces.server.world import Served, serving

from skerry.config import LedgerSettings
from skerry.ledger.ledger import Ledger
from skerry.ledger.line import ACTOR, Actor
from skerry.ledger.reading import LineFilter, read_page
from skerry.providers.mock import Mock


async def test_lines_come_by_page_in_either_order(served: Served) -> None:
    admin = await served.client()
    for _ in range(3):
        await admin.post("/v1/sandboxes", json={})
    whole = (await admin.get("/v1/ledger?limit=1000")).json()
    assert whole["next"] is None
    numbers = [line["seq"] for line in whole["items"]]
    assert numbers == sorted(numbers)
    for order in ("", "&newest=true"):
        got, after = [], ""
        while True:
            page = (await admin.get(f"/v1/ledger?limit=2{order}{after}")).json()
            got += [line["seq"] for line in page["items"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert got == (numbers[::-1] if order else numbers)


async def test_lines_are_chosen_by_sandbox_kind_and_actor(served: Served) -> None:
    admin = await served.client()
    made = (await admin.post("/v1/sandboxes", json={"name": "box"})).json()
    await admin.post("/v1/sandboxes", json={})
    actor = (await admin.get("/v1/whoami")).json()["actor"]
    for reference in ("box", made["id"], made["id"][:8]):
        lines = (await admin.get("/v1/ledger", params={"sandbox": reference, "kind": ["create", "ready"]})).json()
        assert [(line["sandbox"], line["kind"]) for line in lines["items"]] == [
            (made["id"], "create"),
            (made["id"], "ready"),
        ]
    assert (await admin.get("/v1/ledger", params={"actor": "token:nobody"})).json()["items"] == []
    assert len((await admin.get("/v1/ledger", params={"actor": actor, "kind": "create"})).json()["items"]) == 2


async def test_a_tenant_sees_the_lines_of_its_project_alone(served: Served) -> None:
    admin, ours, theirs = await served.client(), await served.client("acme"), await served.client("other")
    mine = (await ours.post("/v1/sandboxes", json={})).json()["id"]
    other = (await theirs.post("/v1/sandboxes", json={})).json()["id"]
    await served.server.manager.execute(mine, ["true"])  # by nobody in particular, on what is the tenant's
    await served.server.manager.execute(other, ["true"])
    seen = (await ours.get("/v1/ledger?limit=1000")).json()["items"]
    assert {line["sandbox"] for line in seen if "sandbox" in line} == {mine}
    assert {line["who"]["tenant"] for line in seen if "sandbox" not in line} <= {"acme"}
    assert {"create", "ready", "exec"} <= {line["kind"] for line in seen}
    assert (await ours.get("/v1/ledger", params={"sandbox": other})).json()["items"] == []
    assert {mine, other} <= {line.get("sandbox") for line in (await admin.get("/v1/ledger?limit=1000")).json()["items"]}
    newest = (await ours.get("/v1/ledger?newest=true&limit=1000")).json()["items"]
    assert newest == seen[::-1]


async def test_a_tenant_sees_lines_of_a_sandbox_that_the_registry_has_forgotten(served: Served) -> None:
    ours = await served.client("acme")
    mine = (await ours.post("/v1/sandboxes", json={})).json()["id"]
    await served.server.manager.execute(mine, ["true"])
    await served.server.manager.destroy(mine)
    await served.server.manager.prune(older_s=0)
    kinds = [line["kind"] for line in (await ours.get("/v1/ledger", params={"sandbox": mine})).json()["items"]]
    assert kinds[0] == "create"
    assert "exec" in kinds


async def test_lines_are_followed_as_they_come_and_from_where_one_was(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    first = (await ours.post("/v1/sandboxes", json={})).json()["id"]
    async with ours.stream("GET", "/v1/ledger/follow?kind=create&after=0") as answer, asyncio.timeout(20):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = _events(answer)
        assert (await anext(lines))["sandbox"] == first
        await theirs.post("/v1/sandboxes", json={})
        second = (await ours.post("/v1/sandboxes", json={})).json()["id"]
        line = await anext(lines)
        assert line["sandbox"] == second
    headers = {"last-event-id": str(line["seq"] - 1)}
    async with ours.stream("GET", "/v1/ledger/follow?kind=create", headers=headers) as answer, asyncio.timeout(20):
        assert (await anext(_events(answer)))["sandbox"] == second


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_an_admin_has_the_ledger_verified(served: Served) -> None:
    admin = await served.client()
    await admin.post("/v1/sandboxes", json={})
    found = (await admin.get("/v1/ledger/verify")).json()
    assert (found["whole"], found["found"]["problems"]) == (True, [])
    gone = (await admin.get("/v1/ledger/verify", params={"head": "0" * 63 + "1"})).json()
    assert not gone["whole"]
    assert (await admin.get("/v1/ledger/verify?head=short")).status_code == 400


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after=-1", "after=x", "since=never", "nothing=1"])
async def test_a_query_that_makes_no_sense_is_refused(served: Served, query: str) -> None:
    admin = await served.client()
    assert (await admin.get(f"/v1/ledger?{query}")).status_code == 400


async def test_a_ledger_of_many_files_is_read_by_page(tmp_path: Path, own_registry: None, mock_provider: Mock) -> None:
    config = msgspec.structs.replace(config_of(tmp_path), ledger=LedgerSettings(max_bytes=1500))
    async with serving(tmp_path, mock_provider, config=config) as served:
        admin = await served.client()
        for _ in range(4):
            await admin.post("/v1/sandboxes", json={})
        assert len([*(tmp_path / "ledger").glob("ledger.*.jsonl")]) > 2
        numbers = [line["seq"] for line in (await admin.get("/v1/ledger?limit=1000")).json()["items"]]
        assert len(numbers) > 8
        for at in (2, 5, len(numbers) - 2):
            later = (await admin.get(f"/v1/ledger?limit=3&after={numbers[at]}")).json()["items"]
            assert [line["seq"] for line in later] == numbers[at + 1 : at + 4]
            before = (await admin.get(f"/v1/ledger?limit=3&newest=true&after={numbers[at]}")).json()["items"]
            assert [line["seq"] for line in before] == numbers[:at][::-1][:3]


def test_what_the_ledger_tells_of_itself_is_no_tenants(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    reset = ACTOR.set(Actor("token:x", "acme"))
    ledger.append("create", "one", project="acme")
    ACTOR.reset(reset)
    ledger.append("exec", "one")
    ledger.append("exec", "two")
    wanted = LineFilter(project="acme")
    found = read_page(tmp_path, wanted, after=None, limit=10, newest=False, is_late=lambda: False)
    assert [(line.kind, line.sandbox) for line in found] == [("create", "one"), ("exec", "one")]
    ledger.close()
