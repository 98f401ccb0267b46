"""Snapshots and volumes over REST, and that a tenant has none but its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from surfaces.server.world import Served

from skerry.errors import InvalidSpec
from skerry.model.records import kept_snapshot, shown_snapshot, temporary_snapshot
from skerry.model.spec import Spec, new_id
from skerry.model.tenants import Quota
from skerry.providers.mock import Mock


async def make(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    answer = await client.post("/v1/sandboxes", json=fields)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def write(served: Served, id: str, text: str) -> None:
    await served.server.manager.write_file(id, "work.txt", text)


async def read(served: Served, id: str) -> str:
    return (await served.server.manager.read_file(id, "work.txt")).decode()


async def names(client: httpx.AsyncClient, noun: str = "snapshots") -> list[str]:
    return [each["name"] for each in (await client.get(f"/v1/{noun}")).json()["items"]]


async def test_a_sandbox_is_made_of_a_snapshot_restored_to_it_and_forked(served: Served) -> None:
    client = await served.client("acme")
    made = await make(client)
    await write(served, made["id"], "first")
    taken = await client.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "base"})
    assert (taken.status_code, taken.json()["name"], taken.json()["sandbox"]) == (201, "base", made["id"])
    await write(served, made["id"], "second")
    other = await make(client, snapshot="base")
    assert (other["spec"]["snapshot"], await read(served, other["id"])) == ("base", "first")
    fork = (await client.post(f"/v1/sandboxes/{made['id']}/fork", json={"name": "twin", "labels": {"a": "b"}})).json()
    assert (fork["name"], fork["labels"], await read(served, fork["id"])) == ("twin", {"a": "b"}, "second")
    restored = await client.post(f"/v1/sandboxes/{made['id']}/restore", json={"snapshot": "base"})
    assert (restored.status_code, restored.json()["id"]) == (200, made["id"])
    assert await read(served, made["id"]) == "first"
    assert await names(client) == ["base"]


async def test_a_snapshot_in_use_is_a_conflict_and_goes_when_it_is_not(served: Served) -> None:
    client = await served.client("acme")
    made = await make(client)
    await client.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "base"})
    again = await client.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "base"})
    assert (again.status_code, "acme.." in again.text) == (409, False)
    user = await make(client, snapshot="base")
    answer = await client.delete("/v1/snapshots/base")
    assert (answer.status_code, "acme.." in answer.text) == (409, False)
    await served.server.manager.destroy(user["id"])
    assert (await client.delete("/v1/snapshots/base")).status_code == 204
    assert await names(client) == []


async def test_tenants_have_snapshots_of_the_same_name_and_see_only_their_own(served: Served) -> None:
    ours, theirs, owner = await served.client("acme"), await served.client("other"), await served.client()
    for client, text in ((ours, "ours"), (theirs, "theirs")):
        made = await make(client)
        await write(served, made["id"], text)
        answer = await client.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "base"})
        assert answer.status_code == 201
    assert await names(ours) == await names(theirs) == ["base"]
    assert sorted(await names(owner)) == ["acme..base", "other..base"]
    assert await read(served, (await make(ours, snapshot="base"))["id"]) == "ours"
    assert (await theirs.delete("/v1/snapshots/base")).status_code == 204
    assert (await names(ours), await names(theirs)) == (["base"], [])


async def test_another_tenants_snapshot_is_as_unknown_as_one_that_never_was(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    made, mine = await make(ours), await make(theirs)
    await ours.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"name": "plan"})
    for name in ("plan", "acme..plan"):
        for method, path, body in (
            ("DELETE", f"/v1/snapshots/{name}", None),
            ("POST", f"/v1/sandboxes/{mine['id']}/restore", {"snapshot": name}),
        ):
            answer = await theirs.request(method, path, json=body)
            never = await theirs.request(method, path.replace(name, "never"), json=body and {"snapshot": "never"})
            assert answer.status_code == never.status_code == 404
            assert answer.json()["detail"].replace(name, "") == never.json()["detail"].replace("never", "")
    answers = [await theirs.post("/v1/sandboxes", json={"snapshot": name}) for name in ("plan", "never")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json()["detail"].replace("plan", "") == answers[1].json()["detail"].replace("never", "")
    assert (await theirs.post("/v1/sandboxes", json={"snapshot": "acme..plan"})).status_code == 400
    for verb in ("snapshots", "fork", "restore"):
        path = f"/v1/sandboxes/{made['id']}/{verb}"
        assert (await theirs.post(path, json={"name": "x", "snapshot": "plan"})).status_code in (400, 404)
    assert await names(ours) == ["plan"]


@pytest.mark.parametrize("body", [{"mounts": ["/etc:/mnt"]}, {"root": "/"}, {"network": "host"}, {"target": "x"}])
async def test_a_fork_of_a_tenant_reaches_nothing_of_the_host(served: Served, body: dict[str, object]) -> None:
    client = await served.client("acme")
    made = await make(client)
    assert (await client.post(f"/v1/sandboxes/{made['id']}/fork", json=body)).status_code == 403
    assert (await client.post(f"/v1/sandboxes/{made['id']}/fork", json={"project": "other"})).status_code == 400


async def test_a_fork_counts_towards_the_quota_and_leaves_no_snapshot(served: Served, mock_provider: Mock) -> None:
    client = await served.client("acme", quota=Quota(sandboxes=2))
    made = await make(client)
    answers = [await client.post(f"/v1/sandboxes/{made['id']}/fork", json={}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 429]
    await served.server.manager.destroy(answers[0].json()["id"])
    assert [name for name in mock_provider.host.snapshots if not name.startswith("tmp-")] == []


async def test_many_forks_are_made_of_one_moment_or_none(served: Served, mock_provider: Mock) -> None:
    client = await served.client("acme", quota=Quota(sandboxes=4))
    made = await make(client)
    await write(served, made["id"], "first")
    answer = await client.post(f"/v1/sandboxes/{made['id']}/forks", json={"count": 3, "labels": {"a": "b"}})
    assert answer.status_code == 201, answer.text
    forks = answer.json()["items"]
    assert [await read(served, each["id"]) for each in forks] == ["first"] * 3
    assert all(each["labels"] == {"a": "b"} for each in forks)
    await served.server.manager.destroy(forks[0]["id"])
    too_many = await client.post(f"/v1/sandboxes/{made['id']}/forks", json={"count": 2})
    assert too_many.status_code == 429
    live = [each["id"] for each in (await client.get("/v1/sandboxes")).json()["items"]]
    assert sorted(live) == sorted([made["id"], *(each["id"] for each in forks[1:])])


async def test_snapshots_take_no_more_than_the_quota_of_disk_also_when_all_are_asked_for_at_once(
    served: Served, mock_provider: Mock
) -> None:
    client = await served.client("acme", quota=Quota(disk=10 << 20))
    made = await make(client, disk="4M")
    await write(served, made["id"], "x" * (3 << 20))
    path = f"/v1/sandboxes/{made['id']}/snapshots"
    answers = await asyncio.gather(*(client.post(path, json={"name": f"s{number}"}) for number in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 429, 429]
    refused = next(answer.json() for answer in answers if answer.status_code == 429)
    assert refused["code"] == "limit_reached"
    assert "may keep 10M of snapshots" in refused["detail"]
    kept = await names(client)
    assert (await client.delete(f"/v1/snapshots/{kept[0]}")).status_code == 204
    assert (await client.post(path, json={"name": "another"})).status_code == 201
    theirs = await served.client("other")
    there = await make(theirs, disk="4M")
    assert (await theirs.post(f"/v1/sandboxes/{there['id']}/snapshots", json={"name": "s"})).status_code == 201


@pytest.mark.parametrize("body", [{"data": True}, {"cache": "write"}, {"cache": "own", "cache_paths": {"a": "/a"}}])
async def test_a_quota_of_disk_is_not_passed_by_with_volumes(served: Served, body: dict[str, object]) -> None:
    client = await served.client("acme", quota=Quota(disk=10 << 20))
    answer = await client.post("/v1/sandboxes", json={"disk": "1M", **body})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_spec")
    assert answer.json()["field"] in body
    made = await make(client, disk="1M", cache="read")
    answer = await client.post(f"/v1/sandboxes/{made['id']}/fork", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_spec")


async def test_volumes_of_a_tenant_are_seen_and_removed_by_it_alone(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    made = await make(ours, name="db", cache="write")
    kinds = {each["kind"] for each in (await ours.get("/v1/volumes?sizes=true")).json()["items"]}
    assert kinds == {"data", "cache"}
    (name,) = [each["name"] for each in (await ours.get("/v1/volumes?kind=data")).json()["items"]]
    assert await names(theirs, "volumes") == []
    assert (await ours.delete(f"/v1/volumes/{name}")).status_code == 409
    await served.server.manager.destroy(made["id"])
    answer, never = await theirs.delete(f"/v1/volumes/{name}"), await theirs.delete("/v1/volumes/never")
    assert answer.status_code == never.status_code == 404
    assert answer.json()["detail"].replace(name, "") == never.json()["detail"].replace("never", "")
    assert name in await names(ours, "volumes")
    assert (await ours.delete(f"/v1/volumes/{name}")).status_code == 204
    assert name not in await names(ours, "volumes")


@pytest.mark.parametrize("project", ["acme", "a", "a.", "x" * 63, "tmp-x", "sha-x", "a..b"])
def test_a_kept_name_is_a_name_that_leads_back_to_its_project_alone(project: str) -> None:
    kept = kept_snapshot(project, "base.1")
    assert Spec(snapshot=kept).snapshot == kept
    assert shown_snapshot(project, kept) == "base.1"
    assert kept_snapshot(project, kept) == kept
    assert not kept.startswith("tmp-")
    for other in ("acme", "a", "a.", "x" * 62, "tmp-y", "sha-y", "a..b"):
        assert other == project or shown_snapshot(other, kept) is None
    assert shown_snapshot(project, temporary_snapshot(new_id())) is None


@pytest.mark.parametrize("name", ["b..c", "other..x", "acme...x", "x" * 60])
def test_a_name_that_could_be_anothers_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec):
        kept_snapshot("acme", name)


def test_without_a_project_names_are_as_they_are(tmp_path: Path) -> None:
    assert kept_snapshot(None, "a..b") == "a..b" == shown_snapshot(None, "a..b")
