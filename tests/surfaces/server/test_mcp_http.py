"""MCP over HTTP: who is let in, as two tenants, with one scope, with another's id."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult
from surfaces.server.mcp_world import MODES, call, error_of, joined, really
from surfaces.server.world import Served, serving

from skerry.model.tenants import Quota, Scope
from skerry.providers.mock import Mock
from skerry.surfaces.mcp.server import ALL

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
ACCEPT = {"accept": "application/json, text/event-stream"}


def text(result: CallToolResult) -> str:
    assert result.content[0].type == "text"
    return result.content[0].text


@MODES
async def test_tenants_do_not_see_each_other(served: Served, mode: str) -> None:
    async with joined(served, "acme", mode=mode) as ours, joined(served, "other", mode=mode) as theirs:
        id = (await call(ours, "create_sandbox", name="work"))["id"]
        assert (await call(theirs, "list_sandboxes"))["sandboxes"] == []
        for reference in ("work", id, id[:8]):
            assert await error_of(theirs, "execute_command", sandbox=reference, command="true") == "not_found"
            assert await error_of(theirs, "destroy_sandbox", sandbox=reference) == "not_found"
            with pytest.raises(MCPError, match="not_found"):
                await theirs.read_resource(f"skerry://{reference}/tmp/x")
        await call(theirs, "create_sandbox", name="work")
        async with joined(served, None, mode=mode) as admin:
            assert len((await call(admin, "list_sandboxes"))["sandboxes"]) == 2
            assert (await call(admin, "execute_command", sandbox=id, command="true"))["exit_code"] == 0


@MODES
async def test_each_tool_needs_its_scope(served: Served, mode: str) -> None:
    async with joined(served, "acme") as owner:
        await call(owner, "create_sandbox", name="a")
    async with joined(served, "acme", Scope.READ, mode=mode) as client:
        assert len((await call(client, "list_sandboxes"))["sandboxes"]) == 1
        for tool in ALL:
            if tool.scope is Scope.READ:
                continue
            needed = {
                "sandbox": "a", "command": "true", "code": "1", "path": "/x", "content": "", "file": "", "fleet": "f",
                "name": "n", "snapshot": "s", "process": 1, "uri": "u",
            }  # fmt: skip
            result = await client.call_tool(tool.function.__name__, needed)
            assert result.is_error, tool
            assert result.structured_content["error"]["code"] == "not_permitted", tool
            assert tool.scope in text(result)
        with pytest.raises(MCPError, match="not_permitted"):
            await client.read_resource("skerry://a/etc/hostname")


async def test_a_quota_holds_here_too(served: Served) -> None:
    token = await served.token("acme")
    await served.server.access.set_quota("acme", Quota(sandboxes=1))
    async with joined(served, token=token) as client:
        await call(client, "create_sandbox")
        assert await error_of(client, "create_sandbox") == "limit_reached"
        assert not (await call(client, "fleet_up", file="name: f\nphases: {a: {}}"))["ok"]


async def test_every_call_is_told_in_the_ledger_as_the_tokens_own(served: Served) -> None:
    async with joined(served, "acme") as client:
        id = (await call(client, "create_sandbox"))["id"]
        await call(client, "execute_command", sandbox=id, command="true")
    lines = [line async for line in served.server.manager.ledger.show() if line.sandbox == id]
    assert {(line.who.tenant, line.who.actor.partition(":")[0]) for line in lines} == {("acme", "token")}
    assert "exec" in {line.kind for line in lines}


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_without_a_token_nothing_is_told(served: Served, method: str) -> None:
    client = await served.anonymous(headers=ACCEPT)
    for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic eDp4"}):
        answer = await client.request(method, "/mcp", json=HELLO, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "access_denied")
        assert answer.headers["www-authenticate"].startswith("Bearer")


async def greet(client: httpx.AsyncClient) -> str:
    answer = await client.post("/mcp", json=HELLO, headers=ACCEPT)
    assert answer.status_code == 200
    return str(answer.headers["mcp-session-id"])


async def test_the_id_of_a_client_is_of_no_use_with_another_token(served: Served) -> None:
    ours, theirs, again = await served.client("acme"), await served.client("other"), await served.client("acme")
    id = await greet(ours)
    ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    for client in (theirs, again):
        for method in ("POST", "DELETE"):
            known = await client.request(method, "/mcp", json=ask, headers={**ACCEPT, "mcp-session-id": id})
            never = await client.request(method, "/mcp", json=ask, headers={**ACCEPT, "mcp-session-id": "0" * 32})
            assert (known.status_code, known.content) == (never.status_code, never.content)
            assert known.status_code == 404
    fine = await ours.post("/mcp", json=ask, headers={**ACCEPT, "mcp-session-id": id})
    assert fine.status_code == 200
    assert await greet(ours) != id


async def test_a_token_that_is_revoked_ends_what_it_began(served: Served) -> None:
    client = await served.client("acme")
    id = await greet(client)
    (token,) = await served.server.access.tokens("acme")
    await served.server.access.revoke(token.id)
    ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    assert (await client.post("/mcp", json=ask, headers={**ACCEPT, "mcp-session-id": id})).status_code == 401


async def test_one_token_cannot_take_the_room_of_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.surfaces.mcp.http._MOST_OF_ONE", 2)
    client, other = await served.client("acme"), await served.client("other")
    ids = [await greet(client) for _ in range(2)]
    answer = await client.post("/mcp", json=HELLO, headers=ACCEPT)
    assert (answer.status_code, answer.json()["code"]) == (429, "limit_reached")
    await greet(other)
    gone = await client.delete("/mcp", headers={**ACCEPT, "mcp-session-id": ids[0]})
    assert gone.status_code == 200
    await greet(client)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "evil.test"}, 421), ({"origin": "https://evil.test"}, 403), ({"origin": "null"}, 403)],
)
async def test_pages_of_other_sites_are_refused(served: Served, headers: dict[str, str], status: int) -> None:
    client = await served.client("acme")
    answer = await client.post("/mcp", json=HELLO, headers={**ACCEPT, **headers})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"jsonrpc":"2.0"}', b"\xff", b"[" * 100_000])
async def test_what_is_no_message_is_refused(served: Served, body: bytes) -> None:
    client = await served.client("acme")
    answer = await client.post("/mcp", content=body, headers={**ACCEPT, "content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert (await client.get("/mcp", headers=ACCEPT)).status_code == 405
    await greet(client)


async def test_a_message_that_is_too_large_is_refused(tmp_path: Path, own_registry: None, mock_provider: Mock) -> None:
    async with serving(tmp_path, mock_provider, max_body=4096) as served:
        client = await served.client("acme")
        answer = await client.post("/mcp", json={**HELLO, "more": "x" * 5000}, headers=ACCEPT)
        assert answer.status_code == 413


async def test_on_the_unix_socket_the_uid_is_enough(served: Served) -> None:
    client = await served.by_socket()
    id = await greet(client)
    ask = {
        "jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "create_sandbox", "arguments": {}},
    }  # fmt: skip
    answer = await client.post("/mcp", json=ask, headers={**ACCEPT, "mcp-session-id": id})
    assert '"state":"ready"' in answer.text.replace("\\", "").replace(" ", "")


async def test_calls_whose_client_is_gone_are_counted(own_registry: None, folder: Path) -> None:
    async with really(folder, max_calls=3) as served:
        token = await served.token("acme")
        client = await served.anonymous(headers={"authorization": f"Bearer {token}", **ACCEPT})
        async with joined(served, token=token) as owner:
            await call(owner, "create_sandbox", name="a")
        id = await greet(client)
        headers = {"mcp-session-id": id}
        for number in (2, 3, 4):
            command = f"touch /tmp/begun{number}; sleep 1000"
            arguments = {"sandbox": "a", "command": command}
            params = {"name": "execute_command", "arguments": arguments}
            ask = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
            async with client.stream("POST", "/mcp", json=ask, headers=headers):
                pass  # and away
        async with joined(served, token=token) as owner:
            while True:
                if await error_or_none(owner, "list_sandboxes") == "limit_reached":
                    break
        for number in (2, 3, 4):
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}
            assert (await client.post("/mcp", json=note, headers=headers)).status_code == 202
        async with joined(served, token=token) as owner:
            while await error_or_none(owner, "list_sandboxes") is not None:
                pass


async def error_or_none(client: Client, tool: str) -> str | None:
    result = await client.call_tool(tool, {})
    return str(result.structured_content["error"]["code"]) if result.is_error else None


async def test_a_server_ends_with_clients_that_are_in_the_middle_of_a_call(own_registry: None, folder: Path) -> None:
    before = asyncio.all_tasks()
    async with really(folder, drain_s=0) as served:
        token = await served.token("acme")
        http = httpx.AsyncClient(
            base_url=served.url, headers={"authorization": f"Bearer {token}", **ACCEPT}, timeout=60
        )
        async with joined(served, token=token) as client:
            await call(client, "create_sandbox", name="a")
        headers = {"mcp-session-id": await greet(http)}
        params = {"name": "execute_command", "arguments": {"sandbox": "a", "command": "touch /tmp/x; sleep 1000"}}
        ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        running = asyncio.create_task(http.post("/mcp", json=ask, headers=headers))
        manager = served.server.manager
        while not await (await manager.get("a")).files.exists("/tmp/x"):
            pass
    await asyncio.wait([running], timeout=30)
    assert running.done()
    running.exception()
    await http.aclose()
    left = {getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks() - before}
    assert left <= {"_shutdown_watcher"}  # of the library for streams of events: one for the life of a loop


async def test_without_the_sdk_the_rest_works_and_a_client_is_told_what_is_missing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skerry.surfaces.mcp.server", None)
    client = await served.client("acme")
    answer = await client.post("/mcp", json=HELLO, headers=ACCEPT)
    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")
    assert "pip install 'skerry[mcp]'" in answer.json()["detail"]
    assert (await client.get("/v1/sandboxes")).status_code == 200
