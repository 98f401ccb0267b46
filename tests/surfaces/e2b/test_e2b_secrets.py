"""Secrets of E2B's clients, and the headers that rules of the network put into requests, in real sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from gate.conftest import local_rules
from gate.installation import installed
from gate.search import in_files
from gate.world import World, running_world
from surfaces.e2b.e2b_world import E2b, e2b_serving

from skerry.model.tenants import Scope
from skerry.providers.mock import Mock

__all__ = ["local_rules"]
pytestmark = pytest.mark.timeout(120)

VALUE = "sk-the-value-that-no-box-has"
OTHER = "sk-another-value-of-it"
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


def rules(host: str, **headers: str) -> dict[str, Any]:
    return {"rules": {host: [{"transform": {"headers": headers}}]}}


async def made(e2b: E2b, name: str = "Api-Key", value: str = VALUE) -> dict[str, Any]:
    answer = await e2b.call("POST", "/secrets", {"name": name, "value": value, "metadata": {"of": "tests"}})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The little internet of the gate's tests, without a database."""
    with running_world(None) as world:
        yield world


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="skerry-e2b-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
async def real(world: World, place: Path, local_rules: None) -> AsyncIterator[E2b]:
    """A server whose sandboxes may reach the little internet of these tests."""
    with installed(place, world) as config:
        async with e2b_serving(place, config=config, has_gate=True) as e2b:
            yield e2b


async def test_a_secret_is_made_told_without_its_value_updated_and_removed(e2b: E2b) -> None:
    first = await made(e2b)
    assert (first["name"], first["currentVersion"], first["metadata"]) == ("api-key", 1, {"of": "tests"})
    assert (await e2b.call("POST", "/secrets", {"name": "API-KEY", "value": "x"})).status_code == 409
    for known in (first["secretID"], "API-key"):
        assert (await e2b.call("GET", f"/secrets/{known}")).json() == first
    later = (await e2b.call("POST", "/secrets/api-key", {"value": OTHER})).json()
    assert (later["currentVersion"], later["metadata"], later["secretID"]) == (2, {"of": "tests"}, first["secretID"])
    assert later["updatedAt"] >= first["updatedAt"]
    await made(e2b, "second")
    page = await e2b.call("GET", "/secrets?limit=1")
    rest = await e2b.call("GET", f"/secrets?limit=1&nextToken={page.headers['x-next-token']}")
    assert [each["name"] for each in (*page.json(), *rest.json())] == ["second", "api-key"]
    assert "x-next-token" not in rest.headers
    for text in (page.text, rest.text, json.dumps(first), json.dumps(later)):
        assert VALUE not in text
        assert OTHER not in text
    assert (await e2b.call("DELETE", "/secrets/api-key")).status_code == 204
    for method, body in (("DELETE", None), ("GET", None), ("POST", {"value": "x"})):
        assert (await e2b.call(method, "/secrets/api-key", body)).status_code == 404


async def test_a_secret_is_its_tenants_and_takes_the_scope_of_the_network(e2b: E2b) -> None:
    red, blue = await e2b.other("red"), await e2b.other("blue")
    await made(red)
    assert (await blue.call("GET", "/secrets")).json() == []
    assert (await blue.call("GET", "/secrets/api-key")).status_code == 404
    await made(blue, value=OTHER)
    reader = await e2b.other("red", Scope.READ)
    assert (await reader.call("GET", "/secrets/api-key")).status_code == 200
    for method, path in (("POST", "/secrets"), ("POST", "/secrets/api-key"), ("DELETE", "/secrets/api-key")):
        assert (await reader.call(method, path, {"name": "x", "value": "x"})).status_code == 403


@pytest.mark.parametrize(
    "body",
    [
        {"name": "", "value": "x"},
        {"name": "a{b", "value": "x"},
        {"name": "a", "value": ""},
        {"name": "a", "value": "x\n"},
    ],
)
async def test_a_secret_that_no_header_could_have_is_refused(e2b: E2b, body: dict[str, str]) -> None:
    assert (await e2b.call("POST", "/secrets", body)).status_code == 400


@pytest.mark.parametrize(
    ("network", "status"),
    [
        (rules("api.test", Host="other.test"), 400),
        (rules("api.test", **{"X-Bad": "a\r\nX-More: b"}), 400),
        (rules("api.test", **{"X-Key": "${e2b.secrets.nobodys}"}), 400),
        (rules("10.0.0.1", **{"X-Key": "x"}), 400),
        ({"rules": {"api.test": [{"transform": {"body": "x"}}]}}, 400),
        (rules("api.test", **{"X-Key": "${e2b.identity.tokens.aws}"}), 422),
    ],
)
async def test_rules_that_cannot_be_done_are_refused(e2b: E2b, network: dict[str, Any], status: int) -> None:
    answer = await e2b.call("POST", "/sandboxes", {"templateID": "base", "network": network})
    assert answer.status_code == status, answer.text
    assert await e2b.served.server.manager.count() == 0


async def test_a_value_that_a_server_before_this_one_was_given_is_asked_for_again(
    own_registry: None, tmp_path: Path, mock_provider: Mock
) -> None:
    body = {"templateID": "base", "network": rules("api.test", **{"X-Key": "${e2b.secrets.api-key}"})}
    async with e2b_serving(tmp_path, mock_provider) as before:
        await made(before)
    async with e2b_serving(tmp_path, mock_provider) as e2b:
        assert [each["name"] for each in (await e2b.call("GET", "/secrets")).json()] == ["api-key"]
        refused = await e2b.call("POST", "/sandboxes", body)
        assert refused.status_code == 409
        assert "update it" in refused.json()["message"]
        assert (await e2b.call("POST", "/secrets/api-key", {"value": VALUE})).status_code == 200
        assert (await e2b.call("POST", "/sandboxes", body)).status_code != 409


async def test_headers_with_secrets_are_put_in_outside_of_the_box_and_are_what_they_are_now(
    world: World, real: E2b, place: Path
) -> None:
    await made(real)
    host = world.rule("api.test", "https")
    sandbox = await real.create(
        network=rules(host, Authorization="Bearer ${e2b.secrets.API-KEY}", **{"X-Plain": "yes"})
    )
    manager = real.served.server.manager
    box = await manager.get((await manager.list())[-1].id)

    async def get() -> str:
        done = await box.exec(["python3", "-c", GET, f"https://{host}/hello"], timeout_s=40)
        return done.text.strip() if done.ok else done.error_text.strip().splitlines()[-1]

    def seen() -> list[str]:
        return [each["fields"].get("authorization", "") for each in world.seen() if each.get("host") == "api.test"]

    before = len(seen())
    assert await get() == "hello from api.test"
    asked = [each for each in world.seen() if each.get("host") == "api.test"][before:]
    assert [each["fields"]["x-plain"] for each in asked] == ["yes"]
    assert VALUE not in (await box.exec("env; cat /proc/self/environ")).text
    assert in_files(VALUE.encode(), str(place / "state")) == []
    assert "Bearer" not in (await real.call("GET", f"/sandboxes/{sandbox['sandboxID']}")).text

    await real.call("POST", "/secrets/api-key", {"value": OTHER})
    assert await get() == "hello from api.test"
    path = f"/sandboxes/{sandbox['sandboxID']}/network"
    changed = rules(host, Authorization="Basic ${e2b.secrets.api-key}")
    assert (await real.call("PUT", path, changed)).status_code == 204
    assert await get() == "hello from api.test"
    assert seen()[before:] == [f"Bearer {VALUE}", f"Bearer {OTHER}", f"Basic {OTHER}"]

    await real.call("DELETE", "/secrets/api-key")
    assert "502" in await get()
    other = rules(world.rule("other.test", "https"), **{"X-Key": "x"})
    assert (await real.call("PUT", path, other)).status_code == 422
    assert (await real.call("PUT", path, {})).status_code == 204
    assert "hello" not in await get()
    assert len(seen()) == before + 3


async def test_headers_alone_open_nothing_where_all_is_closed(world: World, real: E2b) -> None:
    host = world.rule("api.test", "https")
    manager = real.served.server.manager
    for allowed, told in ((), ""), ((host,), "hello from api.test\n\n"):
        network = {**rules(host, **{"X-Key": "x"}), "denyOut": ["0.0.0.0/0"], "allowOut": list(allowed)}
        await real.create(network=network)
        box = await manager.get((await manager.list())[-1].id)
        done = await box.exec(["python3", "-c", GET, f"https://{host}/hello"], timeout_s=40)
        assert done.text == told
