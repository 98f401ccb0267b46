"""Every route, as it is made: nobody gets anything of it without a token, without its scope, or of another tenant."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from surfaces.server.world import Served
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from skerry.model.tenants import TENANT_SCOPES, Scope
from skerry.providers.mock import Context, Mock
from skerry.surfaces.rest.route import EVENTS, Route
from skerry.surfaces.rest.routes import ALL
from skerry.surfaces.server import app, limits

FILE = "name: crew-of-acme\nphases:\n  - name: db\n"
BODIES: dict[str, dict[str, Any]] = {
    "CreateWebhook": {"url": "https://hooks.example.org/in"},
    "ChangeWebhook": {"active": False},
    "ChangeSandbox": {"lifetime": 60},
    "AddEnv": {"env": {"A": "1"}},
    "ExecCommand": {"command": ["true"]},
    "FleetCommand": {"command": ["true"]},
    "RunCode": {"code": "1"},
    "RunInInterpreter": {"code": "1"},
    "StartProcess": {"command": ["true"]},
    "SendSignal": {"signal": "KILL"},
    "MakeFolder": {"path": "folder"},
    "MoveFile": {"path": "a", "to": "b"},
    "ChangeMode": {"path": "a", "mode": 0o600},
    "ChangeOwner": {"path": "a"},
    "MakeSymlink": {"path": "link", "target": "a"},
    "SetRules": {"allow": ["example.org"]},
    "MoreRules": {"rules": ["example.org"]},
    "SecretValues": {"values": {"TOKEN": "x"}},
    "TakeSnapshot": {"name": "another"},
    "Restore": {"snapshot": "snap-of-acme"},
    "Forks": {"count": 2},
    "CreatePool": {"name": "another", "size": 1},
    "CreateTenant": {"name": "another"},
    "PullImage": {"name": "another"},
    "FleetBody": {"file": FILE},
    "Scale": {"counts": {"db": 2}, "file": FILE},
    "WaitForSandbox": {"timeout_s": 1},
}
"""A good body of each kind that has to say something; all others may be empty."""
QUERIES = {"path": "a", "name": "another", "timeout_s": "1"}
OWN_NAMES = {"fleets_up", "fleets_plan"}
"""Calls that make something of a name: a tenant's names are its own, whatever others have called theirs."""
SHARED = {"images_remove"}
"""Calls on what all tenants of a host share, for which there is a scope of its own."""
ANYBODYS = {"system_whoami", "system_version"}
"""Calls without a scope: they tell only whoever calls about themselves, and the version."""
BESIDE = {"/v1/openapi.json", "/mcp", "/healthz", "/readyz", "/metrics", "/", "/assets/{name}"}
"""Paths that the application has beside the routes, each with tests of its own."""
HTTP = [route for route in ALL if route.method != "WEBSOCKET"]
SOCKETS = [route for route in ALL if route.method == "WEBSOCKET"]


class World:
    """An installation with a tenant that has one of everything."""

    def __init__(self, served: Served, owner: httpx.AsyncClient) -> None:
        self.served = served
        self.owner = owner
        self.ids: dict[str, str] = {}
        """What stands in a path for `{...}`, by the noun before it."""
        self.secret: list[str] = []
        """Texts that nobody else may see."""

    def path(self, route: Route) -> str:
        """The path of a route, to what the tenant has."""
        parts = route.path.split("/")
        for place, part in enumerate(parts):
            if part.startswith("{"):
                parts[place] = quote(self.ids[parts[place - 1]], safe="")
        return "/".join(parts)

    async def call(self, client: httpx.AsyncClient, route: Route, path: str = "") -> httpx.Response:
        """Call a route, with a query and a body that are good ones. What would last is left after its head."""
        query, body = route.hints.get("query"), route.hints.get("body")
        asked = {} if query is None else {name: QUERIES[name] for name in query.__struct_fields__ if name in QUERIES}
        sent: dict[str, Any] = {} if body is None else {"json": BODIES.get(body.__name__, {})}
        if body is None and route.takes:
            sent = {"content": b"", "headers": {"content-type": route.takes}}
        async with client.stream(route.method, path or self.path(route), params=asked, **sent) as answer:
            if answer.is_error or route.content_type != EVENTS:
                await answer.aread()
            return answer

    async def socket(self, route: Route, token: str | None) -> int:
        """The code that a WebSocket is closed with."""
        port = urlsplit(self.served.url).port
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        url = f"ws://127.0.0.1:{port}{self.path(route)}"
        async with connect(url, additional_headers=headers, proxy=None) as socket:
            try:
                async with asyncio.timeout(20):
                    await socket.recv()
            except ConnectionClosed:
                pass
        assert socket.close_code is not None
        return socket.close_code

    async def holdings(self) -> dict[str, Any]:
        """All that the tenant has, as it sees it."""
        found = {}
        for path in ("sandboxes", "snapshots", "volumes", "fleets", "operations"):
            answer = await self.owner.get(f"/v1/{path}")
            assert answer.status_code == 200, answer.text
            found[path] = [
                each for each in answer.json()["items"] if "of-acme" in str(each)
            ]  # pools fill by themselves
        found["processes"] = (await self.owner.get(f"/v1/sandboxes/{self.ids['sandboxes']}/processes")).json()
        found["files"] = (await self.owner.get(f"/v1/sandboxes/{self.ids['sandboxes']}/files?path=.")).json()
        hooks = (await self.owner.get("/v1/webhooks")).json()["items"]
        found["webhooks"] = [(each["id"], each["url"], each["active"]) for each in hooks]
        found["pools"] = [each["name"] for each in (await self.owner.get("/v1/pools")).json()["items"]]
        found["tokens"] = [each["id"] for each in (await self.owner.get("/v1/tokens")).json()["items"]]
        return found


@pytest.fixture
async def world(served: Served, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch) -> World:
    @mock_provider.program("forever")
    async def forever(context: Context) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(limits, "_REFUSED_BURST", 1e9)  # a wrong token for each route is many of one address
    owner = await served.client("acme", *TENANT_SCOPES, Scope.TOKENS)
    made = World(served, owner)
    box = await _made(owner, "POST", "/v1/sandboxes", {"name": "box-of-acme", "data": True, "command": ["forever"]})
    assert (await owner.put(f"/v1/sandboxes/{box['id']}/files/content?path=a/b", content=b"of-acme")).status_code == 200
    process = await _made(owner, "POST", f"/v1/sandboxes/{box['id']}/processes", {"command": ["forever"]})
    await _made(owner, "POST", f"/v1/sandboxes/{box['id']}/snapshots", {"name": "snap-of-acme"})
    await _made(owner, "POST", "/v1/pools", {"name": "pool-of-acme", "size": 1})
    hook = await _made(owner, "POST", "/v1/webhooks", {"url": "https://hooks.example.org/of-acme"})
    operation = await _made(owner, "PUT", "/v1/fleets/crew-of-acme?wait_s=60", {"file": FILE})
    volume = next(each for each in (await owner.get("/v1/volumes")).json()["items"] if each["sandbox"] == box["id"])
    token = await _made(owner, "POST", "/v1/tokens", {"scopes": ["sandbox:read"]})
    made.ids = {
        "sandboxes": box["id"], "processes": str(process["process"]), "ports": "8080", "snapshots": "snap-of-acme",
        "pools": "pool-of-acme", "webhooks": hook["webhook"]["id"], "fleets": "crew-of-acme", "phases": "db",
        "operations": operation["id"], "volumes": volume["name"], "tokens": token["info"]["id"], "tenants": "acme",
        "images": "none", "kernels": "none", "interpreters": "python",
    }  # fmt: skip
    made.secret = [made.ids[name] for name in ("sandboxes", "webhooks", "operations", "volumes", "tokens")]
    made.secret += ["-of-acme", "acme"]
    return made


async def _made(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.request(method, path, json=body)
    assert answer.status_code in (200, 201, 202), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def _with(served: Served, token: str | None) -> httpx.AsyncClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return await served.anonymous(headers=headers)


def _but(scope: Scope | None) -> frozenset[Scope]:
    """All that a token of a tenant can have, without that scope."""
    return frozenset(Scope) - {Scope.ADMIN, scope}


def test_a_route_says_who_may_use_it() -> None:
    assert {route.name for route in ALL if route.scope is None} == ANYBODYS


async def test_nothing_is_served_beside_the_routes_but_what_is_known(served: Served) -> None:
    paths = {getattr(route, "path", None) for route in app.build(served.server)._app.routes}  # type: ignore[attr-defined]
    assert paths == {route.path for route in ALL} | BESIDE


@pytest.mark.parametrize("kind", ["none", "wrong", "expired"])
async def test_no_route_answers_without_a_good_token(world: World, kind: str) -> None:
    token: str | None = None
    if kind == "wrong":
        good = await world.served.token("acme")
        token = good[:25] + ("a" if good[25] != "a" else "b") + good[26:]
    elif kind == "expired":
        token = await world.served.token("acme", lifetime_s=0.001)
        await asyncio.sleep(0.01)  # until it is over
    before = await world.holdings()
    client = await _with(world.served, token)
    found = {route.name: (await world.call(client, route)).status_code for route in HTTP}
    assert {name: status for name, status in found.items() if status != 401} == {}
    codes = {route.name: await world.socket(route, token) for route in SOCKETS}
    assert {name: code for name, code in codes.items() if code != 4401} == {}
    assert await world.holdings() == before


async def test_no_route_answers_a_token_that_lacks_its_scope(world: World) -> None:
    before = await world.holdings()
    tokens = {
        scope: (await world.served.server.access.issue(tenant="acme", scopes=_but(scope))).text
        for scope in {route.scope for route in ALL} - {None}
    }
    clients = {scope: await _with(world.served, token) for scope, token in tokens.items()}
    wrong = {}
    for route in ALL:
        if route.scope is None:
            continue
        if route.method == "WEBSOCKET":
            status = await world.socket(route, tokens[route.scope]) - 4000
        else:
            status = (await world.call(clients[route.scope], route)).status_code
        if status != 403:
            wrong[route.name] = status
    assert wrong == {}
    after = await world.holdings()
    assert {**after, "tokens": ()} == {**before, "tokens": ()}


async def test_to_a_tenant_the_things_of_another_are_as_if_they_never_were(world: World) -> None:
    before = await world.holdings()
    await world.served.token("other")
    token = (await world.served.server.access.issue(tenant="other", scopes=_but(None))).text
    client = await _with(world.served, token)
    wrong = {}
    for route in ALL:
        if "{" not in route.path or route.name in OWN_NAMES | SHARED:
            continue
        wanted = 403 if route.scope is Scope.ADMIN else 404
        if route.method == "WEBSOCKET":
            status = await world.socket(route, token) - 4000
        else:
            answer = await world.call(client, route)
            status = answer.status_code
        if status != wanted:
            wrong[route.name] = status
    assert wrong == {}
    assert await world.holdings() == before


async def test_what_a_tenant_lists_has_nothing_of_another(world: World) -> None:
    before = await world.holdings()
    client = await _with(world.served, (await _token_of(world, "other")))
    told = {}
    for route in HTTP:
        if "{" in route.path or route.scope is Scope.ADMIN or route.name == "ledger_follow":
            continue
        if route.content_type == EVENTS:
            text = (await client.get(route.path)).text
        else:
            text = (await world.call(client, route)).text
        if found := [each for each in world.secret if each in text]:
            told[route.name] = found
    assert told == {}
    assert await world.holdings() == before


async def test_a_tenant_follows_no_line_of_another(world: World) -> None:
    client = await _with(world.served, (await _token_of(world, "other")))
    seen = ""
    async with client.stream("GET", "/v1/ledger/follow", params={"after": 0}) as answer:
        assert answer.status_code == 200
        last = asyncio.create_task(_made(client, "POST", "/v1/sandboxes", {"name": "the-last"}))
        async with asyncio.timeout(20):
            async for text in answer.aiter_text():
                seen += text
                if last.done() and last.result()["id"] in seen:
                    break
        await last
    assert [each for each in world.secret if each in seen] == []


async def test_its_own_tenant_finds_all_of_it(world: World) -> None:
    """So that what others do not find is there, and the paths of this table are right."""
    found = {}
    for route in HTTP:
        if route.method == "GET" and "{" in route.path and route.scope is not Scope.ADMIN:
            found[route.name] = (await world.call(world.owner, route)).status_code
    assert {name: status for name, status in found.items() if status != 200} == {"files_read": 400}, "a is a folder"


async def _token_of(world: World, tenant: str) -> str:
    await world.served.token(tenant)
    return (await world.served.server.access.issue(tenant=tenant, scopes=_but(None))).text
