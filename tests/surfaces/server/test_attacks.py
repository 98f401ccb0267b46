"""What a tenant tries against others and against the host, and what comes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from surfaces.server.use_world import Box, box_of
from surfaces.server.world import Served

from skerry.errors import CreateFailed
from skerry.gate import dialer
from skerry.manager import git
from skerry.model.records import TEMPORARY
from skerry.model.tenants import Principal, Scope
from skerry.providers.base import Isolation
from skerry.providers.mock import Context, Mock
from skerry.surfaces.rest import streams
from skerry.surfaces.server import app

FLEET = "name: crew\nphases:\n  - name: db\n"


async def test_a_fleet_that_is_started_again_leaves_the_boxes_of_others_alone(
    served: Served, mock_provider: Mock
) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    made = (await theirs.post("/v1/sandboxes", json={})).json()
    forked = f"{TEMPORARY}{made['id']}"  # as a fork of theirs has it that is being made
    await mock_provider.snapshot(made["id"], forked)
    for _ in range(2):
        answer = await ours.put("/v1/fleets/crew?wait_s=60", json={"file": FLEET})
        assert (answer.status_code, answer.json()["state"]) == (202, "done")
    assert made["id"] in await mock_provider.discover()
    assert forked in [each.name for each in await mock_provider.snapshots()]


@pytest.mark.parametrize(
    "source",
    [
        "file:///root",
        "FILE:///root",
        "ssh://git@github.com/a/b",  # with the keys of whoever runs the server
        "git://127.0.0.1/a",
        "git@example.org:a://b",
        "/srv/a://b",
        "ext::sh -c true://",
    ],
)
async def test_the_work_of_a_tenant_is_no_file_and_needs_no_key_of_the_host(served: Served, source: str) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/sandboxes", json={"workspace": {"source": source, "public": False}})
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")
    made = (await client.post("/v1/sandboxes", json={})).json()
    answer = await client.post(f"/v1/sandboxes/{made['id']}/fork", json={"workspace": {"source": source}})
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost.", "0x7f000001", "127.1", "a@127.0.0.1"])
async def test_the_work_of_a_tenant_is_cloned_from_the_internet_alone(served: Served, host: str) -> None:
    async with listening() as (port, came):
        client = await served.client("acme")
        source = f"http://{host}:{port}/repo.git"
        for name in ("plain", "told"):
            work = {"source": source, **({"public": False} if name == "told" else {})}
            answer = await client.post("/v1/sandboxes", json={"workspace": work})
            assert answer.status_code >= 400
            assert "127.0.0.1" not in answer.text.replace(source, "")
        fleet = f"{FLEET}    workspace: {{source: '{source}'}}\n"
        answer = await client.put("/v1/fleets/crew?wait_s=60", json={"file": fleet})
        assert answer.status_code >= 400 or answer.json()["state"] == "failed"
        assert came == []


async def test_a_name_on_the_internet_is_cloned_at_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    async def run(*arguments: str, **options: Any) -> tuple[int, str, str]:
        runs.append((arguments, options))
        return (0, "git version 2.39.5", "") if arguments == ("version",) else (1, "", "no")

    monkeypatch.setattr(git, "_git", run)
    monkeypatch.setattr(dialer, "look_up", lambda name: ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
    with pytest.raises(CreateFailed):
        await git.clone("https://example.org/repo.git", None, tmp_path, public=True)
    arguments, options = runs[-1]
    assert arguments[0] == "clone"
    assert options["public"]
    pin = "http.curloptResolve=example.org:443:93.184.215.14,[2606:2800:21f:cb07:6820:80da:af6b:8b2c]"
    assert {pin, "http.followRedirects=false"} <= {*options["settings"]}


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[str]]]:
    """A server of the host's own on its loopback, and the first lines that it was sent."""
    came: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append((await reader.readline()).decode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], came


@pytest.mark.parametrize("body", [{"ports": [{"port": 80, "local": 8080}]}, {"ports": ["53:53"]}, {"runtime": "runc"}])
async def test_a_tenant_takes_no_port_of_the_host_and_chooses_no_runtime(served: Served, body: dict[str, Any]) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/sandboxes", json=body)
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")


async def test_a_tenant_has_no_weaker_wall_than_the_server_is_set_to(
    served: Served, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock_provider, "isolation", Isolation.VM, raising=False)
    client = await served.client("acme")
    spec = {"name": "crew", "phases": [{"name": "db", "spec": {"provider": "local"}}]}
    for method, path, body in (
        ("POST", "/v1/sandboxes", {"provider": "local"}),
        ("POST", "/v1/pools", {"name": "fast", "spec": {"provider": "local"}}),
        ("PUT", "/v1/fleets/crew", {"spec": spec}),
        ("PUT", "/v1/fleets/crew", {"file": f"provider: local\n{FLEET}"}),
    ):
        answer = await client.request(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted"), path
    assert (await client.post("/v1/sandboxes", json={})).status_code == 201


@pytest.mark.parametrize("path", ["/v1/events?follow=true", "/v1/ledger/follow"])
async def test_what_a_revoked_token_follows_ends(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(streams, "LOOK_S", 0.05)
    client = await served.client("acme")
    async with client.stream("GET", path) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        (token,) = await served.server.access.tokens("acme")
        await served.server.access.revoke(token.id)
        async with asyncio.timeout(20):
            async for _ in pieces:
                pass


async def test_what_a_revoked_token_downloads_breaks_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOOK_S", 0.0)
    client = await served.client("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    path = f"/v1/sandboxes/{id}/files/content?path=large"
    await client.put(path, content=bytes(64 << 20))
    async with client.stream("GET", path) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        (token,) = await served.server.access.tokens("acme")
        await served.server.access.revoke(token.id)
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass


async def test_a_command_that_lasts_ends_with_its_token(
    served: Served, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, is_over = asyncio.Event(), asyncio.Event()

    @mock_provider.program("forever")
    async def forever(context: Context) -> int:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()
        return 0

    monkeypatch.setattr(app, "LOOK_S", 0.05)
    client = await served.client("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    call = asyncio.create_task(client.post(f"/v1/sandboxes/{id}/exec", json={"command": ["forever"]}))
    async with asyncio.timeout(20):
        await runs.wait()
        (token,) = await served.server.access.tokens("acme")
        await served.server.access.revoke(token.id)
        assert (await call).status_code == 401
        await is_over.wait()


async def test_nothing_is_kept_for_sandboxes_that_have_ended(served: Served) -> None:
    client = await served.client("acme")
    server = served.server
    ids = [(await client.post("/v1/sandboxes", json={})).json()["id"] for _ in range(3)]
    for id in ids:
        await client.get(f"/v1/sandboxes/{id}/explain")
        await server.manager.get(id)
    await server.manager.destroy(ids[0], grace_s=0)  # by the owner of the host
    await client.delete(f"/v1/sandboxes/{ids[1]}?grace_s=0")
    for id in ids[:2]:
        assert (await client.get(f"/v1/sandboxes/{id}/explain")).status_code == 200
    await server.tidy()
    mine = await server.manager_for(Principal(actor="", tenant="acme", scopes=frozenset()))
    assert mine.handles.known == server.manager.handles.known == [ids[2]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/build", {"dockerfile": "FROM scratch", "network": "host"}),
        ("/v1/images/build", {"dockerfile": "FROM scratch", "network": "bridge"}),
        ("/v1/images/build/context?name=a&network=host", None),
        ("/v1/images/pull", {"name": "127.0.0.1:5000/a"}),
        ("/v1/images/pull", {"name": "localhost/a"}),
        ("/v1/images/pull", {"name": "[::1]:5000/a"}),
        ("/v1/images/pull", {"name": "169.254.169.254/a"}),
        ("/v1/images/pull", {"name": "127.1:80/a"}),
    ],
)
async def test_images_of_a_tenant_reach_nothing_that_is_the_hosts(served: Served, path: str, body: Any) -> None:
    client = await served.client("acme", Scope.READ, Scope.IMAGES)
    answer = await client.post(path, json=body) if body else await client.post(path, content=b"tar")
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")


@pytest.mark.parametrize("name", ["alpine", "library/alpine:3", "registry.invalid/a"])
async def test_images_of_the_internet_are_asked_for(served: Served, name: str) -> None:
    client = await served.client("acme", Scope.READ, Scope.IMAGES)
    answer = await client.post("/v1/images/pull", json={"name": name})
    assert answer.status_code == 202


@pytest.mark.parametrize("field", ["memory", "disk"])
async def test_a_size_beyond_all_numbers_is_a_wrong_field(served: Served, field: str) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/sandboxes", json={field: "9" * 400})
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_a_token_without_files_learns_nothing_of_them_by_the_stream_of_an_agent(served: Served) -> None:
    async with box_of(served) as box:
        reader = await served.client("acme", Scope.READ)
        async with Box(served, reader, box.id).socket("/agent") as socket:
            for id, method in enumerate(("stat", "list_dir", "read_file")):
                await socket.send(json.dumps({"id": id, "method": method, "params": {"path": "/"}}).encode() + b"\n")
                answer = json.loads(await socket.recv())
                assert answer["error"]["data"]["code"] == "not_permitted"
