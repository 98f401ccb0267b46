"""Who is let in, and what they see."""

from __future__ import annotations

import pytest
from surfaces.server.world import Served

from skerry.errors import LimitReached
from skerry.model.tenants import Principal, Quota, Scope


async def test_without_a_token_nothing_is_told(served: Served) -> None:
    client = await served.anonymous()
    answer = await client.get("/v1/sandboxes")
    assert (answer.status_code, answer.json()["code"]) == (401, "access_denied")
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("text", ["x", "skerry_000000000000_" + "a" * 43 + "_00000000", "é" * 70])
async def test_a_wrong_token_is_refused_whatever_is_wrong_with_it(served: Served, text: str) -> None:
    client = await served.anonymous()
    answer = await client.get("/v1/sandboxes", headers={b"authorization": b"Bearer " + text.encode()})
    assert answer.status_code == 401


async def test_a_revoked_token_is_refused(served: Served) -> None:
    client = await served.client("acme")
    assert (await client.get("/v1/sandboxes")).status_code == 200
    (token,) = await served.server.access.tokens("acme")
    await served.server.access.revoke(token.id)
    assert (await client.get("/v1/sandboxes")).status_code == 401


async def test_a_token_needs_the_scope_of_a_call(served: Served) -> None:
    client = await served.client("acme", Scope.READ)
    assert (await client.get("/v1/sandboxes")).status_code == 200
    answer = await client.post("/v1/sandboxes", json={})
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")


async def test_on_the_unix_socket_the_uid_is_enough(served: Served) -> None:
    client = await served.by_socket()
    assert (await client.get("/v1/sandboxes")).status_code == 200


async def test_another_tenants_sandbox_is_as_unknown_as_one_that_never_was(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    made = (await ours.post("/v1/sandboxes", json={"name": "secret-plan"})).json()
    unknown = "00000000-0000-4000-8000-000000000000"
    for reference in (made["id"], made["id"][:8], "secret-plan"):
        answer = await theirs.get(f"/v1/sandboxes/{reference}")
        never = await theirs.get(f"/v1/sandboxes/{unknown}")
        assert answer.status_code == never.status_code == 404
        assert answer.json()["detail"].replace(reference, "") == never.json()["detail"].replace(unknown, "")
    assert (await theirs.get("/v1/sandboxes")).json()["items"] == []
    assert [each["id"] for each in (await ours.get("/v1/sandboxes")).json()["items"]] == [made["id"]]
    assert (await theirs.post("/v1/sandboxes", json={"name": "secret-plan"})).status_code == 201


async def test_a_tenant_cannot_be_another_project(served: Served) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/sandboxes", json={"project": "other"})
    assert (answer.status_code, answer.json()["field"]) == (400, "project")
    assert (await client.get("/v1/sandboxes?project=other")).json()["items"] == []


@pytest.mark.parametrize(
    "body",
    [
        {"mounts": ["/etc:/mnt"]},
        {"root": "/"},
        {"network": "host"},
        {"workspace": {"path": "/root"}},
        {"workspace": {"source": "/root/.ssh"}},
        {"secrets": {"TOKEN": {"hosts": ["api.example.org"], "file": "/etc/shadow"}}},
        {"secrets": {"TOKEN": {"hosts": ["api.example.org"], "command": ["id"]}}},
        {"image": "/etc/passwd"},
    ],
)
async def test_what_is_the_hosts_own_is_not_for_tenants(served: Served, body: dict[str, object]) -> None:
    client = await served.client("acme")
    assert (await client.post("/v1/sandboxes", json=body)).status_code == 403


async def test_a_quota_is_never_exceeded(served: Served) -> None:
    client = await served.client("acme", quota=Quota(sandboxes=2, memory=300 << 20))
    answers = [await client.post("/v1/sandboxes", json={"memory": "100M"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert "retry-after" in answers[-1].headers
    other = await served.client("other", quota=Quota(memory=150 << 20))
    assert (await other.post("/v1/sandboxes", json={})).json()["field"] == "memory"
    assert [(await other.post("/v1/sandboxes", json={"memory": "100M"})).status_code for _ in range(2)] == [201, 429]


async def test_another_quota_holds_for_what_is_under_way_too(served: Served) -> None:
    await served.client("acme", quota=Quota(sandboxes=1))
    whoever = Principal(actor="token:1", tenant="acme", scopes=frozenset(Scope))
    before = await served.server.manager_for(whoever)
    await before.create()
    await served.server.access.set_quota("acme", Quota(sandboxes=2))
    assert await served.server.manager_for(whoever) is before
    await before.create()
    with pytest.raises(LimitReached):
        await before.create()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.test"}, 421),
        ({"origin": "https://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "127.0.0.1.evil.test"}, 421),
    ],
)
async def test_pages_of_other_sites_are_refused(served: Served, headers: dict[str, str], status: int) -> None:
    client = await served.client()
    assert (await client.get("/v1/sandboxes", headers=headers)).status_code == status
    assert "access-control-allow-origin" not in (await client.options("/v1/sandboxes", headers=headers)).headers


async def test_every_call_by_a_token_is_told_in_the_ledger_as_its_own(served: Served) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={})).json()
    lines = [line async for line in served.server.manager.ledger.show() if line.sandbox == made["id"]]
    assert {(line.who.tenant, line.who.actor.partition(":")[0]) for line in lines} == {("acme", "token")}
