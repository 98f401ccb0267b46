"""Files of a real sandbox over REST."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from manager.world import until
from surfaces.server.use_world import Box, local_box

_BIG = 20 << 20


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with local_box(folder) as box:
        yield box


async def _pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_a_large_file_comes_and_goes_as_it_is(box: Box) -> None:
    data = os.urandom(_BIG)
    written = await box.put("/files/content?path=big.bin&mode=384", content=_pieces(data))
    assert (written.status_code, written.json()) == (200, {"size": _BIG})
    shown = (await box.get("/files/stat?path=big.bin")).json()
    assert (shown["size"], shown["mode"] & 0o777, shown["type"]) == (_BIG, 0o600, "file")
    digest = hashlib.sha256()
    async with box.client.stream("GET", box.url("/files/content?path=big.bin")) as answer:
        assert answer.headers["content-length"] == str(_BIG)
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''big.bin"
        async for piece in answer.aiter_raw():
            digest.update(piece)
    assert digest.digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("wanted", "status", "content", "told"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=-100", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"),
        ("bytes=5-2", 200, b"0123456789", None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("bytes=" + "9" * 40 + "-", 200, b"0123456789", None),
    ],
)
async def test_a_part_of_a_file_is_given(
    box: Box, wanted: str, status: int, content: bytes | None, told: str | None
) -> None:
    await box.put("/files/content?path=digits", content=b"0123456789")
    answer = await box.get("/files/content?path=digits", headers={"range": wanted})
    assert (answer.status_code, answer.headers.get("content-range")) == (status, told)
    assert content is None or answer.content == content


async def test_what_is_known_already_is_not_sent_again(box: Box) -> None:
    await box.put("/files/content?path=note", content=b"one")
    first = await box.get("/files/content?path=note")
    tag = first.headers["etag"]
    assert (await box.get("/files/stat?path=note")).json()["etag"] == tag
    again = await box.get("/files/content?path=note", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    part = {"range": "bytes=0-0", "if-range": '"other"'}
    assert (await box.get("/files/content?path=note", headers=part)).content == b"one"
    assert (await box.put("/files/content?path=note", content=b"two!", headers={"if-match": tag})).status_code == 200
    stale = await box.put("/files/content?path=note", content=b"three", headers={"if-match": tag})
    assert stale.status_code == 412
    missing = await box.put("/files/content?path=new", content=b"x", headers={"if-match": "*"})
    assert missing.status_code == 412
    assert (await box.get("/files/content?path=note")).content == b"two!"


async def test_only_the_head_of_a_file_is_asked_for(box: Box) -> None:
    await box.put("/files/content?path=note", content=b"abc")
    answer = await box.client.head(box.url("/files/content?path=note"))
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "3", b"")


async def test_a_file_that_tells_no_size_is_read(box: Box) -> None:
    answer = await box.get("/files/content?path=/proc/self/status")
    assert b"Uid:" in answer.content
    empty = await box.put("/files/content?path=empty", content=b"")
    assert empty.json() == {"size": 0}
    assert (await box.get("/files/content?path=empty")).content == b""


async def test_an_upload_that_is_cut_leaves_what_was_there(box: Box) -> None:
    await box.put("/files/content?path=kept", content=b"old")
    for head in (b"content-length: 1000000", b"transfer-encoding: chunked"):
        address = urlsplit(box.served.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        token = box.client.headers["authorization"].encode()
        path = box.url("/files/content?path=kept").encode()
        lines = [b"PUT %s HTTP/1.1" % path, b"host: localhost", b"authorization: " + token, head]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + b"%x\r\n" % 50000 + b"x" * 50000 + b"\r\n")
        await writer.drain()
        writer.close()
        await reader.read()
    started = (await box.get("/files?path=.")).json()["items"]

    async def is_tidy() -> bool:
        return [each["name"] for each in (await box.get("/files?path=.")).json()["items"]] == ["kept"]

    await until(is_tidy)
    assert started
    assert (await box.get("/files/content?path=kept")).content == b"old"


async def test_files_grow_at_their_end(box: Box) -> None:
    await box.put("/files/content?path=log", content=b"one\n")
    assert (await box.put("/files/content?path=log&append=true", content=b"two\n")).json() == {"size": 8}
    assert (await box.get("/files/content?path=log")).content == b"one\ntwo\n"
    assert (await box.put("/files/content?path=log&append=true&mode=1", content=b"x")).status_code == 400


async def test_files_are_written_into(box: Box) -> None:
    await box.put("/files/content?path=log", content=b"0123456789")
    assert (await box.put("/files/content?path=log&offset=4", content=b"ab")).json() == {"size": 10}
    assert (await box.get("/files/content?path=log")).content == b"0123ab6789"
    for query in ("offset=4&append=true", "offset=4&mode=1", "offset=-1"):
        assert (await box.put(f"/files/content?path=log&{query}", content=b"x")).status_code == 400


async def test_links_and_owners_are_made(box: Box) -> None:
    await box.put("/files/content?path=file", content=b"x")
    assert (await box.post("/files/link", json={"path": "link", "target": "file"})).status_code == 204
    shown = (await box.get("/files/stat?path=link&follow=false")).json()
    assert (shown["type"], shown["target"]) == ("symlink", "file")
    assert (await box.post("/files/link", json={"path": "link", "target": "other"})).json()["code"] == "path_exists"
    kept = (await box.get("/files/stat?path=file")).json()
    assert (await box.post("/files/owner", json={"path": "file", "uid": kept["uid"]})).status_code == 204
    now = (await box.get("/files/stat?path=file")).json()
    assert (now["uid"], now["gid"]) == (kept["uid"], kept["gid"])
    assert (await box.post("/files/owner", json={"path": "file", "uid": -2})).status_code == 400


async def test_folders_are_made_listed_moved_and_removed(box: Box) -> None:
    assert (await box.post("/files/folder", json={"path": "a/b", "mode": 0o700})).status_code == 204
    await box.put("/files/content?path=a/b/file", content=b"x")
    names = [each["path"] for each in (await box.get("/files?path=a&depth=5")).json()["items"]]
    assert [name.rpartition("/a/")[2] for name in names] == ["b", "b/file"]
    assert (await box.post("/files/move", json={"path": "a/b/file", "to": "a/moved"})).status_code == 204
    assert (await box.post("/files/mode", json={"path": "a/moved", "mode": 0o640})).status_code == 204
    assert (await box.get("/files/stat?path=a/moved")).json()["mode"] & 0o777 == 0o640
    taken = await box.post("/files/move", json={"path": "a/moved", "to": "a/b", "overwrite": False})
    assert (taken.status_code, taken.json()["code"]) == (409, "path_exists")
    full = await box.delete("/files?path=a")
    assert (full.status_code, full.json()["code"]) == (400, "path_not_empty")
    assert (await box.delete("/files?path=a&recursive=true")).status_code == 204
    assert (await box.get("/files/stat?path=a")).status_code == 404


async def test_long_folders_come_in_pages(box: Box) -> None:
    await box.sh("mkdir many; cd many; for n in $(seq 100 149); do touch $n; done")
    found, after = [], ""
    while True:
        page = (await box.get("/files", params={"path": "many", "limit": 20, "after": after})).json()
        found += [each["name"] for each in page["items"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert found == [str(number) for number in range(100, 150)]
    assert (await box.get("/files?path=many&after=bm90aGVyZQ==")).status_code == 400


async def test_names_may_be_anything(box: Box) -> None:
    for name in ["with space", "quote\"'", "line\nbreak", "-rf", "naïve", "\U0001f4a9", "%2F", "a&b=c#d", "..."]:
        assert (await box.put("/files/content", params={"path": name}, content=name.encode())).status_code == 200
        answer = await box.get("/files/content", params={"path": name})
        assert answer.content == name.encode()
        assert (await box.get("/files/stat", params={"path": name})).json()["name"] == name
    raw = base64.b64encode(b"not-\xff-utf8").decode()
    assert (await box.put("/files/content", params={"path64": raw}, content=b"raw")).status_code == 200
    (odd,) = [each for each in (await box.get("/files")).json()["items"] if each["path64"]]
    assert odd["name"] == "not-�-utf8"
    assert (await box.get("/files/content", params={"path64": odd["path64"]})).content == b"raw"
    assert (await box.post("/files/move", json={"path64": odd["path64"], "to": "plain"})).status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/files/content?path=/none", None, 404),
        ("GET", "/files/content?path=/tmp", None, 400),
        ("GET", "/files/content?path=/dev/null", None, 400),
        ("GET", "/files/content", None, 400),
        ("GET", "/files/content?path=", None, 400),
        ("GET", "/files/content?path=a%00b", None, 400),
        ("GET", "/files/content?path=a&path=b", None, 400),
        ("GET", "/files/content?path=a&path64=YQ==", None, 400),
        ("GET", "/files/content?path64=!!!", None, 400),
        ("GET", "/files/content?path=" + "x" * 5000, None, 400),
        ("GET", "/files/stat?path=/etc/passwd/x", None, 400),
        ("GET", "/files?path=/none", None, 404),
        ("GET", "/files?path=/etc/passwd", None, 400),
        ("GET", "/files?depth=0", None, 400),
        ("GET", "/files?depth=1000", None, 400),
        ("GET", "/files?limit=0", None, 400),
        ("GET", "/files?limit=1000000", None, 400),
        ("GET", "/files/tree?path=/none", None, 404),
        ("GET", "/files/tree?path=/etc/passwd", None, 400),
        ("GET", "/files/watch?path=/none", None, 404),
        ("PUT", "/files/content?path=/tmp", None, 400),
        ("PUT", "/files/content?path=/proc/nothing", None, 404),
        ("PUT", "/files/content?path=x&mode=-1", None, 400),
        ("PUT", "/files/content?path=x&mode=99999", None, 400),
        ("DELETE", "/files?path=/none", None, 404),
        ("DELETE", "/files", None, 400),
        ("POST", "/files/folder", {"path": "/etc/passwd/x"}, 400),
        ("POST", "/files/folder", {}, 400),
        ("POST", "/files/move", {"path": "/none", "to": "x"}, 404),
        ("POST", "/files/move", {"path": "x"}, 400),
        ("POST", "/files/mode", {"path": "/none", "mode": 0}, 404),
        ("POST", "/files/mode", {"path": "x", "mode": 1 << 20}, 400),
    ],
)
async def test_wrong_paths_are_told_as_what_they_are(box: Box, method: str, path: str, body: Any, status: int) -> None:
    answer = await box.client.request(method, box.url(path), json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_tree_goes_out_and_comes_back(box: Box) -> None:
    await box.sh("mkdir -p tree/deep && echo one > tree/one && echo two > tree/deep/two && ln -s one tree/link")
    packed = await box.get("/files/tree?path=tree")
    assert packed.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
        assert {"one", "deep/two", "link"} <= {name.removeprefix("./") for name in tar.getnames()}
    assert (await box.put("/files/tree?path=copy", content=_pieces(packed.content, 1000))).status_code == 204
    assert (await box.sh("diff -r tree copy && readlink copy/link"))["stdout"] == "one\n"


async def test_what_is_no_tar_is_refused(box: Box) -> None:
    answer = await box.put("/files/tree?path=copy", content=b"this is no tar" * 100)
    assert 400 <= answer.status_code < 500 or answer.status_code == 502, answer.text


async def test_changes_are_told_as_they_happen(box: Box) -> None:
    await box.post("/files/folder", json={"path": "seen"})
    async with box.events("GET", "/files/watch?path=seen") as changes:
        await box.sh("echo x > seen/new")
        first = await anext(changes)
        assert first.event == "change"
        assert (first.data["event"], first.data["dir"]) == ("create", False)
        assert first.data["path"].endswith("seen/new")
        await box.delete("/files?path=seen/new")
        async for change in changes:
            if change.data["event"] == "delete":
                assert change.data["path"].endswith("seen/new")
                break


async def test_a_reader_that_is_slow_holds_up_nobody_else(box: Box) -> None:
    await box.put("/files/content?path=big", content=_pieces(bytes(_BIG), 1 << 20))
    async with box.client.stream("GET", box.url("/files/content?path=big")) as slow:
        pieces = slow.aiter_raw()
        await anext(pieces)
        assert (await box.sh("echo quick"))["stdout"] == "quick\n"
        assert len((await box.get("/files/content?path=big")).content) == _BIG
        await slow.aclose()
    assert (await box.sh("echo on"))["stdout"] == "on\n"


async def test_a_file_that_becomes_shorter_is_not_taken_for_whole(box: Box) -> None:
    await box.put("/files/content?path=big", content=_pieces(bytes(_BIG), 1 << 20))
    async with box.client.stream("GET", box.url("/files/content?path=big")) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        await box.sh("truncate -s 100 big")
        with pytest.raises(httpx.RemoteProtocolError):
            await _last(pieces)


async def _last(pieces: AsyncIterator[bytes]) -> bytes:
    return [piece async for piece in pieces][-1]
