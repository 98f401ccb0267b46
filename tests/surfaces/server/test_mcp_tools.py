"""The tools of MCP over HTTP, with the official client: on real sandboxes, and on the mock."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest
from manager.world import config_of
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import BlobResourceContents, TextResourceContents
from surfaces.server.mcp_world import MODES, call, error_of, joined
from surfaces.server.world import Served, serving

from skerry.errors import NotFound
from skerry.providers.mock import Mock
from skerry.surfaces.mcp import outputs
from skerry.surfaces.mcp.server import ALL

PICTURES = {
    "image/png": b"\x89PNG\r\n\x1a\n" + bytes(700_000),
    "image/jpeg": b"\xff\xd8\xff\xe0" + bytes(10),
    "image/gif": b"GIF89a" + bytes(10),
    "image/webp": b"RIFF\x00\x00\x00\x00WEBP" + bytes(10),
}


@MODES
async def test_a_model_makes_uses_and_destroys_a_sandbox(real: Served, mode: str) -> None:
    async with joined(real, "acme", mode=mode) as client:
        made = await call(client, "create_sandbox", name="work", env={"WHO": "me"})
        assert (made["state"], made["kept"]) == ("ready", True)
        ran = await call(client, "execute_command", sandbox="work", command="echo $WHO; cat", stdin="in")
        assert (ran["exit_code"], ran["stdout"]) == (0, "me\nin")
        await call(client, "write_file", sandbox="work", path="a/b.txt", content="text")
        assert (await call(client, "read_file", sandbox="work", path="a/b.txt"))["content"] == "text"
        await call(client, "destroy_sandbox", sandbox="work")
        assert (await call(client, "list_sandboxes"))["sandboxes"] == []


async def test_sandboxes_live_on_when_the_client_goes_for_the_time_that_the_server_gives_them(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider, config=config_of(tmp_path, lifetime="2h")) as served:
        token = await served.token("acme")
        async with joined(served, token=token) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {tool.function.__name__ for tool in ALL}
            assert not [name for name, tool in tools.items() if "keep" in tool.input_schema["properties"]]
            await call(client, "create_sandbox", name="work")
        async with joined(served, token=token) as client:
            (found,) = (await call(client, "list_sandboxes"))["sandboxes"]
            assert (found["name"], found["kept"]) == ("work", True)
            assert found["ends_at"] - found["created_at"] == pytest.approx(7200, abs=60)
        assert not (await served.server.manager.record(found["id"])).ephemeral


@MODES
async def test_progress_tells_what_a_command_says_while_it_runs(real: Served, mode: str) -> None:
    said: list[str] = []
    heard = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        said.append(message or "")
        if "begun" in "".join(said):
            heard.set()

    async with joined(real, "acme", mode=mode) as client:
        await call(client, "create_sandbox", name="a")
        command = "echo begun; until [ -e /tmp/go ]; do sleep 0.02; done; echo ended"
        running = asyncio.create_task(
            client.call_tool("execute_command", {"sandbox": "a", "command": command}, progress_callback=on_progress)
        )
        await heard.wait()
        await call(client, "write_file", sandbox="a", path="/tmp/go", content="")
        result = await running
        assert result.structured_content["stdout"] == "begun\nended\n"


@MODES
async def test_a_call_that_is_cancelled_takes_its_command_with_it(real: Served, mode: str) -> None:
    async with joined(real, "acme", mode=mode) as client:
        await call(client, "create_sandbox", name="a")
        arguments = {"sandbox": "a", "command": "touch /tmp/begun; sleep 1000"}
        running = asyncio.create_task(client.call_tool("execute_command", arguments))
        wait = "until [ -e /tmp/begun ]; do sleep 0.02; done"
        await call(client, "execute_command", sandbox="a", command=wait)
        running.cancel()
        await asyncio.wait([running])
        gone = "while cat /proc/[0-9]*/comm | grep -qx sleep; do :; done"
        ran = await call(client, "execute_command", sandbox="a", command=gone, timeout_s=30)
        assert not ran["timed_out"]


async def test_a_picture_is_shown_and_one_that_is_too_large_is_data(served: Served) -> None:
    async with joined(served, "acme") as client:
        await call(client, "create_sandbox", name="a")
        for kind, data in PICTURES.items():
            content = base64.b64encode(data).decode()
            await call(client, "write_file", sandbox="a", path="/tmp/p", content=content, encoding="base64")
            result = await client.call_tool("read_file", {"sandbox": "a", "path": "/tmp/p"})
            _, picture = result.content
            assert picture.type == "image"
            assert (picture.mime_type, base64.b64decode(picture.data)) == (kind, data)
            assert (result.structured_content["encoding"], result.structured_content["content"]) == ("image", "")
            (blob,) = (await client.read_resource(f"skerry://{await id_of(client)}/tmp/p")).contents
            assert blob.mime_type == kind
        large = base64.b64encode(PICTURES["image/gif"] + bytes(1 << 20)).decode()
        await call(client, "write_file", sandbox="a", path="/tmp/p", content=large, encoding="base64")
        read = await call(client, "read_file", sandbox="a", path="/tmp/p")
        assert (read["encoding"], read["next_offset"]) == ("base64", 65536)


async def id_of(client: Client) -> str:
    (found,) = (await call(client, "list_sandboxes"))["sandboxes"]
    return str(found["id"])


@MODES
async def test_output_that_is_cut_is_a_resource_of_the_tenant_alone(real: Served, mode: str) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 100_001))
    async with joined(real, "acme", mode=mode) as ours, joined(real, "other", mode=mode) as theirs:
        await call(ours, "create_sandbox", name="a")
        result = await ours.call_tool("execute_command", {"sandbox": "a", "command": "seq 1 100000; echo err >&2"})
        told = result.structured_content
        _, link, rest = result.content
        assert link.type == rest.type == "resource_link"
        assert (link.uri, told["stderr_uri"]) == (told["stdout_uri"], None)
        assert (link.size or 0) + (rest.size or 0) == len(whole)
        assert told["stdout_cut"] == len(whole) - 65536
        assert result.meta is not None
        assert result.meta["skerry/untrusted"] is True
        (content,) = (await ours.read_resource(link.uri)).contents
        (last,) = (await ours.read_resource(rest.uri)).contents
        assert isinstance(content, TextResourceContents)
        assert isinstance(last, TextResourceContents)
        assert content.text + last.text == whole
        assert [each.uri for each in (await ours.list_resources()).resources] == [link.uri, rest.uri]
        parts, offset = "", 0
        while offset is not None:
            part = await call(ours, "read_output", uri=link.uri, offset=offset)
            parts, offset = parts + part["content"], part["next_offset"]
        assert parts == whole
        assert (await theirs.list_resources()).resources == []
        assert await error_of(theirs, "read_output", uri=link.uri) == "not_found"
        with pytest.raises(MCPError, match="not_found"):
            await theirs.read_resource(link.uri)


async def test_a_command_that_says_too_much_to_be_kept_is_kept_in_part(real: Served) -> None:
    async with joined(real, "acme") as client:
        await call(client, "create_sandbox", name="a")
        ran = await call(client, "execute_command", sandbox="a", command="seq 1 1000000")
        size = len("".join(f"{n}\n" for n in range(1, 1_000_001)))
        assert ran["stdout_cut"] == size - 65536
        assert ran["stdout"].startswith("1\n2\n")
        assert ran["stdout"].endswith("\n1000000\n")
        links = [each.uri for each in (await client.list_resources()).resources]
        assert links[0] == ran["stdout_uri"]
        kept = ""
        for uri in links:
            (content,) = (await client.read_resource(uri)).contents
            assert isinstance(content, TextResourceContents)
            kept += content.text
        assert kept.startswith("1\n2\n")
        assert f"[... {size - (2 << 20)} bytes left out ...]" in kept
        assert kept.endswith("\n1000000\n")


async def test_what_a_message_has_no_room_for_as_text_is_sent_as_bytes(real: Served) -> None:
    async with joined(real, "acme") as client:
        id = (await call(client, "create_sandbox", name="a"))["id"]
        command = "head -c 600000 /dev/zero | tr '\\0' '\\1' | tee /tmp/ones; printf 'gr\\303\\274\\303' >&2"
        ran = await call(client, "execute_command", sandbox="a", command=command)
        assert ran["stderr"] == "grü\ufffd"
        for uri in (ran["stdout_uri"], f"skerry://{id}/tmp/ones"):
            (content,) = (await client.read_resource(uri)).contents
            assert isinstance(content, BlobResourceContents)
            assert set(base64.b64decode(content.blob)) == {1}


async def test_files_are_resources_and_have_a_url_for_programs(real: Served) -> None:
    token = await real.token("acme")
    async with joined(real, token=token) as client:
        id = (await call(client, "create_sandbox", name="a"))["id"]
        templates = (await client.list_resource_templates()).resource_templates
        assert "skerry://{sandbox}/{+path}" in [each.uri_template for each in templates]
        path = "/tmp/with space ü.txt"
        new = await call(client, "refer_to_file", sandbox="a", path=path)
        assert (new["size"], new["uri"]) == (None, f"skerry://{id}/tmp/with%20space%20%C3%BC.txt")
        await call(client, "write_file", sandbox="a", path=path, content="x" * 100_000)
        (content,) = (await client.read_resource(new["uri"])).contents
        assert isinstance(content, TextResourceContents)
        assert content.text == "x" * 100_000
        read = await call(client, "read_file", sandbox="a", path=path)
        assert read["url"] == new["url"]
        assert new["url"].startswith(f"{real.url}/v1/sandboxes/{id}/files/content?path=/tmp/with%20space")
        await call(client, "execute_command", sandbox="a", command="head -c 5000000 /dev/zero > /tmp/large")
        for uri, code in {
            f"skerry://{id}/tmp/large": "too_large",
            f"skerry://{id}/tmp/none": "path_not_found",
            "skerry://none/tmp/none": "not_found",
            "file:///etc/passwd": "invalid_spec",
            "skerry://output/0123456789012345678901": "not_found",
        }.items():
            with pytest.raises(MCPError, match=code):
                await client.read_resource(uri)


async def test_background_commands_are_started_read_and_stopped(real: Served) -> None:
    async with joined(real, "acme") as client:
        await call(client, "create_sandbox", name="a")
        command = "echo one; until [ -e /tmp/go ]; do sleep 0.02; done; echo two; sleep 1000"
        process = (await call(client, "start_process", sandbox="a", command=command, tag="t"))["process"]
        first = await call(client, "read_process_output", sandbox="a", process=process, wait_s=20)
        assert (first["output"], first["running"], first["missing"]) == ("one\n", True, 0)
        again = await call(client, "read_process_output", sandbox="a", process=process, cursor=first["cursor"])
        assert (again["output"], again["cursor"]) == ("", first["cursor"])
        await call(client, "write_file", sandbox="a", path="/tmp/go", content="")
        more = await call(
            client, "read_process_output", sandbox="a", process=process, cursor=first["cursor"], wait_s=20
        )
        assert more["output"] == "two\n"
        (listed,) = (await call(client, "list_processes", sandbox="a"))["processes"]
        assert (listed["process"], listed["running"], listed["tag"]) == (process, True, "t")
        assert (await call(client, "stop_process", sandbox="a", process=process))["exit_code"] == 143
        ended = await call(client, "read_process_output", sandbox="a", process=process)
        assert (ended["output"], ended["running"], ended["exit_code"]) == ("one\ntwo\n", False, 143)
        assert await error_of(client, "stop_process", sandbox="a", process=999) == "not_found"


async def test_a_cursor_tells_what_a_long_output_lost(real: Served) -> None:
    async with joined(real, "acme") as client:
        await call(client, "create_sandbox", name="a")
        process = (await call(client, "start_process", sandbox="a", command="seq 1 400000; touch /tmp/said; cat"))[
            "process"
        ]
        await call(client, "execute_command", sandbox="a", command="until [ -e /tmp/said ]; do sleep 0.02; done")
        size = len("".join(f"{n}\n" for n in range(1, 400_001)))
        end = await call(client, "read_process_output", sandbox="a", process=process)
        assert end["output"].endswith("\n399999\n400000\n")
        assert (len(end["output"]), end["cursor"]) == (65536, size)
        since = await call(client, "read_process_output", sandbox="a", process=process, cursor=1000)
        assert since["missing"] == size - 1000 - 65536
        some = await call(client, "read_process_output", sandbox="a", process=process, cursor=size - 7)
        assert (some["output"], some["missing"]) == ("400000\n", 0)


async def test_snapshots_are_taken_restored_and_forked(served: Served) -> None:
    async with joined(served, "acme") as client, joined(served, "other") as other:
        await call(client, "create_sandbox", name="a")
        await call(client, "write_file", sandbox="a", path="/tmp/f", content="before")
        assert (await call(client, "snapshot_sandbox", sandbox="a", name="s"))["name"] == "s"
        await call(client, "write_file", sandbox="a", path="/tmp/f", content="after")
        forked = await call(client, "fork_sandbox", sandbox="a", name="b")
        assert (await call(client, "read_file", sandbox="b", path="/tmp/f"))["content"] == "after"
        await call(client, "restore_sandbox", sandbox="a", snapshot="s")
        assert (await call(client, "read_file", sandbox="a", path="/tmp/f"))["content"] == "before"
        again = await call(client, "create_sandbox", name="c", snapshot="s")
        assert (await call(client, "read_file", sandbox=again["id"], path="/tmp/f"))["content"] == "before"
        assert [each["name"] for each in (await call(client, "list_snapshots"))["snapshots"]] == ["s"]
        assert (await call(other, "list_snapshots"))["snapshots"] == []
        assert await error_of(other, "fork_sandbox", sandbox=forked["id"]) == "not_found"


FLEET = """
name: crowd
phases:
  - {name: db, setup: [echo ready > /tmp/db]}
  - {name: web, count: 2, wait_for: [db], env: {WHO: me}}
"""


async def test_a_fleet_is_started_seen_commanded_and_ended(served: Served) -> None:
    said: list[str] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        said.append(message or "")

    async with joined(served, "acme") as client, joined(served, "other") as other:
        result = await client.call_tool("fleet_up", {"file": FLEET}, progress_callback=on_progress)
        assert result.structured_content["ok"], result
        status = await call(client, "fleet_status", fleet="crowd")
        assert [each["phase"] for each in status["members"]] == ["db", "web", "web"]
        shown = (await (await served.client("acme")).get("/v1/fleets/crowd")).json()  # the same fleet, over REST
        assert {each["name"]: each["wait_for"] for each in shown["phases"]} == {"db": [], "web": ["db"]}
        ran = await call(client, "fleet_exec", fleet="crowd", command="echo $WHO", target="web")
        assert [each["stdout"] for each in ran["results"]] == ["me\n", "me\n"]
        assert await error_of(client, "fleet_exec", fleet="crowd", command="true", target="none") == "not_found"
        assert await error_of(other, "fleet_status", fleet="crowd") == "not_found"
        assert (await call(other, "fleet_down", fleet="crowd"))["members"] == []
        assert len((await call(client, "list_sandboxes"))["sandboxes"]) == 3
        assert len((await call(client, "fleet_down", fleet="crowd"))["members"]) == 3
        assert await error_of(client, "fleet_status", fleet="crowd") == "not_found"


@pytest.mark.parametrize(
    "line",
    [
        "mounts: [/etc:/mnt]",
        "files: {/tmp/x: {from: /etc/passwd}}",
        "env: [HOME]",
        "env: {HOME: }",
        "image: /etc/passwd",
        "network: host",
        "user: root",
        "provider: docker",
        "workspace: /root",
        "secrets: {T: {hosts: [a.test], file: /etc/shadow}}",
        "allow: ['*']",
        "ports: ['8080:80']",
        "admin: true",
    ],
)
@pytest.mark.parametrize("place", ["phases: {a: {%s}}", "phases: [{name: a}]\ndefaults: {%s}"])
async def test_a_fleet_says_nothing_of_the_host(served: Served, line: str, place: str) -> None:
    async with joined(served, "acme") as client:
        assert await error_of(client, "fleet_up", file=f"name: f\n{place % line}") == "invalid_fleet"


@pytest.mark.parametrize("text", ["services: {a: {image: x}}", "name: f\nproject: other\nphases: {a: {}}", "[", "7"])
async def test_other_files_are_no_fleets(served: Served, text: str) -> None:
    async with joined(served, "acme") as client:
        assert await error_of(client, "fleet_up", file=text) == "invalid_fleet"


# what is kept of long outputs


def test_outputs_end_with_their_time_and_give_way_to_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(outputs, "_MOST_OF_ONE", 100)
    monkeypatch.setattr(outputs, "_MOST_OF_ALL", 150)
    kept = outputs.Outputs(lambda: now)
    first = kept.keep("a", "stdout", bytes(60))
    second = kept.keep("a", "stdout", bytes(60))
    assert kept.of("a") == [second]  # there is room for one of them
    other = kept.keep("b", "stdout", bytes(50))
    third = kept.keep("b", "stdout", bytes(49))
    assert kept.of("b") == [third]  # who has most gives, and that is never somebody else
    assert kept.of("a") == [second]
    for owner, gone in (("a", first.id), ("b", other.id), ("b", second.id), ("a", third.id)):
        with pytest.raises(NotFound):
            kept.get(owner, gone)
    now = 3600.0
    assert kept.of("a") == kept.of("b") == []
    assert not kept._sizes


@pytest.mark.parametrize("limit", [10, 11])
def test_an_output_is_shortened_in_its_middle_also_where_it_was_before(limit: int) -> None:
    assert outputs.shortened(b"0123456789", 0, limit) == (b"0123456789", 0)
    whole = bytes(range(65, 91)) * 10
    once, cut = outputs.shortened(whole, 0, 200)
    assert cut == 60
    assert outputs.shortened(once, cut, limit) == outputs.shortened(whole, 0, limit)


def test_no_character_of_an_output_is_cut_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PART", 5)
    for text in ("aüüüü", "€€€€", "\U0001f600" * 5, "abc"):
        output = outputs.Output(id="", owner="", title="", data=text.encode(), ends_at=0)
        parts = [output.part(offset).decode() for offset in output.parts()]
        assert "".join(parts) == text
        assert all(parts)
    broken = outputs.Output(id="", owner="", title="", data=b"\x80" * 23, ends_at=0)
    assert b"".join(broken.part(offset) for offset in broken.parts()) == broken.data


@MODES
async def test_code_in_a_context_remembers_and_its_pictures_are_pictures(real: Served, mode: str) -> None:
    async with joined(real, "acme", mode=mode) as client:
        await call(client, "create_sandbox", name="a")
        code = "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n...'\nx = 5; print('hi'); P()"
        made = await client.call_tool("execute_code", {"sandbox": "a", "code": code, "context": "work"})
        assert made.structured_content["stdout"] == "hi\n"
        (picture,) = [each for each in made.content if each.type == "image"]
        assert (picture.mime_type, base64.b64decode(picture.data)[:4]) == ("image/png", b"\x89PNG")
        again = await call(client, "execute_code", sandbox="a", code="print(x); x / 0", context="work")
        assert (again["stdout"], again["execution_count"]) == ("5\n", 2)
        assert "ZeroDivisionError" in again["error"]
        fresh = await call(client, "execute_code", sandbox="a", code="'x' in dir()", context="work", restart=True)
        assert fresh["values"] == ["False"]
        alone = await call(client, "execute_code", sandbox="a", code="print(1)")
        assert alone["stdout"] == "1\n"
