"""Fleets over REST: started from a file's text or a spec, seen, commanded, scaled and ended; each tenant's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fleet.world import fleet_of, phase
from surfaces.server.world import Served, serving

from skerry.model.records import Filter
from skerry.model.spec import Spec
from skerry.model.tenants import Quota, Scope
from skerry.providers.mock import Context, Mock

FILE = """
name: crew
phases:
  - name: db
    files: {seed.txt: "the seed"}
  - name: workers
    count: 2
    wait_for: [db]
    env: {TOKEN: secret-value}
"""
DB, WORKERS = "agent-db-001", ["agent-workers-001", "agent-workers-002"]


@pytest.fixture(autouse=True)
def programs(mock_provider: Mock) -> None:
    @mock_provider.program("who")
    async def who(context: Context) -> int:
        await context.print(f"{context.env.get('SKERRY_PHASE')} {context.env.get('SKERRY_INDEX')}")
        return 0 if context.env.get("SKERRY_PHASE") == "workers" else 3


async def up(client: httpx.AsyncClient, file: str = FILE, name: str = "crew") -> dict[str, Any]:
    answer = await client.put(f"/v1/fleets/{name}?wait_s=60", json={"file": file})
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def members(client: httpx.AsyncClient, name: str = "crew") -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/fleets/{name}")).json()["members"]
    return found


async def test_a_fleet_comes_up_in_its_phases_and_tells_each_step(served: Served) -> None:
    client = await served.client("acme")
    found = await up(client)
    assert (found["kind"], found["state"], found["result"]["ok"]) == ("fleet.up", "done", True)
    assert found["result"]["phases"]["workers"]["ready"] == 2
    events = (await client.get(f"/v1/operations/{found['id']}/events")).text
    told = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]
    steps = [(step["data"]["kind"], step["data"].get("member")) for step in told[:-1]]
    assert steps.index(("memberready", DB)) < steps.index(("phasestarted", None), 1)
    shown = (await client.get("/v1/fleets/crew")).json()
    assert {name: each["state"] for name, each in shown["members"].items()} == dict.fromkeys([DB, *WORKERS], "ready")
    assert [(each["name"], each["count"], each["wait_for"]) for each in shown["phases"]] == [
        ("db", 1, []),
        ("workers", 2, ["db"]),
    ]
    assert (shown["project"], shown["operation"], shown["changeable"]) == ("acme", None, True)
    (summary,) = (await client.get("/v1/fleets")).json()["items"]
    assert (summary["id"], summary["phases"], summary["members"], summary["ready"]) == ("acme/crew", 2, 3, 3)
    assert {record.spec.project for record in await served.server.manager.list()} == {"acme"}


async def test_a_fleet_is_planned_scaled_stopped_by_phase_and_ended(served: Served) -> None:
    client = await served.client("acme")
    planned = (await client.post("/v1/fleets/crew/plan", json={"file": FILE})).json()
    assert (planned["changed"], [each["kind"] for each in planned["plan"]["changes"]]) == (True, ["create"] * 3)
    await up(client)
    assert (await client.post("/v1/fleets/crew/plan", json={})).json()["changed"] is False
    scaled = (await client.post("/v1/fleets/crew/scale?wait_s=60", json={"counts": {"workers": 3}})).json()
    assert (scaled["state"], len(await members(client))) == ("done", 4)
    stopped = (await client.post("/v1/fleets/crew/phases/workers/stop?wait_s=60", json={"grace_s": 0})).json()
    assert len(stopped["result"]["destroyed"]) == 3
    started = (await client.post("/v1/fleets/crew/phases/workers/start?wait_s=60", json={})).json()
    assert (started["state"], len(await members(client))) == ("done", 4)
    gone = await client.delete("/v1/fleets/crew?wait_s=60&grace_s=0")
    assert (gone.status_code, len(gone.json()["result"]["destroyed"])) == (202, 4)
    assert (await client.get("/v1/fleets/crew")).status_code == 404
    assert (await client.get("/v1/fleets")).json()["items"] == []
    assert await served.server.manager.list() == []


async def test_a_spec_that_was_read_elsewhere_will_do(served: Served) -> None:
    client = await served.client("acme")
    spec = fleet_of(phase("a", 2, spec=Spec(provider="mock", env={"A": "1"})))
    body = {"spec": msgspec.to_builtins(spec)}
    found = (await client.put("/v1/fleets/crew?wait_s=60", json=body)).json()
    assert (found["state"], len(await members(client))) == ("done", 2)


async def test_a_command_runs_in_many_members_at_once(served: Served) -> None:
    client = await served.client("acme")
    await up(client)
    found = (await client.post("/v1/fleets/crew/exec", json={"command": ["who"]})).json()
    said = {name: (each["result"]["exit_code"], each["result"]["stdout"]) for name, each in found["members"].items()}
    assert found["ok"] is False
    assert said == {DB: (3, "db 1\n"), WORKERS[0]: (0, "workers 1\n"), WORKERS[1]: (0, "workers 2\n")}
    found = (await client.post("/v1/fleets/crew/exec", json={"command": "who", "target": "workers"})).json()
    assert (found["ok"], sorted(found["members"])) == (True, WORKERS)
    missing = await client.post("/v1/fleets/crew/exec", json={"command": "who", "target": "web"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_what_members_say_is_streamed_each_with_its_name(served: Served) -> None:
    client = await served.client("acme")
    await up(client)
    await served.server.manager.pause((await served.server.manager.list(Filter(name=f"crew-{WORKERS[1]}")))[0].id)
    answer = await client.post("/v1/fleets/crew/exec/stream", json={"command": ["who"]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":"))
        if fields:
            told.append((fields["event"], json.loads(fields["data"])))
    assert told[-1] == ("end", {"members": 3})
    by_member = {(name, data["member"]): data for name, data in told[:-1]}
    assert by_member["stdout", DB]["text"] == "db 1\n"
    assert by_member["exit", DB]["exit_code"] == 3
    assert by_member["stdout", WORKERS[0]]["text"] == "workers 1\n"
    assert by_member["error", WORKERS[1]]["code"] == "wrong_state"


async def test_fleets_of_another_tenant_are_unknown_and_names_do_not_collide(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    await up(ours)
    bodies = {"exec": {"command": "who"}, "exec/stream": {"command": "who"}, "scale": {"counts": {"workers": 1}}}
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("POST", "/exec/stream"), ("POST", "/scale"), ("POST", "/plan"),
        ("POST", "/phases/workers/stop"), ("POST", "/phases/workers/start"),
    ):  # fmt: skip
        body = bodies.get(path[1:], {}) if method == "POST" else None
        answers = [
            await theirs.request(method, f"/v1/fleets/{name}{path}{query}", json=body)
            for name, query in (("crew", ""), ("never", ""), ("crew", "?project=acme"))
        ]
        assert {answer.status_code for answer in answers} == {404}, path
        told = [answer.json()["detail"] for answer in answers[:2]]
        assert told[0].replace("crew", "") == told[1].replace("never", "")
    assert (await theirs.get("/v1/fleets")).json()["items"] == []
    assert (await up(theirs))["state"] == "done"
    owner = await served.client()
    assert [each["id"] for each in (await owner.get("/v1/fleets")).json()["items"]] == ["acme/crew", "other/crew"]
    assert (await owner.get("/v1/fleets/crew")).status_code == 409
    assert (await owner.delete("/v1/fleets/crew?project=other&wait_s=60&grace_s=0")).json()["state"] == "done"
    assert len(await members(ours)) == 3


async def test_fleets_of_one_tenant_may_have_phases_of_the_same_names(served: Served) -> None:
    client = await served.client("acme")
    await up(client)
    assert (await up(client, FILE.replace("crew", "band"), "band"))["state"] == "done"
    crew, band = await members(client), await members(client, "band")
    assert sorted(crew) == sorted(band) == [DB, *WORKERS]
    assert not {each["id"] for each in crew.values()} & {each["id"] for each in band.values()}
    ran = (await client.post("/v1/fleets/band/exec", json={"command": "who", "target": DB})).json()
    assert list(ran["members"]) == [DB]
    assert (await client.post("/v1/fleets/band/plan", json={})).json()["changed"] is False
    gone = (await client.delete("/v1/fleets/band?wait_s=60&grace_s=0")).json()
    assert sorted(gone["result"]["destroyed"]) == [DB, *WORKERS]
    left = await members(client)
    assert {name: (each["id"], each["state"]) for name, each in left.items()} == {
        name: (each["id"], "ready") for name, each in crew.items()
    }


@pytest.mark.parametrize(
    ("phases", "status"),
    [
        ("[{name: a, mounts: ['/etc:/mnt']}]", 403),
        ("[{name: a, root: /}]", 403),
        ("[{name: a, network: host}]", 403),
        ("[{name: a, workspace: /root}]", 403),
        ("[{name: a, image: /etc/passwd}]", 403),
        ("[{name: a, files: {x: {from: /etc/hostname}}}]", 400),
        ("[{name: a, files: {x: {from: ~/.ssh/id_rsa}}}]", 400),
        ("[{name: a, env: [HOME]}]", 400),
        ("[{name: a, env: {HOME: }}]", 400),
        ("[{name: a, secrets: {KEY: {hosts: [a.example.org], file: /etc/shadow}}}]", 403),
        ("[{name: a, secrets: {KEY: {hosts: [a.example.org], env: HOME}}}]", 403),
    ],
)
async def test_nothing_of_the_host_is_for_the_file_of_a_tenant(served: Served, phases: str, status: int) -> None:
    client = await served.client("acme")
    answer = await client.put("/v1/fleets/crew", json={"file": f"name: crew\nphases: {phases}"})
    assert answer.status_code == status, answer.text
    assert Path("/etc/hostname").read_text().strip() not in answer.text
    assert (await client.get("/v1/fleets")).json()["items"] == []


async def test_a_compose_file_of_a_tenant_inherits_no_variable_of_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SERVER", "hidden")
    client = await served.client("acme")
    text = "services: {a: {image: x, environment: [OF_THE_SERVER]}}"
    answer = await client.put("/v1/fleets/crew", json={"file": text})
    assert (answer.status_code, answer.json()["code"], "hidden" in answer.text) == (400, "invalid_fleet", False)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"file": "name: other\nphases: [{name: a}]"},
        {"file": "name: crew\nproject: other\nphases: [{name: a}]"},
        {"file": "name: crew\nphases: [{name: a, memroy: 1G}]"},
        {"file": "{"},
        {"file": "name: crew\nphases: [{name: a, labels: {skerry.fleet: x}}]"},
        {"spec": {"name": "crew", "phases": [{"name": "a", "wait_for": ["a"]}]}},
        {"spec": {"name": "crew", "phases": [{"name": "a", "count": -1}]}},
    ],
)
async def test_what_is_no_fleet_is_refused(served: Served, body: dict[str, object]) -> None:
    client = await served.client("acme")
    answer = await client.put("/v1/fleets/crew", json=body)
    assert answer.status_code == 400, answer.text


async def test_a_fleet_keeps_to_the_quota_and_tells_what_failed(served: Served) -> None:
    client = await served.client("acme", quota=Quota(sandboxes=2))
    found = await up(client)
    assert (found["state"], found["problem"]["code"], found["result"]["ok"]) == ("failed", "create_failed", False)
    assert "may have 2 sandboxes" in found["problem"]["detail"]


async def test_a_member_is_never_a_sandbox_that_was_there_before(served: Served) -> None:
    client = await served.client("acme")
    await up(client)
    assert (await client.post("/v1/sandboxes", json={"name": "second-agent-workers-002"})).status_code == 201
    answer = await client.put("/v1/fleets/second", json={"file": FILE.replace("crew", "second")})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "second-agent-workers-002 is the name of a sandbox already" in answer.json()["detail"]


async def test_calls_need_their_scopes(served: Served) -> None:
    client, reader = await served.client("acme"), await served.client("acme", Scope.READ)
    await up(client)
    assert (await reader.get("/v1/fleets/crew")).status_code == 200
    for method, path, body in (
        ("PUT", "", {"file": FILE}), ("DELETE", "", None), ("POST", "/exec", {"command": "who"}),
        ("POST", "/scale", {"counts": {}}), ("POST", "/phases/db/stop", {}), ("POST", "/phases/db/start", {}),
    ):  # fmt: skip
        assert (await reader.request(method, f"/v1/fleets/crew{path}", json=body)).status_code == 403


async def test_the_next_server_knows_a_fleet_but_not_its_secrets(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider) as served:
        await up(await served.client("acme"))
        database = Path(served.server.config.database.removeprefix("sqlite:///"))
    assert b"secret-value" not in b"".join(path.read_bytes() for path in database.parent.glob("*") if path.is_file())
    async with serving(tmp_path, mock_provider) as served:
        client = await served.client("acme")
        shown = (await client.get("/v1/fleets/crew")).json()
        assert ([each["wait_for"] for each in shown["phases"]], shown["changeable"]) == ([[], ["db"]], False)
        body: dict[str, object] = {"counts": {"workers": 1}}
        found = (await client.post("/v1/fleets/crew/scale?wait_s=60", json=body)).json()
        assert (found["state"], found["problem"]["code"]) == ("failed", "wrong_state")
        found = (await client.post("/v1/fleets/crew/scale?wait_s=60", json={**body, "file": FILE})).json()
        assert (found["state"], len(await members(client))) == ("done", 2)
        assert (await client.delete("/v1/fleets/crew?wait_s=60&grace_s=0")).json()["state"] == "done"


async def test_a_fleet_and_its_commands_on_real_boxes(folder: Path) -> None:
    async with serving(folder) as served:
        owner = await served.client()
        text = "name: crew\nprovider: local\nphases: [{name: a, count: 2}]"
        found = (await owner.put("/v1/fleets/crew?wait_s=120", json={"file": text})).json()
        assert found["state"] == "done", found
        said = (await owner.post("/v1/fleets/crew/exec", json={"command": "echo $SKERRY_INDEX; pwd"})).json()
        assert {each["result"]["stdout"].splitlines()[0] for each in said["members"].values()} == {"1", "2"}
        gone = (await owner.delete("/v1/fleets/crew?wait_s=120&grace_s=0")).json()
        assert (gone["state"], len(gone["result"]["destroyed"])) == ("done", 2)
