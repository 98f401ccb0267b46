"""The life of a sandbox over REST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from surfaces.server.use_world import Box, box_of
from surfaces.server.world import Served

from skerry.model.tenants import Scope


@pytest.fixture
async def box(served: Served) -> AsyncIterator[Box]:
    async with box_of(served) as box:
        yield box


async def test_a_sandbox_is_destroyed_and_then_gone(box: Box) -> None:
    assert (await box.delete("")).status_code == 204
    shown = await box.get("")
    assert (shown.status_code, shown.json()["state"], shown.json()["cause"]) == (200, "destroyed", "user")
    assert (await box.delete("")).status_code == 204
    for path, body in [("/exec", {"command": "true"}), ("/pause", {}), ("/wait", {"states": ["ready"]})]:
        answer = await box.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (410, "sandbox_gone"), path


async def test_a_name_is_as_good_as_an_id(served: Served) -> None:
    async with box_of(served, name="web") as box:
        assert (await box.client.get("/v1/sandboxes/web")).json()["id"] == box.id
        assert (await box.client.post("/v1/sandboxes/web/pause")).json()["state"] == "paused"
        assert (await box.client.delete("/v1/sandboxes/web?grace_s=0")).status_code == 204


async def test_it_is_paused_and_goes_on(box: Box) -> None:
    assert (await box.post("/pause")).json()["state"] == "paused"
    refused = await box.post("/exec", json={"command": "true"})
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")
    assert (await box.post("/resume")).json()["state"] == "ready"
    assert (await box.sh("echo on"))["stdout"] == "on\n"


async def test_it_is_stopped_and_started_with_its_files(box: Box) -> None:
    await box.sh("echo kept > file")
    assert (await box.post("/stop", json={"timeout_s": 0})).json()["state"] == "stopped"
    assert (await box.post("/start", json={"env": {"WHO": "me"}})).json()["state"] == "ready"
    assert (await box.sh("cat file; echo $WHO"))["stdout"] == "kept\nme\n"


async def test_a_change_of_what_has_changed_is_refused(box: Box) -> None:
    tag = (await box.get("")).headers["etag"]
    changed = await box.client.patch(box.url(""), json={"lifetime": "2h"}, headers={"if-match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    for answer in (
        await box.client.patch(box.url(""), json={"idle": 5}, headers={"if-match": tag}),
        await box.post("/pause", headers={"if-match": tag}),
        await box.delete("", headers={"if-match": tag}),
        await box.delete("", headers={"if-match": '"nonsense"'}),
    ):
        assert answer.status_code == 412
    assert (await box.post("/pause", headers={"if-match": changed.headers["etag"]})).status_code == 200


async def test_what_is_left_out_of_a_change_stays(box: Box) -> None:
    whole = (await box.client.patch(box.url(""), json={"lifetime": 3600, "idle": 600})).json()
    assert (whole["spec"]["lifetime_s"], whole["spec"]["idle_s"]) == (3600, 600)
    idle = (await box.client.patch(box.url(""), json={"idle": None})).json()
    assert abs(idle["ends_at"] - whole["ends_at"]) < 5
    assert not idle["spec"].get("idle_s")
    ever = (await box.client.patch(box.url(""), json={"lifetime": None})).json()
    assert ever["ends_at"] is None


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "", {}),
        ("PATCH", "", {"lifetime": "soon"}),
        ("PATCH", "", {"name": "other"}),
        ("POST", "/stop", {"timeout_s": -1}),
        ("POST", "/stop", {"timeout_s": 1e9}),
        ("POST", "/wait", {"states": ["happy"]}),
        ("POST", "/env", {}),
        ("POST", "/env", {"env": {"A=B": "x"}}),
        ("DELETE", "?grace_s=-1", None),
        ("DELETE", "?grace_s=long", None),
        ("DELETE", "?volumes=perhaps", None),
        ("GET", "/logs?tail=-1", None),
    ],
)
async def test_what_cannot_be_meant_is_refused(box: Box, method: str, path: str, body: Any) -> None:
    answer = await box.client.request(method, box.url(path), json=body)
    assert answer.status_code == 400, answer.text
    assert (await box.get("")).json()["state"] == "ready"


async def test_a_wait_is_over_when_the_state_is_there(box: Box) -> None:
    waiting = asyncio.create_task(box.post("/wait", json={"timeout_s": 30}))
    await box.delete("?grace_s=0")
    assert (await waiting).json()["state"] == "destroyed"


async def test_a_wait_has_an_end(box: Box) -> None:
    answer = await box.post("/wait", json={"states": ["paused"], "timeout_s": 0.05})
    assert (answer.status_code, answer.json()["code"]) == (504, "call_timeout")


async def test_it_tells_when_it_will_end_and_why(served: Served) -> None:
    async with box_of(served, lifetime=1000) as box:
        told = (await box.get("/explain")).json()
        assert told["reachable"]
        assert any("lifetime" in why for why in told["why"])


async def test_it_tells_what_it_takes(box: Box) -> None:
    assert (await box.get("/metrics")).json()["memory_bytes"] >= 0


async def test_variables_are_added_and_never_told(box: Box) -> None:
    assert (await box.post("/env", json={"env": {"SECRET": "s3cr3t"}})).status_code == 204
    assert (await box.sh("echo $SECRET"))["stdout"] == "s3cr3t\n"
    assert "s3cr3t" not in (await box.get("")).text


async def test_its_log_is_told(box: Box) -> None:
    answer = await box.get("/logs?tail=10")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")


async def test_without_a_command_there_is_no_service(box: Box) -> None:
    assert (await box.get("/service")).json() == {"service": None}
    assert (await box.get("/service/log")).status_code == 404


async def test_long_lists_come_in_pages(served: Served) -> None:
    client = await served.client("acme")
    made = [(await client.post("/v1/sandboxes", json={})).json()["id"] for _ in range(5)]
    found: list[str] = []
    after = ""
    while True:
        page = (await client.get("/v1/sandboxes", params={"limit": 2, "after": after})).json()
        found += [each["id"] for each in page["items"]]
        if page["next"] is None:
            break
        after = page["next"]
        await client.delete(f"/v1/sandboxes/{page['items'][-1]['id']}?grace_s=0")  # the one that the cursor names
    assert found == made


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "label=x", "state=happy", "after=nothing", "x=1"]
)
async def test_a_list_that_cannot_be_is_refused(box: Box, query: str) -> None:
    assert (await box.client.get(f"/v1/sandboxes?{query}")).status_code == 400


@pytest.mark.parametrize("id", ["..", "%2e%2e", "%00", "x" * 5000, "é", "%ff%fe", "a%2Fb", "-1", "%F0%9F%92%A9"])
@pytest.mark.parametrize("path", ["", "/exec", "/files/stat?path=x", "/terminal"])
async def test_ids_of_any_form_are_unknown_and_no_more(box: Box, id: str, path: str) -> None:
    method = "POST" if path == "/exec" else "GET"
    answer = await box.client.request(method, f"/v1/sandboxes/{id}{path}", json={"command": "true"})
    assert answer.status_code in (404, 405), answer.text


async def test_each_call_needs_its_scope(served: Served) -> None:
    async with box_of(served) as box:
        reader = Box(served, await served.client("acme", Scope.READ), box.id)
        for method, path, body in [
            ("DELETE", "", None),
            ("PATCH", "", {"idle": 5}),
            ("POST", "/pause", {}),
            ("POST", "/exec", {"command": "id"}),
            ("POST", "/exec/stream", {"command": "id"}),
            ("POST", "/processes", {"command": "id"}),
            ("GET", "/files?path=.", None),
            ("PUT", "/files/content?path=x", None),
            ("GET", "/files/watch", None),
            ("POST", "/env", {"env": {}}),
        ]:
            answer = await reader.client.request(method, reader.url(path), json=body)
            assert answer.status_code == 403, path
        assert (await reader.get("/explain")).status_code == 200
