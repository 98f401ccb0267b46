"""Volumes by E2B's control plane, and their files by a volume's token, as the SDK sends and reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from surfaces.e2b.e2b_world import E2b, e2b_serving

from skerry.model.tenants import Scope


class Volume:
    """A volume, as the SDK holds one."""

    def __init__(self, e2b: E2b, made: dict[str, Any]) -> None:
        self._e2b = e2b
        self.id, self.name, self.token = made["volumeID"], made["name"], made["token"]

    async def call(
        self, method: str, kind: str, path: str, /, token: str | None = None, **given: Any
    ) -> httpx.Response:
        content, body = given.pop("content", None), given.pop("body", None)
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        return await self._e2b.http.request(
            method, f"/volumecontent/{self.id}/{kind}", params={"path": path, **given}, content=content, json=body,
            headers=headers,
        )  # fmt: skip


async def made(e2b: E2b, name: str = "data") -> Volume:
    answer = await e2b.call("POST", "/volumes", {"name": name})
    assert answer.status_code == 201, answer.text
    return Volume(e2b, answer.json())


async def test_a_volume_is_made_found_listed_and_removed(e2b: E2b) -> None:
    volume = await made(e2b)
    found = await e2b.call("GET", f"/volumes/{volume.id}")
    assert found.status_code == 200
    assert found.json() == {"volumeID": volume.id, "name": "data", "token": volume.token}
    assert (await e2b.call("GET", "/volumes")).json() == [{"volumeID": volume.id, "name": "data"}]
    assert (await e2b.call("POST", "/volumes", {"name": "data"})).status_code == 409
    assert (await e2b.call("DELETE", f"/volumes/{volume.id}")).status_code == 204
    assert (await e2b.call("DELETE", f"/volumes/{volume.id}")).status_code == 404
    assert (await e2b.call("GET", f"/volumes/{volume.id}")).status_code == 404
    assert (await volume.call("GET", "path", "/")).status_code == 404


async def test_files_of_a_volume_are_written_listed_read_and_removed(e2b: E2b) -> None:
    volume = await made(e2b)
    assert (await volume.call("PUT", "file", "a/b.txt", content=b"x")).status_code == 404
    wrote = await volume.call("PUT", "file", "/a/b.txt", content=b"hello", force="true", mode=0o600)
    assert wrote.status_code == 201, wrote.text
    told = wrote.json()
    assert (told["name"], told["path"], told["type"], told["size"], told["mode"]) == (
        "b.txt", "/a/b.txt", "file", 5, 0o600,
    )  # fmt: skip
    assert {"uid", "gid", "atime", "mtime", "ctime"} <= told.keys()
    assert (await volume.call("GET", "file", "/a/b.txt")).content == b"hello"
    assert (await volume.call("PUT", "file", "/a/b.txt", content=b"")).json()["size"] == 0
    assert (await volume.call("GET", "file", "/a/b.txt")).content == b""
    assert (await volume.call("POST", "dir", "/c/d")).status_code == 404
    assert (await volume.call("POST", "dir", "/c/d", force="true")).status_code == 201
    assert (await volume.call("POST", "dir", "/c/d")).status_code == 409
    listed = (await volume.call("GET", "dir", "/", depth=2)).json()
    assert [each["path"] for each in listed] == ["/a", "/a/b.txt", "/c", "/c/d"]
    assert len((await volume.call("GET", "dir", "/")).json()) == 2
    changed = await volume.call("PATCH", "path", "/a/b.txt", body={"mode": 0o640})
    assert changed.status_code == 200
    assert changed.json()["mode"] == 0o640
    assert (await volume.call("DELETE", "path", "/a")).status_code == 204
    assert (await volume.call("GET", "path", "/a/b.txt")).status_code == 404
    assert (await volume.call("GET", "file", "/a/b.txt")).status_code == 404


async def test_sandboxes_share_what_is_in_a_volume_and_it_outlives_them(e2b: E2b) -> None:
    volume = await made(e2b)
    await volume.call("PUT", "file", "/from-outside", content=b"1")
    mounts = [{"name": "data", "path": "/mnt/data"}]
    first = await e2b.create(volumeMounts=mounts)
    assert await contents(e2b, first, "/mnt/data/from-outside") == b"1"
    assert await contents(e2b, await e2b.create(), "/mnt/data/from-outside") is None
    assert (await e2b.call("DELETE", f"/volumes/{volume.id}")).status_code == 409
    assert (await e2b.call("DELETE", f"/sandboxes/{first['sandboxID']}")).status_code == 204
    assert (await volume.call("GET", "file", "/from-outside")).content == b"1"
    assert (await e2b.call("DELETE", f"/volumes/{volume.id}")).status_code == 204
    again = await made(e2b)
    assert again.id != volume.id
    assert (await again.call("GET", "dir", "/")).json() == []


async def contents(e2b: E2b, sandbox: dict[str, Any], path: str) -> bytes | None:
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "X-Access-Token": sandbox["envdAccessToken"]}
    answer = await e2b.http.get("/files", params={"path": path}, headers=headers)
    return answer.content if answer.status_code == 200 else None


async def test_a_call_about_files_leaves_no_sandbox_behind(e2b: E2b) -> None:
    volume = await made(e2b)
    await volume.call("PUT", "file", "/x", content=b"1")
    assert (await volume.call("GET", "file", "/x")).content == b"1"
    assert (await volume.call("GET", "file", "/missing")).status_code == 404
    assert await e2b.served.server.manager.count() == 0


async def test_calls_about_files_at_once_are_all_answered(e2b: E2b) -> None:
    volume = await made(e2b)
    answers = await asyncio.gather(*(volume.call("PUT", "file", f"/{n}", content=b"x") for n in range(20)))
    assert {each.status_code for each in answers} == {201}
    assert len((await volume.call("GET", "dir", "/")).json()) == 20


@pytest.mark.parametrize(
    "path", ["../../etc/hostname", "/../../.skerry", "", "/a\0b", "x" * 5000], ids=["up", "ours", "none", "nul", "long"]
)
async def test_no_path_leaves_the_volume(e2b: E2b, path: str) -> None:
    volume = await made(e2b)
    assert (await volume.call("GET", "file", path)).status_code in (400, 404)
    assert (await volume.call("DELETE", "path", "/")).status_code == 400


@pytest.mark.parametrize("given", [{"mode": "-1"}, {"mode": 0o10000}, {"uid": 2**32}, {"gid": "x"}])
async def test_an_owner_or_mode_that_is_none_is_refused(e2b: E2b, given: dict[str, Any]) -> None:
    volume = await made(e2b)
    assert (await volume.call("PUT", "file", "/x", content=b"", **given)).status_code == 400
    assert (await volume.call("PATCH", "path", "/x", body=given)).status_code == 400
    assert (await volume.call("GET", "path", "/x")).status_code == 404


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a" * 129, "ü"])
async def test_a_name_that_is_none_is_refused(e2b: E2b, name: str) -> None:
    assert (await e2b.call("POST", "/volumes", {"name": name})).status_code == 400


async def test_another_tenants_volume_is_as_one_that_never_was(e2b: E2b) -> None:
    mine, other = await e2b.other("mine"), await e2b.other("other")
    volume, theirs = await made(mine), await made(other)
    assert (await other.call("GET", f"/volumes/{volume.id}")).status_code == 404
    assert (await other.call("DELETE", f"/volumes/{volume.id}")).status_code == 404
    assert [each["volumeID"] for each in (await other.call("GET", "/volumes")).json()] == [theirs.id]
    await volume.call("PUT", "file", "/x", content=b"mine")
    assert (await volume.call("GET", "file", "/x", token=theirs.token)).status_code == 404
    assert (await theirs.call("GET", "file", "/x")).status_code == 404
    await other.call("DELETE", f"/volumes/{theirs.id}")
    refused = await other.call(
        "POST", "/v2/sandboxes", {"templateID": "base", "volumeMounts": [{"name": "data", "path": "/mnt"}]}
    )
    assert refused.status_code == 404
    assert (await volume.call("GET", "file", "/x")).content == b"mine"


async def test_files_take_the_volumes_own_token_and_no_key(e2b: E2b) -> None:
    volume = await made(e2b)
    for token in ("0", "0" * 64, e2b.key):
        assert (await volume.call("GET", "dir", "/", token=token)).status_code == 404
    bare = await e2b.http.get(f"/volumecontent/{volume.id}/dir?path=/")
    assert bare.status_code == 401


async def test_a_key_that_may_not_touch_files_is_told_no_token(e2b: E2b) -> None:
    reader = await e2b.other("mine", Scope.READ, Scope.CREATE)
    assert (await reader.call("POST", "/volumes", {"name": "x"})).json()["token"] == ""


@pytest.mark.parametrize(
    "mounts",
    [
        [{"name": "data", "path": "/proc"}],
        [{"name": "data", "path": "relative"}],
        [{"name": "data", "path": "/a"}, {"name": "data", "path": "/b"}],
        [{"name": "data", "path": "/a"}, {"name": "more", "path": "/a/"}],
    ],
    ids=["reserved", "relative", "twice", "one-place"],
)
async def test_a_mount_that_cannot_be_is_refused(e2b: E2b, mounts: list[dict[str, str]]) -> None:
    await made(e2b)
    await made(e2b, "more")
    body = {"templateID": "base", "volumeMounts": mounts}
    assert (await e2b.call("POST", "/v2/sandboxes", body)).status_code == 400
    assert await e2b.served.server.manager.count() == 0


@pytest.fixture
async def local(tmp_path: Path, own_registry: None) -> AsyncIterator[E2b]:
    async with e2b_serving(tmp_path) as e2b:
        yield e2b


async def test_a_provider_without_volumes_says_so(local: E2b) -> None:
    answer = await local.call("POST", "/volumes", {"name": "data"})
    assert answer.status_code == 422
    assert "'local' cannot honour 'volumes'" in answer.json()["message"]
    assert answer.headers["should-retry"] == "false"
    assert (await local.call("GET", "/volumes")).json() == []
