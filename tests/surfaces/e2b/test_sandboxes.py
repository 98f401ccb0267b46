"""Sandboxes by E2B's control plane, in the form in which its SDKs send and read them."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from manager.world import until
from surfaces.e2b.e2b_world import E2b

from skerry.model.tenants import Scope


async def state_of(e2b: E2b, name: str) -> str:
    return str((await e2b.call("GET", f"/sandboxes/{name}")).json()["state"])


async def listed(e2b: E2b, **query: str) -> list[str]:
    answer = await e2b.call("GET", f"/v2/sandboxes?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    return [each["sandboxID"] for each in answer.json()]


@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes"])
async def test_a_sandbox_is_made_by_todays_path_and_the_older_one(e2b: E2b, path: str) -> None:
    answer = await e2b.call("POST", path, {"templateID": "base", "timeout": 60, "newField": [1]})
    assert answer.status_code == 201
    made = answer.json()
    assert re.fullmatch("[0-9a-f]{32}", made["sandboxID"])
    assert {"templateID", "clientID", "envdVersion", "envdAccessToken", "domain"} <= made.keys()
    assert (await e2b.inside(made)).status_code == 204


async def test_json_that_is_nested_too_deeply_is_refused(e2b: E2b) -> None:
    deep = b'{"metadata": ' + b'{"a": ' * 10_000 + b"1" + b"}" * 10_001
    answer = await e2b.http.post("/sandboxes", content=deep, headers={"X-API-KEY": e2b.key})
    assert answer.status_code == 400
    made = await e2b.call("POST", "/sandboxes", {"templateID": "base"})
    path = f"/sandboxes/{made.json()['sandboxID']}/network"
    rules = b'{"rules": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = await e2b.http.put(path, content=rules, headers={"X-API-KEY": e2b.key})
    assert answer.status_code == 400


async def test_a_body_in_chunks_is_read_like_any_other(e2b: E2b) -> None:
    async def body() -> object:
        yield b'{"templateID":'
        yield b'"base"}'

    headers = {"X-API-KEY": e2b.key, "content-type": "application/json"}
    answer = await e2b.http.post("/v2/sandboxes", content=body(), headers=headers)
    assert answer.status_code == 201, answer.text


async def test_info_tells_all_that_the_sdk_requires(e2b: E2b) -> None:
    made = await e2b.create(metadata={"a": "b"}, secure=False)
    assert "envdAccessToken" not in made
    info = (await e2b.call("GET", f"/sandboxes/{made['sandboxID']}")).json()
    assert {"startedAt", "endAt", "cpuCount", "memoryMB", "diskSizeMB", "state", "clientID"} <= info.keys()
    assert info["metadata"] == {"a": "b"}
    assert info["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}


async def test_a_killed_sandbox_is_gone_from_everywhere(e2b: E2b) -> None:
    made = await e2b.create()
    path = f"/sandboxes/{made['sandboxID']}"
    assert (await e2b.call("DELETE", path)).status_code == 204
    assert (await e2b.call("DELETE", path)).status_code == 404
    assert (await e2b.call("GET", path)).status_code == 404
    assert (await e2b.call("POST", f"{path}/fork", {})).status_code == 404
    inside = await e2b.inside(made)
    assert inside.status_code == 502
    assert "was not found" in inside.json()["message"]
    assert await listed(e2b) == []


async def test_a_sandbox_ends_when_its_time_is_over(e2b: E2b) -> None:
    made = await e2b.create(timeout=1)

    async def is_gone() -> bool:
        return not await e2b.served.server.manager.count()

    assert (await e2b.inside(made)).status_code == 204
    await until(is_gone)
    assert (await e2b.call("GET", f"/sandboxes/{made['sandboxID']}")).status_code == 404


async def test_connecting_makes_a_life_longer_and_never_shorter(e2b: E2b) -> None:
    made = await e2b.create(timeout=300)
    path = f"/sandboxes/{made['sandboxID']}"
    before = (await e2b.call("GET", path)).json()["endAt"]
    assert (await e2b.call("POST", f"{path}/connect", {"timeout": 10})).status_code == 200
    assert (await e2b.call("GET", path)).json()["endAt"] == before
    assert (await e2b.call("POST", f"/v2{path}/connect", {"timeout": 900})).status_code == 200
    assert (await e2b.call("GET", path)).json()["endAt"] > before
    assert (await e2b.call("POST", f"{path}/timeout", {"timeout": 5})).status_code == 204
    assert (await e2b.call("GET", path)).json()["endAt"] < before


@pytest.mark.parametrize("memory", [True, False])
async def test_a_paused_sandbox_answers_nothing_until_it_is_connected_to(e2b: E2b, memory: bool) -> None:
    made = await e2b.create()
    path = f"/sandboxes/{made['sandboxID']}"
    assert (await e2b.call("POST", f"{path}/pause", {"memory": memory})).status_code == 204
    assert (await e2b.call("POST", f"{path}/pause", {})).status_code == 409
    assert await state_of(e2b, made["sandboxID"]) == "paused"
    assert (await e2b.inside(made)).status_code == 502
    again = await e2b.call("POST", f"{path}/connect", {"timeout": 60})
    assert again.status_code == 201
    assert again.json()["envdAccessToken"] == made["envdAccessToken"]
    assert await state_of(e2b, made["sandboxID"]) == "running"
    assert (await e2b.inside(made)).status_code == 204


async def test_a_sandbox_that_is_to_pauses_when_its_time_is_over_and_a_request_wakes_it(e2b: E2b) -> None:
    made = await e2b.create(timeout=60, autoPause=True, autoResume={"enabled": True})
    await e2b.call("POST", f"/sandboxes/{made['sandboxID']}/timeout", {"timeout": 0})

    async def is_paused() -> bool:
        return await state_of(e2b, made["sandboxID"]) == "paused"

    await until(is_paused)
    answers = await asyncio.gather(*(e2b.inside(made) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {204}
    assert await state_of(e2b, made["sandboxID"]) == "running"


async def test_lists_are_newest_first_filtered_and_paged(e2b: E2b) -> None:
    names = []
    for number in range(3):
        names.append((await e2b.create(metadata={"n": str(number), "of": "a&b=c"}))["sandboxID"])
        await asyncio.sleep(0.002)  # so that no two begin in one millisecond
    assert await listed(e2b) == names[::-1]
    assert await listed(e2b, order="asc") == names
    twice = urlencode({"n": quote("1"), "of": quote("a&b=c")})
    assert await listed(e2b, metadata=twice) == [names[1]]
    assert await listed(e2b, state="paused") == []
    assert await listed(e2b, template="another") == []
    first = await e2b.call("GET", "/v2/sandboxes?limit=2")
    token = first.headers["x-next-token"]
    assert [each["sandboxID"] for each in first.json()] == [names[2], names[1]]
    rest = await e2b.call("GET", f"/v2/sandboxes?limit=2&nextToken={token}")
    assert [each["sandboxID"] for each in rest.json()] == [names[0]]
    assert "x-next-token" not in rest.headers
    assert (await e2b.call("GET", "/v2/sandboxes?nextToken=%21")).status_code == 400


async def test_a_list_of_what_began_after_a_time_that_was_told_has_that_one(e2b: E2b) -> None:
    made = await e2b.create()
    info = (await e2b.call("GET", f"/sandboxes/{made['sandboxID']}")).json()
    assert await listed(e2b, startedAfter=info["startedAt"]) == [made["sandboxID"]]
    assert await listed(e2b, startedAfter="2100-01-01T00:00:00Z") == []


async def test_metrics_are_those_of_now(e2b: E2b) -> None:
    made = await e2b.create()
    path, now = f"/sandboxes/{made['sandboxID']}/metrics", int(time.time())
    found = (await e2b.call("GET", f"{path}?start={now}&end={now + 1}")).json()
    assert {"timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed"} <= found[0].keys()
    assert (await e2b.call("GET", f"{path}?start={now - 900}&end={now - 600}")).json() == []


async def test_forks_are_sandboxes_of_their_own(e2b: E2b) -> None:
    made = await e2b.create(metadata={"a": "b"})
    answer = await e2b.call("POST", f"/sandboxes/{made['sandboxID']}/fork", {"count": 2, "timeout": 60})
    assert answer.status_code == 201
    forks = [each["sandbox"] for each in answer.json()]
    assert len({made["sandboxID"], *(fork["sandboxID"] for fork in forks)}) == 3
    assert len({made["envdAccessToken"], *(fork["envdAccessToken"] for fork in forks)}) == 3
    assert (await e2b.inside(forks[0])).status_code == 204


async def test_a_snapshot_is_a_template_until_it_is_removed(e2b: E2b) -> None:
    made = await e2b.create()
    taken = await e2b.call("POST", f"/sandboxes/{made['sandboxID']}/snapshots", {"name": "before"})
    assert taken.status_code == 201
    id = taken.json()["snapshotID"]
    assert taken.json()["names"] == ["before:default"]
    found = await e2b.call("GET", f"/snapshots?sandboxID={made['sandboxID']}&name=before")
    assert [each["snapshotID"] for each in found.json()] == [id]
    assert (await e2b.call("GET", "/snapshots?name=after")).json() == []
    for name in (id, "before"):
        again = await e2b.create(templateID=name)
        assert (await e2b.call("DELETE", f"/sandboxes/{again['sandboxID']}")).status_code == 204
    assert (await e2b.call("DELETE", f"/templates/{quote(id, safe='')}")).status_code == 204
    assert (await e2b.call("DELETE", f"/templates/{quote(id, safe='')}")).status_code == 404
    assert (await e2b.call("POST", "/v2/sandboxes", {"templateID": id})).status_code == 404


async def test_another_tenants_sandbox_answers_as_one_that_never_was(e2b: E2b) -> None:
    mine, theirs = await e2b.other("one"), await e2b.other("two")
    made = await mine.create()
    unknown = "0" * 32
    for method, path, body in (
        ("GET", "/sandboxes/{}", None),
        ("DELETE", "/sandboxes/{}", None),
        ("POST", "/sandboxes/{}/connect", {"timeout": 1}),
        ("POST", "/sandboxes/{}/timeout", {"timeout": 1}),
        ("POST", "/sandboxes/{}/pause", {}),
        ("POST", "/sandboxes/{}/fork", {}),
        ("POST", "/sandboxes/{}/snapshots", {}),
        ("PUT", "/sandboxes/{}/network", {}),
        ("GET", "/sandboxes/{}/metrics", None),
    ):
        other = await theirs.call(method, path.format(made["sandboxID"]), body)
        none = await theirs.call(method, path.format(unknown), body)
        assert (other.status_code, other.text.replace(made["sandboxID"], unknown)) == (404, none.text), path
    assert await listed(theirs) == []
    assert await listed(mine) == [made["sandboxID"]]
    assert (await mine.inside(made)).status_code == 204


async def test_keys_are_tokens_with_their_scopes(e2b: E2b) -> None:
    assert re.fullmatch("e2b_[0-9a-f]+", e2b.key)
    reader = await e2b.other("one", Scope.READ)
    assert await listed(reader) == []
    assert (await reader.call("POST", "/v2/sandboxes", {"templateID": "base"})).status_code == 403
    for key in ("", "e2b_00", e2b.key[:-1] + ("0" if e2b.key[-1] != "0" else "1")):
        answer = await e2b.http.get("/sandboxes", headers={"X-API-KEY": key})
        assert (answer.status_code, answer.json()["code"]) == (401, 401)
    token = await e2b.served.token("one")
    answer = await e2b.http.get("/sandboxes", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200


async def test_what_is_asked_for_wrongly_is_refused_in_e2bs_words(e2b: E2b) -> None:
    wrong: tuple[tuple[dict[str, object], int], ...] = (
        ({"templateID": "none"}, 404),
        ({"templateID": "base", "timeout": -1}, 400),
        ({"templateID": "base", "network": {"egressProxy": {"address": "x:1"}}}, 422),
        ({"templateID": "base", "network": {"denyOut": ["example.org"]}}, 400),
        ({}, 400),
    )
    for body, status in wrong:
        answer = await e2b.call("POST", "/v2/sandboxes", body)
        assert (answer.status_code, answer.json()["code"]) == (status, status), body
        assert answer.json()["message"]
    assert (await e2b.call("GET", "/nothing")).status_code == 404


async def test_a_sandbox_takes_its_own_token_and_no_other(e2b: E2b) -> None:
    made, other = await e2b.create(), await e2b.create()
    for token in ("", "x", other["envdAccessToken"]):
        answer = await e2b.inside({**made, "envdAccessToken": token}, "/process.Process/List")
        assert answer.status_code == 401
    assert (await e2b.inside(made, "/health")).status_code == 204


async def test_a_tenant_opens_names_and_no_single_addresses(e2b: E2b) -> None:
    theirs = await e2b.other("one")
    body = {"templateID": "base", "network": {"allowOut": ["10.0.0.1"]}}
    answer = await theirs.call("POST", "/v2/sandboxes", body)
    assert (answer.status_code, answer.json()["error_code"]) == (403, "not_permitted")
    made = await theirs.create(allow_internet_access=False)
    path = f"/sandboxes/{made['sandboxID']}/network"
    assert (await theirs.call("PUT", path, {"allowOut": ["10.0.0.1"]})).status_code == 403
    assert (await theirs.call("PUT", path, {"denyOut": ["0.0.0.0/0"]})).status_code == 204
    info = (await theirs.call("GET", f"/sandboxes/{made['sandboxID']}")).json()
    assert info["network"]["denyOut"] == ["0.0.0.0/0"]


async def test_many_sandboxes_are_listed_quickly(e2b: E2b) -> None:
    store = e2b.served.server.manager.store
    made = await e2b.create()
    asked = 0
    count = store._database.transact

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return await count(*args, **options)

    store._database.transact = counted  # type: ignore[method-assign]
    for _ in range(4):
        await e2b.create()
    before = asked
    assert made["sandboxID"] in await listed(e2b)
    assert asked - before < 8  # however many there are


async def test_files_for_a_build_go_where_only_the_signed_url_leads(e2b: E2b) -> None:
    asked = await e2b.call("POST", "/v3/templates", {"name": "mine:v1"})
    assert asked.status_code == 202
    template, build = asked.json()["templateID"], asked.json()["buildID"]
    path = f"/templates/{template}/files/{'a' * 64}"
    link = await e2b.call("GET", path)
    assert (link.status_code, link.json()["present"]) == (201, False)
    url = link.json()["url"]
    assert (await e2b.http.put(url.replace("a" * 64, "b" * 64), content=b"x")).status_code == 403
    assert (await e2b.http.put(url, content=b"x")).status_code == 200
    assert (await e2b.call("GET", path)).json() == {"present": True}
    theirs = await e2b.other("two")
    assert (await theirs.call("GET", path)).status_code == 404
    status = await e2b.call("GET", f"/templates/{template}/builds/{build}/status")
    assert status.json()["status"] == "waiting"
    assert (await theirs.call("GET", f"/templates/{template}/builds/{build}/status")).status_code == 404
    assert (await e2b.call("GET", "/templates/aliases/base")).status_code == 200
    assert (await e2b.call("GET", "/templates/aliases/none")).status_code == 404


async def test_an_idempotency_key_makes_one_sandbox(e2b: E2b) -> None:
    body = {"templateID": "base", "timeout": 60}
    both = [await e2b.call("POST", "/v2/sandboxes", body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert both[0].json()["sandboxID"] == both[1].json()["sandboxID"]


async def test_hosts_name_ports_of_sandboxes(e2b: E2b) -> None:
    made = await e2b.create()
    closed = await e2b.http.get("/", headers={"host": f"4000-{made['sandboxID']}.localhost:7358"})
    assert (closed.status_code, closed.json().get("port")) == (502, 4000), closed.text
    assert "port is not open" in closed.json()["message"]
    unknown = await e2b.http.get("/", headers={"host": f"4000-{'0' * 32}.localhost:7358"})
    assert "was not found" in unknown.json()["message"]
    assert (await e2b.call("GET", "/sandboxes", headers={"host": "evil.example"})).status_code == 421


async def test_what_would_be_left_out_of_a_sandbox_is_refused(e2b: E2b) -> None:
    tokens = {"tokens": {"aws": {"audience": "a", "tokenType": "JWT-SVID"}}}
    for asked, name in (({"iam": tokens}, "iam"), ({"network": {"egressProxy": {"address": "p:1"}}}, "egressProxy")):
        answer = await e2b.call("POST", "/sandboxes", {"templateID": "base", **asked})
        assert answer.status_code == 422
        assert name in answer.json()["message"]
        assert answer.headers["should-retry"] == "false"
    assert await e2b.served.server.manager.count() == 0
