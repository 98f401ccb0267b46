"""Webhooks: signed, in order, again until they are taken, over restarts, and only to where they may go."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from manager.world import config_of, until
from surfaces.server.world import Served, serving

from skerry.config import Config, ServerSettings
from skerry.errors import ConfigError, InvalidSpec
from skerry.gate.dialer import Dialer
from skerry.model.rules import Rules
from skerry.model.tenants import Scope
from skerry.providers.mock import Mock
from skerry.surfaces.server import webhooks
from skerry.surfaces.server.post import Poster, PostFailed, Target, sign


class Post(NamedTuple):
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Receiver:
    """A server of webhooks on the loopback, which answers as it is told."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        self.answer: Callable[[Post], bytes] = lambda _: b"HTTP/1.1 204 No Content\r\n\r\n"
        self.is_mute = False
        self.port = 0
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        post = Post(headers, await reader.readexactly(int(headers["content-length"])))
        async with self._changed:
            self.posts.append(post)
            self._changed.notify_all()
        if self.is_mute:
            await reader.read()  # until the other side gives up
        else:
            writer.write(self.answer(post))
            await writer.drain()
        writer.close()

    async def until(self, count: int) -> list[Post]:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(self.posts) >= count)
        return self.posts

    def url(self, path: str = "/hook?x=1") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    monkeypatch.setattr(webhooks, "_LOOK_S", 0.02)
    monkeypatch.setattr(webhooks, "_REFRESH_S", 0.1)
    monkeypatch.setattr(webhooks, "_RETRY_S", (0.02, 0.1))


async def test_events_are_posted_signed_and_in_order(served: Served, receiver: Receiver) -> None:
    admin = await served.client()
    made = (await admin.post("/v1/webhooks", json={"url": receiver.url(), "note": "mine"})).json()
    secret, id = made["secret"], made["webhook"]["id"]
    box = (await admin.post("/v1/sandboxes", json={})).json()["id"]
    posts = await receiver.until(2)
    assert [post.content["type"] for post in posts[:2]] == ["sandbox.created", "sandbox.ready"]
    assert {post.content["sandbox"] for post in posts} == {box}
    assert len({post.content["id"] for post in posts}) == 2
    for post in posts:
        moment, signature = (part.partition("=")[2] for part in post.headers["x-skerry-signature"].split(","))
        expected = hmac.new(secret.encode(), moment.encode() + b"." + post.body, hashlib.sha256).hexdigest()
        assert hmac.compare_digest(signature, expected)
        assert post.headers["x-skerry-delivery"] == post.content["id"]
        assert post.headers["host"] == f"127.0.0.1:{receiver.port}"
    listed = await admin.get("/v1/webhooks")
    assert [each["id"] for each in listed.json()["items"]] == [id]
    assert secret not in listed.text
    assert secret not in (await admin.get(f"/v1/webhooks/{id}")).text
    assert not any(secret in str(line) for line in [line async for line in served.server.manager.ledger.show()])


async def test_only_the_kinds_that_were_asked_for_are_posted(served: Served, receiver: Receiver) -> None:
    admin = await served.client()
    await admin.post("/v1/webhooks", json={"url": receiver.url(), "events": ["destroyed"]})
    box = (await admin.post("/v1/sandboxes", json={})).json()["id"]
    await served.server.manager.destroy(box)
    (post,) = await receiver.until(1)
    assert (post.content["type"], post.content["cause"]) == ("sandbox.destroyed", "user")
    assert (await admin.post("/v1/webhooks", json={"url": receiver.url(), "events": ["nonsense"]})).status_code == 400


async def test_a_post_that_is_not_taken_comes_again_with_the_same_id(served: Served, receiver: Receiver) -> None:
    answers = iter(
        [b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"what?\r\n"]
    )
    receiver.answer = lambda _: next(answers, b"HTTP/1.1 200 OK\r\n\r\n")
    admin = await served.client()
    id = (await admin.post("/v1/webhooks", json={"url": receiver.url(), "events": ["ready"]})).json()["webhook"]["id"]
    await admin.post("/v1/sandboxes", json={})
    posts = await receiver.until(4)
    assert len({post.content["id"] for post in posts}) == 1
    log = await _deliveries(served, id, 4)
    assert [(each["attempt"], each["status"]) for each in reversed(log)] == [(1, 500), (2, 302), (3, None), (4, 200)]
    shown = (await admin.get(f"/v1/webhooks/{id}")).json()
    assert (shown["attempts"], shown["failing_since"], shown["active"]) == (0, None, True)


async def test_a_hook_that_fails_for_long_or_is_gone_is_switched_off(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await served.client()
    receiver.answer = lambda _: b"HTTP/1.1 410 Gone\r\n\r\n"
    id = (await admin.post("/v1/webhooks", json={"url": receiver.url()})).json()["webhook"]["id"]
    await admin.post("/v1/sandboxes", json={})
    shown = await _until_off(served, id)
    assert shown["off_because"] == "it answered 410"
    receiver.answer = lambda _: b"HTTP/1.1 503 Later\r\n\r\n"
    monkeypatch.setattr(webhooks, "_GIVE_UP_S", 0.05)
    assert (await admin.patch(f"/v1/webhooks/{id}", json={"active": True})).json()["off_because"] == ""
    assert (await _until_off(served, id))["off_because"] == "it answered 503"
    receiver.answer = lambda _: b"HTTP/1.1 200 OK\r\n\r\n"
    count = len(receiver.posts)
    await admin.patch(f"/v1/webhooks/{id}", json={"active": True})
    posts = await receiver.until(count + 2)
    assert [post.content["kind"] for post in posts[count:]] == ["created", "ready"]  # nothing was lost


async def _until_off(served: Served, id: str) -> dict[str, Any]:
    admin = await served.client()

    async def is_off() -> bool:
        return not (await admin.get(f"/v1/webhooks/{id}")).json()["active"]

    await until(is_off)
    shown: dict[str, Any] = (await admin.get(f"/v1/webhooks/{id}")).json()
    return shown


async def _deliveries(served: Served, id: str, count: int) -> list[dict[str, Any]]:
    """The attempts for a hook, once so many are written down."""
    admin = await served.client()

    async def are_told() -> bool:
        return len((await admin.get(f"/v1/webhooks/{id}/deliveries")).json()["items"]) >= count

    await until(are_told)
    found: list[dict[str, Any]] = (await admin.get(f"/v1/webhooks/{id}/deliveries")).json()["items"]
    return found


async def test_a_mute_hook_keeps_no_other(served: Served, receiver: Receiver) -> None:
    async with receiving() as mute:
        mute.is_mute = True
        admin = await served.client()
        await admin.post("/v1/webhooks", json={"url": mute.url()})
        await admin.post("/v1/webhooks", json={"url": receiver.url()})
        for _ in range(3):
            await admin.post("/v1/sandboxes", json={})
        await receiver.until(6)
        await mute.until(1)


async def test_a_restart_goes_on_where_it_was(
    tmp_path: Path, own_registry: None, mock_provider: Mock, receiver: Receiver
) -> None:
    async with serving(tmp_path, mock_provider) as served:
        admin = await served.client()
        made = (await admin.post("/v1/webhooks", json={"url": receiver.url(), "events": ["ready"]})).json()
        first = (await admin.post("/v1/sandboxes", json={})).json()["id"]
        await receiver.until(1)
        await _deliveries(served, made["webhook"]["id"], 1)
        await served.server.leader._end()
        second = (await admin.post("/v1/sandboxes", json={})).json()["id"]
    async with serving(tmp_path, mock_provider, config=config_of(tmp_path)):
        posts = await receiver.until(2)
    assert [post.content["sandbox"] for post in posts] == [first, second]


async def test_a_tenants_hook_gets_its_own_events_alone(served: Served, receiver: Receiver) -> None:
    served.server.poster.rules = Rules.of([f"127.0.0.1:{receiver.port}"])
    ours, theirs, admin = await served.client("acme"), await served.client("other"), await served.client()
    id = (await ours.post("/v1/webhooks", json={"url": receiver.url()})).json()["webhook"]["id"]
    await theirs.post("/v1/sandboxes", json={})
    mine = (await ours.post("/v1/sandboxes", json={})).json()["id"]
    assert {post.content["sandbox"] for post in await receiver.until(2)} == {mine}
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/ping"), ("GET", "/deliveries")):
        answer = await theirs.request(method, f"/v1/webhooks/{id}{path}", json={} if method == "PATCH" else None)
        assert answer.status_code == 404
    assert (await theirs.get("/v1/webhooks")).json()["items"] == []
    (seen,) = (await admin.get("/v1/webhooks")).json()["items"]
    assert seen["project"] == "acme"
    assert (await ours.delete(f"/v1/webhooks/{id}")).status_code == 204
    assert (await ours.get(f"/v1/webhooks/{id}")).status_code == 404


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "192.168.1.1", "[fd00::1]", "[::ffff:127.0.0.1]", "0.0.0.0"],
)
async def test_a_tenants_hook_reaches_nothing_that_is_private(served: Served, receiver: Receiver, host: str) -> None:
    client = await served.client("acme")
    made = await client.post("/v1/webhooks", json={"url": f"http://{host}:{receiver.port}/"})
    done = (await client.post(f"/v1/webhooks/{made.json()['webhook']['id']}/ping")).json()
    assert (done["status"], done["error"]) == (None, "it is not on the internet; see server.webhook_allow")
    assert receiver.posts == []


async def test_a_name_that_leads_to_a_private_address_is_refused_whatever_it_led_to_before(tmp_path: Path) -> None:
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    poster = Poster(config_of(tmp_path), Dialer(lambda _: next(answers), is_own=lambda _: False))
    asked: list[str] = []

    async def connect(_target: Target, addresses: Any) -> Any:
        asked.extend(map(str, addresses))
        raise ConnectionRefusedError

    poster._connect = connect  # type: ignore[method-assign]
    with pytest.raises(PostFailed, match="connection failed"):
        await poster.post(Target.parse("https://rebind.example.org/"), b"", {}, trusted=False)
    poster._dialer._kept.clear()
    with pytest.raises(PostFailed, match="not on the internet"):
        await poster.post(Target.parse("https://rebind.example.org/"), b"", {}, trusted=False)
    assert asked == ["93.184.216.34"]


async def test_the_settings_may_allow_a_private_address(
    tmp_path: Path, own_registry: None, mock_provider: Mock, receiver: Receiver
) -> None:
    async with serving(tmp_path, mock_provider, webhook_allow=(f"127.0.0.1:{receiver.port}",)) as served:
        client = await served.client("acme")
        made = (await client.post("/v1/webhooks", json={"url": receiver.url()})).json()
        done = (await client.post(f"/v1/webhooks/{made['webhook']['id']}/ping")).json()
        assert (done["status"], done["kind"]) == (204, "ping")


async def test_other_rules_hold_once_the_settings_are_read_again(served: Served, receiver: Receiver) -> None:
    server, client = served.server, await served.client("acme")
    made = (await client.post("/v1/webhooks", json={"url": receiver.url()})).json()
    ping = f"/v1/webhooks/{made['webhook']['id']}/ping"
    assert (await client.post(ping)).json()["status"] is None
    await server.reload(_allowing(server.config, f"127.0.0.1:{receiver.port}"))
    assert (await client.post(ping)).json()["status"] == 204
    with pytest.raises(ConfigError, match=r"server\.webhook_allow"):
        await server.reload(_allowing(server.config, "http://x/"))
    assert (await client.post(ping)).json()["status"] == 204


def _allowing(config: Config, *rules: str) -> Config:
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, webhook_allow=rules))


async def test_a_hook_that_is_led_elsewhere_by_no_admin_may_lead_nowhere_private(
    served: Served, receiver: Receiver
) -> None:
    admin, other = await served.client(), await served.client(None, Scope.WEBHOOKS)
    id = (await admin.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"})).json()["webhook"]["id"]
    assert (await other.patch(f"/v1/webhooks/{id}", json={"url": receiver.url()})).status_code == 200
    assert "internet" in (await other.post(f"/v1/webhooks/{id}/ping")).json()["error"]
    assert (await admin.patch(f"/v1/webhooks/{id}", json={"url": receiver.url()})).status_code == 200
    assert (await other.post(f"/v1/webhooks/{id}/ping")).json()["status"] == 204


async def test_nobody_is_flooded_with_pings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_PING_RATE", 0.001)
    client = await served.client("acme")
    ids = [
        (await client.post("/v1/webhooks", json={"url": "http://10.0.0.1/"})).json()["webhook"]["id"] for _ in range(2)
    ]
    answers = [await client.post(f"/v1/webhooks/{ids[number % 2]}/ping") for number in range(11)]
    assert [answer.status_code for answer in answers] == [200] * 10 + [429]
    assert answers[10].json()["code"] == "too_many_calls"
    other = await served.client("other")
    id = (await other.post("/v1/webhooks", json={"url": "http://10.0.0.1/"})).json()["webhook"]["id"]
    assert (await other.post(f"/v1/webhooks/{id}/ping")).status_code == 200


def test_rules_of_the_settings_that_are_none_are_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, server=ServerSettings(webhook_allow=("http://x/",)))
    with pytest.raises(ConfigError, match=r"server\.webhook_allow"):
        Poster(config)


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://example.org/", "https://", "https://user:word@example.org/", "https://example.org/#x",
        "//example.org", "https://exa mple.org/", "https://example.org/\r\nHost: x", "https://example.org:99999/", "https://127.1/",
        "https://0x7f000001/", "https://example.org:25/", "https://[fe80::1%25eth0]/", "https://" + "a" * 3000,
        "file:///etc/passwd", "https://é.example/",
    ],
)  # fmt: skip
async def test_what_is_no_address_of_a_web_server_is_refused(served: Served, url: str) -> None:
    client = await served.client("acme")
    answer = await client.post("/v1/webhooks", json={"url": url})
    assert (answer.status_code, answer.json()["field"]) == (400, "url")


async def test_a_tenant_has_so_many_hooks_and_no_more(served: Served) -> None:
    client = await served.client("acme")
    codes = [(await client.post("/v1/webhooks", json={"url": "https://example.org/"})).status_code for _ in range(17)]
    assert codes == [201] * 16 + [429]


async def test_a_secret_is_given_anew(served: Served, receiver: Receiver) -> None:
    admin = await served.client()
    made = (await admin.post("/v1/webhooks", json={"url": receiver.url()})).json()
    id = made["webhook"]["id"]
    fresh = (await admin.post(f"/v1/webhooks/{id}/secret")).json()["secret"]
    assert fresh != made["secret"]
    await admin.post(f"/v1/webhooks/{id}/ping")
    (post,) = await receiver.until(1)
    moment = int(post.headers["x-skerry-signature"].split(",")[0].removeprefix("t="))
    assert post.headers["x-skerry-signature"] == sign(fresh, post.body, moment)


async def test_a_change_names_the_version_that_it_was_made_from(served: Served) -> None:
    admin = await served.client()
    made = await admin.post("/v1/webhooks", json={"url": "https://example.org/"})
    id, tag = made.json()["webhook"]["id"], made.headers["etag"]
    changed = await admin.patch(f"/v1/webhooks/{id}", json={"note": "a"}, headers={"if-match": tag})
    assert changed.json()["note"] == "a"
    assert (await admin.patch(f"/v1/webhooks/{id}", json={}, headers={"if-match": tag})).status_code == 412


def test_a_target_is_told_as_a_request_has_it() -> None:
    assert Target.parse("https://Example.org").authority == "example.org"
    assert Target.parse("http://[2001:db8::1]:8080/x?y=%20").authority == "[2001:db8::1]:8080"
    assert Target.parse("http://[2001:db8::1]:8080/x?y=%20").path == "/x?y=%20"
    with pytest.raises(InvalidSpec):
        Target.parse("https://example.org:0x50/")
