"""Contents of files by E2B's wire: up and down, alone and in forms, packed and signed, with metadata."""

from __future__ import annotations

import base64
import gzip
import hashlib
import time
import zlib
from collections.abc import AsyncIterator

import pytest
from surfaces.e2b.envd.envd_world import Client, Sandboxed

OCTETS = {"content-type": "application/octet-stream"}


async def put(envd: Client, path: str, data: bytes, **headers: str) -> object:
    named = {**OCTETS, **{name.replace("_", "-"): value for name, value in headers.items()}}
    response = await envd.http.post("/files", params={"path": path}, content=data, headers=named)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_file_reads_back_as_it_was_sent(envd: Client) -> None:
    data = bytes(range(256)) * 9000
    told = await put(envd, "some/new/folder/file", data)
    assert told == [{"path": "/home/user/some/new/folder/file", "name": "file", "type": "file"}]
    plain = {"accept-encoding": "identity"}
    response = await envd.http.get("/files", params={"path": "~/some/new/folder/file"}, headers=plain)
    assert response.content == data
    assert response.headers["content-length"] == str(len(data))


async def test_a_file_of_the_kernel_and_an_empty_one_are_read_to_their_ends(envd: Client) -> None:
    await put(envd, "empty", b"")
    assert (await envd.http.get("/files", params={"path": "empty"})).content == b""
    assert b"Linux" in (await envd.http.get("/files", params={"path": "/proc/version"})).content


async def test_parts_of_a_form_are_files_with_their_folders(envd: Client) -> None:
    files = [("file", ("a/one", b"1" * 100_000)), ("other", ("no", b"-")), ("file", ("/tmp/two\u00fc", b"\r\n--x\r\n"))]
    response = await envd.http.post("/files", files=files)
    assert [each["path"] for each in response.json()] == ["/home/user/a/one", "/tmp/two\u00fc"]
    assert (await envd.http.get("/files", params={"path": "a/one"})).content == b"1" * 100_000
    assert (await envd.http.get("/files", params={"path": "/tmp/two\u00fc"})).content == b"\r\n--x\r\n"


async def test_a_form_may_come_in_the_smallest_pieces(envd: Client) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n\r\n--c\r\n\r\n--b--\r\n'

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]

    head = {"content-type": "multipart/form-data; boundary=b"}
    response = await envd.http.post("/files", content=pieces(), headers=head)
    assert response.status_code == 200, response.text
    assert (await envd.http.get("/files", params={"path": "x"})).content == b"\r\n--c\r\n"


async def test_a_path_beside_a_form_is_that_of_its_one_file(envd: Client) -> None:
    response = await envd.http.post("/files", params={"path": "named"}, files=[("file", ("x", b"1"))])
    assert response.json()[0]["path"] == "/home/user/named"
    twice = [("file", ("x", b"1")), ("file", ("y", b"2"))]
    response = await envd.http.post("/files", params={"path": "named"}, files=twice)
    assert response.status_code == 400
    assert "same path" in response.json()["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"--b", b"--b\r\n", b"nothing", b"--b\r\ncontent-disposition: form-data; name=file; filename=x\r\n\r\nshort",
     b"--b\r\n" + b"x" * 100_000, b"--b\r\n\r\n"],
)  # fmt: skip
async def test_a_form_that_is_none_is_refused(envd: Client, body: bytes) -> None:
    head = {"content-type": "multipart/form-data; boundary=b"}
    response = await envd.http.post("/files", content=body, headers=head)
    assert response.status_code == 400
    assert response.json()["code"] == 400


async def test_other_bodies_are_refused(envd: Client) -> None:
    for kind in ("text/plain", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300):
        response = await envd.http.post("/files?path=x", content=b"x", headers={"content-type": kind})
        assert response.status_code == 400, kind
    assert (await envd.http.post("/files", content=b"x", headers=OCTETS)).status_code == 400
    packed = {**OCTETS, "content-encoding": "br"}
    assert (await envd.http.post("/files?path=x", content=b"x", headers=packed)).status_code == 400


async def test_files_are_packed_on_their_way_either_way(envd: Client) -> None:
    data = b"words " * 100_000
    await put(envd, "one", gzip.compress(data), content_encoding="gzip")
    await put(envd, "two", gzip.compress(data[:6]) + gzip.compress(data[6:]), content_encoding="gzip")
    for name in ("one", "two"):
        response = await envd.http.get("/files", params={"path": name}, headers={"accept-encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip"
        assert response.content == data
        response = await envd.http.get(
            "/files", params={"path": name}, headers={"accept-encoding": "gzip;q=0.5, identity"}
        )
        assert "content-encoding" not in response.headers
    response = await envd.http.get("/files", params={"path": "one"}, headers={"accept-encoding": "br, identity;q=0"})
    assert response.status_code == 400


async def test_what_is_no_gzip_or_ends_too_early_is_refused(envd: Client) -> None:
    for body in (b"no gzip", gzip.compress(b"x" * 1000)[:-9], zlib.compress(b"x")):
        head = {**OCTETS, "content-encoding": "gzip"}
        response = await envd.http.post("/files?path=x", content=body, headers=head)
        assert response.status_code == 400
        assert "decompressing" in response.json()["message"]


async def test_a_range_of_a_file_is_exact(envd: Client) -> None:
    await put(envd, "ten", b"0123456789")
    for asked, data in (("bytes=2-4", b"234"), ("bytes=8-", b"89"), ("bytes=-3", b"789"), ("bytes=5-99", b"56789")):
        response = await envd.http.get("/files?path=ten", headers={"range": asked})
        assert (response.status_code, response.content) == (206, data)
    assert (await envd.http.get("/files?path=ten", headers={"range": "bytes=10-"})).status_code == 416
    assert (await envd.http.get("/files?path=ten", headers={"range": "lines=1"})).content == b"0123456789"


async def test_what_cannot_be_read_or_written_says_why(envd: Client) -> None:
    response = await envd.http.get("/files?path=gone")
    assert (response.status_code, response.json()) == (
        404, {"code": 404, "message": "path '/home/user/gone' does not exist"},
    )  # fmt: skip
    assert (await envd.http.get("/files?path=/etc")).status_code == 400
    assert (await envd.http.get("/files?path=~nobody/x")).status_code == 400
    assert (await envd.http.get("/files?path=x%00y")).status_code == 400
    assert (await envd.http.get("/files?path=x&username=nobody-here")).status_code == 401
    for path in ("/etc", "/etc/new", "/home/user"):
        response = await envd.http.post("/files", params={"path": path}, content=b"x", headers=OCTETS)
        assert response.status_code == 400, path


async def test_a_disk_that_is_full_is_told_as_such(envd: Client) -> None:
    async def much() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield bytes(1 << 20)

    response = await envd.http.post("/files?path=/dev/shm/much", content=much(), headers=OCTETS)
    assert response.status_code == 507


async def test_metadata_is_replaced_as_a_whole(envd: Client) -> None:
    (told,) = await put(envd, "x", b"1", x_metadata_author="me", X_Metadata_Kind="a b")  # type: ignore[misc]
    assert told["metadata"] == {"author": "me", "kind": "a b"}  # type: ignore[index]
    stat = "filesystem.Filesystem/Stat"
    assert (await envd.result(stat, {"path": "x"}))["entry"]["metadata"] == {"author": "me", "kind": "a b"}
    await put(envd, "x", b"2", x_metadata_kind="c")
    assert (await envd.result(stat, {"path": "x"}))["entry"]["metadata"] == {"kind": "c"}
    await put(envd, "x", b"3")
    assert "metadata" not in (await envd.result(stat, {"path": "x"}))["entry"]


async def test_metadata_beyond_bounds_is_refused_before_anything_is_written(envd: Client) -> None:
    many = {f"x-metadata-{number}": "v" for number in range(70)}
    for headers in ({"x-metadata-long": "v" * 5000}, {"x-metadata-" + "k" * 250: "v"}, many):
        response = await envd.http.post("/files?path=x", content=b"x", headers={**OCTETS, **headers})
        assert response.status_code == 400
        assert "invalid metadata" in response.json()["message"]
    assert (await envd.http.get("/files?path=x")).status_code == 404


async def test_a_file_is_let_in_by_token_or_signature_alone(envd: Client, boxed: Sandboxed) -> None:
    await put(envd, "x", b"secret")
    boxed.access_token = "token"

    def signed(operation: str, path: str = "x", user: str = "", expires: str = "") -> dict[str, str]:
        parts = [path, operation, user, "token", *([expires] if expires else [])]
        digest = base64.b64encode(hashlib.sha256(":".join(parts).encode()).digest()).decode().rstrip("=")
        given = {"path": path, "signature": f"v1_{digest}", "username": user, "signature_expiration": expires}
        return {name: value for name, value in given.items() if value}

    async def status(params: dict[str, str], **headers: str) -> tuple[int, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await envd.http.get("/files", params=params, headers=named)
        return response.status_code, "" if response.status_code == 200 else response.json()["message"]

    assert (await status({"path": "x"}))[1] == "missing signature query parameter"
    assert (await status({"path": "x"}, x_access_token="token"))[0] == 200
    assert (await status(signed("read"), x_access_token="other"))[0] == 401
    assert (await status(signed("read")))[0] == 200
    assert (await status(signed("read", user="user")))[0] == 200
    later, before = str(int(time.time()) + 60), str(int(time.time()) - 60)
    assert (await status(signed("read", expires=later)))[0] == 200
    assert await status(signed("read", expires=before)) == (401, "signature is already expired")
    for wrong in (signed("write"), {**signed("read"), "path": "y"}, {**signed("read"), "signature": "v1_\u00fc"},
                  {**signed("read", expires=before), "signature_expiration": later}):  # fmt: skip
        assert await status(wrong) == (401, "invalid signature")
    response = await envd.http.post("/files", params=signed("write"), content=b"new", headers=OCTETS)
    assert response.status_code == 200


async def test_files_are_put_together_and_are_no_more(envd: Client) -> None:
    for name, data in (("a", b"1" * 300_000), ("b", b""), ("c", b"3")):
        await put(envd, name, data)
    await put(envd, "whole", b"old")
    message = {"source_paths": ["a", "b", "~/c"], "destination": "whole"}
    response = await envd.http.post("/files/compose", json=message)
    assert response.json() == {"path": "/home/user/whole", "name": "whole", "type": "file"}
    assert (await envd.http.get("/files?path=whole")).content == b"1" * 300_000 + b"3"
    assert (await envd.http.get("/files?path=a")).status_code == 404


async def test_files_that_cannot_be_put_together_stay(envd: Client) -> None:
    await put(envd, "a", b"1")
    for sources, target, status in ((["a", "gone"], "x", 404), (["a", "/tmp"], "x", 400), (["a", "x"], "x", 400),
                                    ([], "x", 400), (["a"], "", 400)):  # fmt: skip
        message = {"source_paths": sources, "destination": target}
        assert (await envd.http.post("/files/compose", json=message)).status_code == status
    assert (await envd.http.post("/files/compose", content=b"no json")).status_code == 400
    assert (await envd.http.get("/files?path=a")).content == b"1"
    assert (await envd.http.get("/files?path=x")).status_code == 404
