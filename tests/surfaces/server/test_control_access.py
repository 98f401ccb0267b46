"""Tenants and tokens over REST, and who one is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from surfaces.server.world import Served, serving

from skerry.access.access import Access
from skerry.errors import NotFound
from skerry.model.tenants import Quota, Scope, Token
from skerry.providers.mock import Mock
from skerry.store.documents import Collection
from skerry.surfaces.rest import tokens
from skerry.version import __version__

ALL_BUT_ADMIN = tuple(scope for scope in Scope if scope is not Scope.ADMIN)


async def with_token(served: Served, token: str) -> httpx.AsyncClient:
    return await served.anonymous(headers={"authorization": f"Bearer {token}"})


async def test_an_admin_makes_a_tenant_and_a_token_that_sees_only_it(served: Served) -> None:
    admin = await served.client()
    made = await admin.post("/v1/tenants", json={"name": "acme", "quota": {"sandboxes": 2, "memory": 1 << 30}})
    assert (made.status_code, made.json()["quota"]) == (201, {"sandboxes": 2, "memory": 1 << 30})
    issued = (await admin.post("/v1/tokens", json={"tenant": "acme", "note": "ci", "lifetime": "1h"})).json()
    assert issued["info"]["tenant"] == "acme"
    assert 3500 < issued["info"]["expires_at"] - time.time() <= 3600
    client = await with_token(served, issued["token"])
    assert (await client.post("/v1/sandboxes", json={"memory": "100M"})).status_code == 201
    who = (await client.get("/v1/whoami")).json()
    assert (who["tenant"], who["admin"], who["actor"]) == ("acme", False, f"token:{issued['info']['id']}")
    assert (who["quota"]["sandboxes"], who["used"]["sandboxes"], who["used"]["memory"]) == (2, 1, 100 << 20)
    shown = (await admin.get("/v1/tenants/acme")).json()
    assert shown["used"]["sandboxes"] == 1
    listed = (await admin.get("/v1/tokens?tenant=acme")).json()["items"]
    assert [each["note"] for each in listed] == ["ci"]
    assert issued["token"] not in (await admin.get("/v1/tokens")).text


async def test_when_a_token_was_used_is_remembered_and_written_by_no_call(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, access = await served.client(), served.server.access
    fresh = (await admin.post("/v1/tokens", json={"note": "fresh"})).json()
    assert fresh["info"]["last_used_at"] is None
    writes: list[str] = []
    replace = Collection.replace

    async def counted(self: Collection[Any], id: str, body: Any, **options: Any) -> Any:
        writes.append(id)
        return await replace(self, id, body, **options)

    monkeypatch.setattr(Collection, "replace", counted)
    before = time.time()
    client = await with_token(served, fresh["token"])
    for _ in range(3):
        assert (await client.get("/v1/whoami")).status_code == 200
    shown = (await admin.get(f"/v1/tokens/{fresh['info']['id']}")).json()
    assert before <= shown["last_used_at"] <= time.time()
    assert writes == []
    assert (await elsewhere(served, fresh["info"]["id"])).last_used_at is None
    await access.note_uses()
    assert writes.count(fresh["info"]["id"]) == 1
    assert (await elsewhere(served, fresh["info"]["id"])).last_used_at == shown["last_used_at"]
    writes.clear()
    await access.note_uses()
    assert fresh["info"]["id"] not in writes  # it was not used since
    await client.get("/v1/whoami")
    await access.revoke(fresh["info"]["id"])
    await access.note_uses()
    with pytest.raises(NotFound):  # what was revoked does not come back
        await access.token(fresh["info"]["id"])


async def test_a_server_that_ends_writes_down_which_tokens_were_used(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider) as served:
        client = await served.client()
        assert (await client.get("/v1/whoami")).status_code == 200
    async with serving(tmp_path, mock_provider) as served:
        (token,) = await served.server.access.tokens()
        assert token.last_used_at is not None


async def elsewhere(served: Served, id: str) -> Token:
    """A token as another program on the registry sees it."""
    return await Access(served.server.manager.store).token(id)


async def test_a_quota_is_changed_by_whoever_has_seen_it(served: Served) -> None:
    admin = await served.client()
    made = await admin.post("/v1/tenants", json={"name": "acme", "note": "first"})
    tag = made.headers["etag"]
    answer = await admin.patch("/v1/tenants/acme", json={"quota": {"sandboxes": 1}}, headers={"if-match": tag})
    assert (answer.json()["quota"], answer.json()["note"]) == ({"sandboxes": 1}, "first")
    stale = await admin.patch("/v1/tenants/acme", json={"quota": {"sandboxes": 9}}, headers={"if-match": tag})
    assert (stale.status_code, stale.json()["code"]) == (412, "conflict")
    assert (await admin.post("/v1/tenants", json={"name": "acme"})).status_code == 409
    assert (await admin.post("/v1/tenants", json={"name": "../x"})).status_code == 400
    assert (await admin.post("/v1/tenants", json={"name": "b", "quota": {"sandboxes": -1}})).status_code == 400


async def test_what_a_tenant_sends_is_a_part_of_its_quota(served: Served) -> None:
    admin = await served.client()
    await admin.post("/v1/tenants", json={"name": "acme", "quota": {"egress": 10 << 20}})
    client = await with_token(served, await served.token("acme"))
    made = await client.post("/v1/sandboxes", json={"egress": "20M"})  # it has no network, and so sends nothing
    assert (made.status_code, made.json()["spec"]["egress"]) == (201, 20 << 20)
    assert made.json()["enforced"]["egress"]["by"] == "it has no network"
    who = (await client.get("/v1/whoami")).json()
    assert (who["quota"], who["used"]["egress"]) == ({"egress": 10 << 20}, 0)
    answer = await admin.post("/v1/sandboxes", json={"egress": "1M", "network": "host"})
    assert (answer.status_code, answer.json()["field"]) == (400, "egress")
    changed = await admin.patch("/v1/tenants/acme", json={"quota": {"egress": 1 << 20}})
    assert changed.json()["quota"] == {"egress": 1 << 20}


async def test_tenants_are_listed_by_page(served: Served) -> None:
    admin = await served.client()
    for name in ("a", "b", "c"):
        await admin.post("/v1/tenants", json={"name": name})
    first = (await admin.get("/v1/tenants?limit=2")).json()
    rest = (await admin.get(f"/v1/tenants?limit=2&after={first['next']}")).json()
    assert [each["name"] for each in (*first["items"], *rest["items"])] == ["a", "b", "c"]
    assert rest["next"] is None


async def test_a_tenant_is_removed_with_all_that_is_its_own(served: Served) -> None:
    admin, client = await served.client(), await served.client("acme")
    await client.post("/v1/sandboxes", json={})
    await client.post("/v1/webhooks", json={"url": "https://example.org/hook"})
    assert (await admin.delete("/v1/tenants/acme")).status_code == 409
    assert (await client.get("/v1/whoami")).status_code == 200
    assert (await admin.delete("/v1/tenants/acme?destroy=true")).status_code == 204
    assert (await client.get("/v1/whoami")).status_code == 401
    assert (await admin.get("/v1/tenants/acme")).status_code == 404
    assert (await admin.get("/v1/sandboxes?project=acme")).json()["items"] == []
    assert (await admin.get("/v1/webhooks")).json()["items"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tenants"),
        ("POST", "/v1/tenants"),
        ("DELETE", "/v1/tenants/other"),
        ("GET", "/v1/tokens"),
        ("GET", "/v1/doctor"),
        ("GET", "/v1/host"),
        ("POST", "/v1/reconcile"),
        ("GET", "/v1/ledger/verify"),
    ],
)
async def test_what_is_the_hosts_is_for_admins_alone(served: Served, method: str, path: str) -> None:
    client = await served.client("acme")
    answer = await client.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 403


async def test_a_tenant_passes_on_no_more_than_it_has(served: Served) -> None:
    token = await served.token("acme", Scope.READ, Scope.EXEC, Scope.TOKENS, lifetime_s=1000)
    client = await with_token(served, token)
    await served.token("other")
    made = await client.post("/v1/tokens", json={})
    info = made.json()["info"]
    assert (info["tenant"], info["scopes"]) == ("acme", ["sandbox:exec", "sandbox:read"])
    assert info["expires_at"] - time.time() <= 1000
    assert (await client.post("/v1/tokens", json={"scopes": ["sandbox:create"]})).status_code == 403
    assert (await client.post("/v1/tokens", json={"scopes": ["admin"]})).status_code == 403
    assert (await client.post("/v1/tokens", json={"tenant": "other"})).status_code == 403
    assert (await client.post("/v1/tokens", json={"scopes": ["everything"]})).status_code == 400
    listed = (await client.get("/v1/tokens")).json()["items"]
    assert {each["tenant"] for each in listed} == {"acme"}


async def test_a_tenant_makes_so_many_tokens_and_the_owner_of_the_host_any(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MOST_OF_ONE", 2)
    client = await with_token(served, await served.token("acme", Scope.READ, Scope.TOKENS))
    answers = [await client.post("/v1/tokens", json={"lifetime": 0.001}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 429]
    assert answers[1].json()["code"] == "limit_reached"
    assert (await (await served.client()).post("/v1/tokens", json={"tenant": "acme"})).status_code == 201


async def test_tokens_that_a_tenant_made_end_with_the_one_they_were_made_with(served: Served) -> None:
    admin = await served.client()
    maker = await with_token(served, await served.token("acme", Scope.READ, Scope.TOKENS))
    child = await with_token(served, (await maker.post("/v1/tokens", json={})).json()["token"])
    assert (await child.get("/v1/whoami")).status_code == 200
    id = (await maker.get("/v1/whoami")).json()["actor"].removeprefix("token:")
    assert (await admin.delete(f"/v1/tokens/{id}")).status_code == 204
    assert [(await each.get("/v1/whoami")).status_code for each in (maker, child)] == [401, 401]


async def test_another_tenants_token_is_as_unknown_as_one_that_never_was(served: Served) -> None:
    client = await with_token(served, await served.token("acme", *ALL_BUT_ADMIN))
    await served.token("other")
    (other,) = await served.server.access.tokens("other")
    for id in (other.id, "000000000000"):
        for method in ("GET", "DELETE"):
            answer = await client.request(method, f"/v1/tokens/{id}")
            assert (answer.status_code, answer.json()["detail"]) == (404, f"there is no token {id!r}")
    assert await served.server.access.token(other.id) == other


async def test_tenants_and_tokens_are_told_in_the_ledger(served: Served) -> None:
    admin = await served.client()
    await admin.post("/v1/tenants", json={"name": "acme"})
    issued = (await admin.post("/v1/tokens", json={"tenant": "acme"})).json()
    await admin.delete(f"/v1/tokens/{issued['info']['id']}")
    lines = [line async for line in served.server.manager.ledger.show()]
    told = [(line.kind, line.facts["action"]) for line in lines if line.who.actor and line.kind in ("tenant", "token")]
    assert told == [("tenant", "create"), ("token", "create"), ("token", "revoke")]
    assert not any(issued["token"] in str(line) for line in lines)


async def test_a_quota_of_a_tenant_without_a_bound_is_empty(served: Served) -> None:
    client = await served.client("acme", quota=Quota())
    assert (await client.get("/v1/whoami")).json()["quota"] == {}
    assert (await client.get("/v1/version")).json() == {"version": __version__, "api": "v1"}
