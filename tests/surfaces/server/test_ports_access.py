"""Links to ports: what they open, for how long, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from surfaces.server.ports_world import Box, boxed, statuses
from surfaces.server.world import Served

from skerry.errors import ConfigError
from skerry.model.tenants import Scope
from skerry.surfaces.ports.places import Place, base_of


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with boxed(folder) as box:
        yield box


def alter(text: str, at: int) -> str:
    return f"{text[:at]}{'A' if text[at] != 'A' else 'B'}{text[at + 1 :]}"


async def test_without_a_link_nothing_is_told_not_even_whether_there_is_a_sandbox(box: Box) -> None:
    browser = await box.browser()
    port = await box.mirror()
    unknown = "00000000-0000-4000-8000-000000000000"
    hosts = [box.host(port), box.host(1), box.host(port).replace(box.id, unknown)]
    answers = [await browser.get(f"http://{host}/") for host in hosts]
    assert {(answer.status_code, answer.text) for answer in answers} == {(401, answers[0].text)}


async def test_a_link_opens_one_port_of_one_sandbox(box: Box) -> None:
    port, other = await box.mirror(), await box.mirror()
    cookie = await box.cookie(port)
    made = (await box.api.post("/v1/sandboxes", json={})).json()
    try:
        browser = await box.browser()
        opened = await browser.get(f"http://{box.host(port)}/", headers={"cookie": cookie})
        assert opened.status_code == 200
        for host in (box.host(other), box.host(port).replace(box.id, made["id"])):
            assert (await browser.get(f"http://{host}/", headers={"cookie": cookie})).status_code == 401
            query = cookie.replace("skerry-port=", "?skerry-link=")
            assert (await browser.get(f"http://{host}/{query}")).status_code == 401
    finally:
        await box.served.server.manager.destroy(made["id"], grace_s=0)


async def test_a_link_that_was_changed_opens_nothing(box: Box) -> None:
    port = await box.mirror()
    url = await box.link(port)
    browser = await box.browser()
    begin = url.index("=") + 1
    serial, expires, _ = url[begin:].split(".")
    longer = url.replace(f".{expires}.", f".{int(expires) + 9}.")
    for wrong in (alter(url, begin), alter(url, begin + 18), longer, alter(url, -5), url + "A", url[:-1], url[:begin]):
        assert (await browser.get(wrong, follow_redirects=False)).status_code == 401
    assert (await browser.get(url, follow_redirects=False)).status_code == 303
    assert serial


async def test_a_link_that_has_expired_opens_nothing(box: Box) -> None:
    links, place = box.served.server.ports.links, Place(await box.mirror(), box.id)
    link = await links.make(place, project="acme", public=False, lifetime_s=-5, created_by="")
    token = await links.token(place, link)
    open_to_all = await links.make(place, project="acme", public=True, lifetime_s=-5, created_by="")
    assert open_to_all.public
    browser = await box.browser()
    for more in ("", f"?skerry-link={token}"):
        answer = await browser.get(f"http://{box.host(place.port)}/{more}", headers={"cookie": f"skerry-port={token}"})
        assert answer.status_code == 401


async def test_links_end_when_they_are_withdrawn(box: Box) -> None:
    port, other = await box.mirror(), await box.mirror()
    browser, unharmed = await box.opened(port), await box.opened(other)
    assert (await browser.get("/")).status_code == (await unharmed.get("/")).status_code == 200
    assert (await box.api.delete(f"{box.path}/{port}/link")).status_code == 204
    assert (await browser.get("/")).status_code == 401
    assert (await unharmed.get("/")).status_code == 200
    assert (await box.api.delete(f"{box.path}/{port}/link")).status_code == 204


async def test_a_public_port_needs_no_link_until_it_is_withdrawn(box: Box) -> None:
    port = await box.mirror()
    url = await box.link(port, public=True)
    assert url == f"http://{box.host(port)}/"
    browser = await box.browser()
    assert (await browser.get(url, headers={"origin": "https://elsewhere.test"})).status_code == 200
    await box.api.delete(f"{box.path}/{port}/link")
    assert (await browser.get(url)).status_code == 401


async def test_only_its_tenant_makes_links_and_only_with_the_scope(box: Box) -> None:
    other = await box.served.client("other")
    unknown = box.path.replace(box.id, "00000000-0000-4000-8000-000000000000")
    for method in ("POST", "DELETE"):
        theirs = await other.request(method, f"{box.path}/80/link", json={})
        never = await other.request(method, f"{unknown}/80/link", json={})
        assert theirs.status_code == never.status_code == 404
    assert (await other.get(box.path)).status_code == 404
    reader = await box.served.client("acme", Scope.READ)
    assert (await reader.post(f"{box.path}/80/link", json={})).status_code == 403
    assert (await reader.delete(f"{box.path}/80/link")).status_code == 403
    assert (await reader.get(box.path)).status_code == 200


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "80a", "999999999999999999999"])
async def test_a_link_to_what_is_no_port_is_refused(served: Served, port: str) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={})).json()
    answer = await client.post(f"/v1/sandboxes/{made['id']}/ports/{port}/link", json={})
    assert answer.status_code == 404


@pytest.mark.parametrize("body", [{"lifetime_s": 0}, {"lifetime_s": 1e9}, {"public": "yes"}, {"port": 1}])
async def test_a_link_that_cannot_be_is_refused(served: Served, body: dict[str, object]) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={})).json()
    answer = await client.post(f"/v1/sandboxes/{made['id']}/ports/80/link", json=body)
    assert answer.status_code == 400


async def test_links_of_a_sandbox_are_bounded(served: Served) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={})).json()
    path = f"/v1/sandboxes/{made['id']}/ports/80/link"
    codes = {(await client.post(path, json={})).status_code for _ in range(100)}
    assert codes == {201}
    assert (await client.post(path, json={})).status_code == 429
    await client.delete(path)
    assert (await client.post(path, json={})).status_code == 201


async def test_a_link_is_for_the_port_of_the_server_that_it_was_asked_at(served: Served) -> None:
    client = await served.client("acme")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    port = urlsplit(served.url).port
    for asker in (client, await served.by_socket()):
        url = (await asker.post(f"/v1/sandboxes/{id}/ports/3000/link", json={})).json()["url"]
        assert url.startswith(f"http://3000-{id}.localhost:{port}/?skerry-link=")


async def test_links_are_seen_without_what_would_open_the_port(box: Box) -> None:
    port = await box.mirror()
    url = await box.link(port)
    (shown,) = [each for each in (await box.api.get(box.path)).json()["items"] if each["port"] == port]
    assert shown["listening"] is True
    assert [link["public"] for link in shown["links"]] == [False]
    assert url.rpartition(".")[2] not in str(shown)


async def test_a_look_at_the_ports_is_no_line_of_the_ledger(box: Box) -> None:
    await box.mirror()
    before = await kinds(box)
    for _ in range(2):
        assert (await box.api.get(box.path)).status_code == 200
    assert await kinds(box) == before
    await box.sandbox.files.read("/proc/net/tcp", max_bytes=1 << 20)  # while whoever reads a file is told of
    assert await kinds(box) == [*before, "file"]


async def kinds(box: Box) -> list[str]:
    """What the ledger tells of the sandbox."""
    lines = (await box.api.get("/v1/ledger", params={"sandbox": box.id, "limit": 1000})).json()["items"]
    return [line["kind"] for line in lines]


async def test_nothing_of_the_api_is_there_under_the_name_of_a_port(box: Box) -> None:
    port = await box.mirror()
    token = await box.served.token()
    browser = await box.browser()
    for path in ("/v1/sandboxes", "/healthz", "/metrics", "/mcp", "/"):
        answer = await browser.get(f"http://{box.host(port)}{path}", headers={"authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.headers["content-type"]) == (401, "text/plain; charset=utf-8")
    opened = await box.opened(port)
    for path in ("/v1/sandboxes", "/healthz", "/metrics"):
        assert (await opened.get(path)).json()["path"] == path


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("{port}-{id}.localhost", 401),
        ("{port}-{ID}.LOCALHOST:1", 401),
        ("{port}-{id}.localhost.", 421),
        ("0{port}-{id}.localhost", 421),
        ("0-{id}.localhost", 421),
        ("65536-{id}.localhost", 421),
        ("{port}-{id}.localhost.evil.test", 421),
        ("x.{port}-{id}.localhost", 421),
        ("{port}-{id}", 421),
        ("{port}-{short}.localhost", 421),
        ("x@{port}-{id}.localhost", 421),
        ("{port}-{id}.localhost/x", 421),
        ("localhost\r\nHost: {port}-{id}.localhost", 400),
        ("{port}-{id}.localhost\r\nHost: localhost", 400),
        ("localhost, {port}-{id}.localhost", 421),
        ("", 421),
    ],
)
async def test_a_name_is_that_of_a_port_or_of_none(box: Box, host: str, status: int) -> None:
    name = host.format(port=3000, id=box.id, ID=box.id.upper(), short=box.id[:8])
    answer = await box.raw(f"GET /v1/sandboxes HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
    assert statuses(answer) == [status]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://{host}"}, 200),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "https://{host}"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "null", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://81-{id}.localhost"}, 403),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
    ],
)
async def test_pages_of_other_origins_cannot_use_the_cookie(box: Box, headers: dict[str, str], status: int) -> None:
    port = await box.mirror()
    browser = await box.opened(port)
    filled = {name: value.format(host=box.host(port), id=box.id) for name, value in headers.items()}
    assert (await browser.get("/", headers=filled)).status_code == status


async def test_a_link_leads_to_no_other_host(box: Box) -> None:
    port = await box.mirror()
    url = await box.link(port)
    browser = await box.browser()
    for path in ("//evil.test/x", "/\\evil.test/x", "///evil.test"):
        answer = await browser.get(url.replace("/?", f"{path}?a=1&"), follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"] in ("/evil.test/x?a=1", "/evil.test?a=1", "/%5Cevil.test/x?a=1")


async def test_other_methods_are_let_in_by_a_link_itself(box: Box) -> None:
    url = await box.link(await box.mirror())
    seen = (await (await box.browser()).post(url, content=b"hi")).json()
    assert (seen["method"], seen["path"], seen["size"]) == ("POST", "/", 2)


async def test_where_there_is_tls_the_cookie_is_bound_to_it(folder: Path) -> None:
    async with boxed(folder, ports_host="https://boxes.example.org") as box:
        port = await box.mirror()
        url = urlsplit(await box.link(port))
        assert (url.scheme, url.netloc) == ("https", f"{port}-{box.id}.boxes.example.org")
        head = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n"
        answer = (await box.raw(head.encode())).decode()
        assert "set-cookie: __Host-skerry-port=" in answer
        assert "; Secure" in answer
        assert "Domain" not in answer


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost", "http://80-{id}.localhost:7357/"),
        ("Boxes.Example.org", "http://80-{id}.boxes.example.org:7357/"),
        ("https://boxes.example.org", "https://80-{id}.boxes.example.org/"),
        ("https://boxes.example.org:8443", "https://80-{id}.boxes.example.org:8443/"),
        ("https://boxes.example.org:443", "https://80-{id}.boxes.example.org/"),
    ],
)
def test_names_of_ports_are_below_the_host_of_the_settings(text: str, url: str) -> None:
    place = Place(80, "00000000-0000-4000-8000-000000000000")  # type: ignore[arg-type]
    base = base_of(text)
    assert base.url(place, "http", 7357) == url.format(id=place.id)
    assert base.place_of(f"{place.label}.{base.host.upper()}:7357") == place


@pytest.mark.parametrize(
    "text", ["", "a b", "boxes.example.org:1", "http://", "a/b", "[::1]", "https://x:99999", "a..b"]
)
def test_a_host_of_ports_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        base_of(text)
