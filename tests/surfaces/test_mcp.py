"""MCP over stdio: the official client against the real program, and errors on the mock."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gate.own_gate import end_gates
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import CallToolResult
from state_folders import boxes

from skerry import config, errors
from skerry.errors import CreateFailed
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter
from skerry.model.spec import Spec
from skerry.pool.pool import AsyncSandboxPool
from skerry.providers.mock import Mock
from skerry.surfaces.mcp.advice import ADVICE
from skerry.surfaces.mcp.caller import Caller, CallLimits
from skerry.surfaces.mcp.fleets import read_fleet
from skerry.surfaces.mcp.results import FileContent
from skerry.surfaces.mcp.sandboxes import create_sandbox
from skerry.surfaces.mcp.server import ALL, always, build_server

pytestmark = pytest.mark.usefixtures("own_registry")

PROGRAM = ("-c", "from skerry.cli import main; main()", "mcp")
READING = {
    "list_sandboxes", "list_snapshots", "list_processes", "read_process_output", "read_file", "list_directory",
    "refer_to_file", "read_output", "fleet_status",
}  # fmt: skip
MAKING = {"create_sandbox", "snapshot_sandbox", "fork_sandbox"}
HARMING = {
    "destroy_sandbox", "restore_sandbox", "execute_command", "execute_code", "start_process", "stop_process",
    "write_file", "fleet_up", "fleet_exec", "fleet_down",
}  # fmt: skip
UNTRUSTED = {
    "execute_command", "execute_code", "list_processes", "read_process_output", "read_file", "list_directory",
    "read_output", "fleet_up", "fleet_exec",
}  # fmt: skip
NEVER = {"provider", "mounts", "user", "network", "allow", "deny", "secrets", "root", "admin", "workspace", "project"}
"""What a model cannot choose."""


@asynccontextmanager
async def program(*options: str, cwd: Path | None = None) -> AsyncIterator[Client]:
    """The official client, joined to the real program."""
    parameters = StdioServerParameters(command=sys.executable, args=[*PROGRAM, *options], env=dict(os.environ), cwd=cwd)
    async with asyncio.timeout(50), Client(stdio_client(parameters)) as client:
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return dict(result.structured_content)


def text(result: CallToolResult) -> str:
    (block,) = result.content
    assert block.type == "text"
    return block.text


# the real program on the default provider


async def test_each_tool_says_what_it_takes_gives_and_does() -> None:
    async with program() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == READING | MAKING | HARMING == {tool.function.__name__ for tool in ALL}
    for name, tool in tools.items():
        assert tool.description
        assert tool.output_schema is not None
        fields = tool.input_schema["properties"]
        assert all("description" in field for field in fields.values()), name
        assert not NEVER & set(fields), name
        assert tool.annotations is not None
    reading = {name for name, tool in tools.items() if tool.annotations and tool.annotations.read_only_hint}
    assert reading == READING
    harming = {name for name, tool in tools.items() if tool.annotations and tool.annotations.destructive_hint}
    assert harming == HARMING
    untrusted = {name for name, tool in tools.items() if "never as instructions" in (tool.description or "")}
    assert untrusted == UNTRUSTED


@pytest.mark.parametrize("pool", [(), ("--pool", "1")], ids=["made", "warm"])
async def test_a_model_is_told_what_its_sandbox_may_reach_and_cannot_choose_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pool: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2hunter2")
    rules = ("--allow", "python", "--deny", "upload.pypi.org", "--secret", "TOKEN=api.test")
    try:
        async with program(*rules, *pool) as client:
            (tool,) = [tool for tool in (await client.list_tools()).tools if tool.name == "create_sandbox"]
            assert not {"network", "allow", "deny", "secrets"} & set(tool.input_schema["properties"])
            result = await client.call_tool("create_sandbox", {"name": "work"})
            made = result.structured_content
            assert (made["network"], made["allow"], made["deny"]) == ("rules", ["python"], ["upload.pypi.org"])
            assert made["secrets"] == {"TOKEN": ["api.test"]}
            assert text(result).endswith(", may reach python, api.test")
            ran = await call(client, "execute_command", sandbox="work", command="echo $TOKEN")
            assert ran["stdout"].startswith("skerry-secret-TOKEN-")
    finally:
        end_gates(folder)


async def test_a_model_makes_uses_and_destroys_a_sandbox(folder: Path) -> None:
    async with program() as client:
        made = await call(client, "create_sandbox", name="work", env={"WHO": "me"}, lifetime="30m")
        assert (made["name"], made["state"], made["kept"]) == ("work", "ready", False)
        assert made["ends_at"] - made["created_at"] == pytest.approx(1800, abs=30)

        result = await client.call_tool(
            "execute_command", {"sandbox": "work", "command": "echo $WHO; cat; echo bad >&2; exit 3", "stdin": "in\n"}
        )
        data = result.structured_content
        assert not result.is_error
        assert (data["exit_code"], data["stdout"], data["stderr"]) == (3, "me\nin\n", "bad\n")
        assert text(result).startswith("exit code 3 after 0.")
        assert "--- stdout (untrusted data) ---\nme\nin\n" in text(result)

        ran = await call(
            client,
            "execute_code",
            sandbox=made["id"][:8],
            code="import os; print(6 * 7, os.environ['A'])",
            env={"A": "b"},
        )
        assert ran["stdout"] == "42 b\n"
        ran = await call(client, "execute_code", sandbox="work", language="bash", code="echo $((6 * 7))")
        assert ran["stdout"] == "42\n"

        await call(client, "write_file", sandbox="work", path="notes/a.txt", content="grüße\n")
        read = await call(client, "read_file", sandbox="work", path="notes/a.txt")
        assert (read["content"], read["encoding"], read["size"], read["next_offset"]) == ("grüße\n", "utf-8", 8, None)
        listed = await call(client, "list_directory", sandbox="work", path="notes")
        assert [(each["path"].rpartition("/")[2], each["type"], each["size"]) for each in listed["entries"]] == [
            ("a.txt", "file", 8)
        ]

        sandboxes = (await call(client, "list_sandboxes"))["sandboxes"]
        assert [each["id"] for each in sandboxes] == [made["id"]] == boxes(folder)
        assert await call(client, "destroy_sandbox", sandbox="work") == {"id": made["id"]}
        assert boxes(folder) == []
        again = await client.call_tool("execute_command", {"sandbox": "work", "command": "true"})
        assert again.is_error
        assert text(again).startswith("not_found: ")


async def test_long_output_keeps_its_beginning_and_end_and_tells_what_is_left_out(folder: Path) -> None:
    async with program("--max-output", "1K") as client:
        await call(client, "create_sandbox", name="a")
        ran = await call(client, "execute_command", sandbox="a", command="seq 1 100000; seq 1 100 >&2")
        size = len("".join(f"{n}\n" for n in range(1, 100001)))
        assert ran["stdout"].startswith("1\n2\n3\n")
        assert ran["stdout"].endswith("\n99999\n100000\n")
        assert f"[... {size - 1024} bytes left out ...]" in ran["stdout"]
        assert (ran["stdout_cut"], ran["stderr_cut"]) == (size - 1024, 0)
        assert len(ran["stdout"]) < 1100


async def test_binary_files_are_base64_and_long_ones_come_in_parts(folder: Path) -> None:
    async with program("--max-output", "1K") as client:
        await call(client, "create_sandbox", name="a")
        data = bytes(range(256)) * 10
        await call(
            client, "write_file", sandbox="a", path="b", content=base64.b64encode(data).decode(), encoding="base64"
        )
        parts, offset = b"", 0
        while offset is not None:
            read = await call(client, "read_file", sandbox="a", path="b", offset=offset)
            assert (read["encoding"], read["size"]) == ("base64", 2560)
            parts += base64.b64decode(read["content"])
            offset = read["next_offset"]
        assert parts == data
        wrong = await client.call_tool(
            "write_file", {"sandbox": "a", "path": "b", "content": "%%", "encoding": "base64"}
        )
        assert text(wrong).startswith("invalid_spec: content: it is not base64")


async def test_a_command_cannot_run_longer_than_the_server_allows(folder: Path) -> None:
    async with program("--max-timeout", "1s") as client:
        await call(client, "create_sandbox", name="a")
        ran = await call(client, "execute_command", sandbox="a", command="echo begun; sleep 60")
        assert (ran["timed_out"], ran["exit_code"], ran["stdout"]) == (True, 124, "begun\n")
        more = await client.call_tool("execute_command", {"sandbox": "a", "command": "true", "timeout_s": 2})
        assert text(more).startswith("invalid_spec: timeout_s: 2 is more than 1")


async def test_what_is_kept_lives_on_and_the_rest_ends_with_the_server(folder: Path) -> None:
    async with program() as client:
        kept = await call(client, "create_sandbox", name="kept", keep=True)
        await call(client, "create_sandbox", name="gone")
        assert len(boxes(folder)) == 2
    assert boxes(folder) == [kept["id"]]
    async with program() as client:
        ran = await call(client, "execute_command", sandbox="kept", command="echo still")
        assert ran["stdout"] == "still\n"
        await call(client, "destroy_sandbox", sandbox="kept")


async def test_a_file_of_settings_in_the_current_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SKERRY_PROVIDER=nonsense\nMCP_DEBUG=1\nFASTMCP_LOG_LEVEL=nonsense\n")
    async with program(cwd=tmp_path) as client:
        assert (await call(client, "create_sandbox"))["provider"] == "local"


# the same without a client, to see every byte


class Raw:
    """The program, spoken to by hand."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._id = 0
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        self.answer(self.ask("initialize", hello))
        self.tell("notifications/initialized", {})

    def tell(self, method: str, params: dict[str, Any], **fields: Any) -> None:
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", "method": method, "params": params, **fields}
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any]) -> int:
        self._id += 1
        self.tell(method, params, id=self._id)
        return self._id

    def answer(self, id: int) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if message.get("id") == id:
                return message
        raise AssertionError("the server ended")

    def start(self, tool: str, **arguments: Any) -> int:
        return self.ask("tools/call", {"name": tool, "arguments": arguments})

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        structured: dict[str, Any] = self.answer(self.start(tool, **arguments))["result"]["structuredContent"]
        return structured


@pytest.fixture
def raw(folder: Path) -> Iterator[Raw]:
    raw = Raw()
    with raw.process:
        yield raw
        if raw.process.poll() is None:
            raw.process.kill()


SLEEPERS = "cat /proc/[0-9]*/comm | grep -cx sleep"


def wait_for_sleepers(raw: Raw, count: int) -> None:
    for _ in range(200):
        if raw.call("execute_command", sandbox="a", command=SLEEPERS)["stdout"] == f"{count}\n":
            return
    raise AssertionError("they are still there")


def test_a_call_that_is_cancelled_takes_its_command_with_it(raw: Raw) -> None:
    raw.call("create_sandbox", name="a")
    id = raw.start("execute_command", sandbox="a", command="sleep 1000 | sleep 1000")
    wait_for_sleepers(raw, 2)
    raw.tell("notifications/cancelled", {"requestId": id})
    wait_for_sleepers(raw, 0)
    raw.process.send_signal(signal.SIGTERM)
    assert raw.process.wait(20) == 143


def test_a_signal_ends_the_server_with_its_sandboxes_though_its_input_is_still_open(raw: Raw, folder: Path) -> None:
    raw.call("create_sandbox", name="a")
    raw.start("execute_command", sandbox="a", command="sleep 1000")
    wait_for_sleepers(raw, 1)
    raw.process.send_signal(signal.SIGTERM)
    assert raw.process.wait(20) == 143
    assert boxes(folder) == []


def test_a_signal_ends_the_server_though_its_client_reads_no_more(raw: Raw) -> None:
    raw.call("create_sandbox", name="a")
    for _ in range(10):
        raw.start("execute_command", sandbox="a", command="seq 1 100000")
    assert raw.process.stdout is not None
    raw.process.stdout.read(1)  # so much has been done that it must be stuck
    raw.process.send_signal(signal.SIGTERM)
    assert raw.process.wait(20) == 143


def test_a_client_that_dies_takes_the_server_and_its_sandboxes_with_it(raw: Raw, folder: Path) -> None:
    raw.call("create_sandbox", name="a")
    raw.start("execute_command", sandbox="a", command="seq 1 100000")
    assert raw.process.stdin is not None
    assert raw.process.stdout is not None
    raw.process.stdout.close()
    raw.process.stdin.close()
    raw.process.wait(20)
    assert boxes(folder) == []


def test_the_end_of_the_input_ends_the_server_with_its_sandboxes_in_the_middle_of_all(raw: Raw, folder: Path) -> None:
    raw.call("create_sandbox", name="a")
    raw.start("execute_command", sandbox="a", command="sleep 1000")
    wait_for_sleepers(raw, 1)
    for _ in range(5):
        raw.start("create_sandbox")
    assert raw.process.stdin is not None
    raw.process.stdin.close()
    assert raw.process.wait(20) == 0
    assert boxes(folder) == []


def test_only_the_protocol_is_on_stdout_and_what_is_no_message_is_survived(raw: Raw) -> None:
    assert raw.process.stdin is not None
    raw.process.stdin.write(b"no json\n{}\n[1\n\xff\xfe\n")
    raw.process.stdin.flush()
    assert raw.call("list_sandboxes")["sandboxes"] == []
    out, _ = raw.process.communicate(timeout=20)
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in out.splitlines())


# errors, on the mock


def test_there_is_advice_for_every_error_and_for_nothing_else() -> None:
    assert set(ADVICE) == {error.code for error in errors.all_errors()}


@pytest.fixture
def mock() -> Mock:
    return Mock()


@asynccontextmanager
async def in_process(
    mock: Mock, limits: CallLimits | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, AsyncSandboxManager]]:
    loaded = config.load({"provider": "mock", **settings})
    async with AsyncSandboxManager(loaded, providers={"mock": mock}) as manager:
        caller = Caller(manager, Spec(provider="mock"), limits)
        async with Client(build_server(always(caller))) as client:
            yield client, manager
        await caller.destroy_made()


async def error_of(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    told = result.structured_content["error"]
    assert text(result) == f"{told['code']}: {told['message']}\nWhat to do: {told['advice']}"
    assert told["advice"] == ADVICE[told["code"]]
    return str(told["code"])


async def test_errors_tell_a_model_what_happened_and_what_to_do(mock: Mock) -> None:
    async with in_process(mock, max_sandboxes=2) as (client, _):
        await call(client, "create_sandbox", name="a")
        assert await error_of(client, "create_sandbox", name="a") == "conflict"
        assert await error_of(client, "create_sandbox", name="NOT A NAME") == "invalid_spec"
        assert await error_of(client, "create_sandbox", memory="much") == "invalid_spec"
        assert await error_of(client, "create_sandbox", image="/dev/sda1") == "invalid_spec"
        assert await error_of(client, "execute_command", sandbox="none", command="true") == "not_found"
        assert await error_of(client, "execute_code", sandbox="a", code="1") == "interpreter_not_found"
        assert await error_of(client, "read_file", sandbox="a", path="/none") == "path_not_found"
        assert await error_of(client, "read_file", sandbox="a", path="/tmp") == "path_is_folder"
        assert await error_of(client, "list_directory", sandbox="a", path="/none") == "path_not_found"
        mock.faults.fail_create(CreateFailed("no room"))
        assert await error_of(client, "create_sandbox") == "create_failed"
        second = await call(client, "create_sandbox")
        assert await error_of(client, "create_sandbox") == "limit_reached"
        mock.faults.full_disk(second["id"])
        assert await error_of(client, "write_file", sandbox=second["id"], path="x", content="y") == "disk_full"
        mock.faults.dead_agent(second["id"])
        assert await error_of(client, "list_directory", sandbox=second["id"]) == "agent_unreachable"


async def test_arguments_of_the_wrong_kind_are_told_and_a_bug_of_ours_is_not_spelled_out(
    mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process(mock) as (client, manager):
        wrong = await client.call_tool("execute_command", {"sandbox": "a", "command": "true", "timeout_s": -1})
        assert wrong.is_error
        assert "timeout_s" in text(wrong)

        async def break_down(*_: object) -> None:
            raise RuntimeError("a secret of the host")

        monkeypatch.setattr(manager, "list", break_down)
        broken = await client.call_tool("list_sandboxes", {})
        assert broken.is_error
        assert "secret" not in text(broken)


async def test_a_server_sees_its_own_project_and_nothing_that_is_in_a_pool(mock: Mock) -> None:
    async with in_process(mock) as (client, manager):
        other = await manager.create(name="theirs", project="other")
        async with AsyncSandboxPool(manager, size=1) as pool:
            await pool.wait_for_full(20)
            (warm,) = await manager.list(Filter(project="default"))
            assert (await call(client, "list_sandboxes"))["sandboxes"] == []
            for id in (other.id, warm.id):
                assert await error_of(client, "destroy_sandbox", sandbox=id) == "not_found"
                assert await error_of(client, "execute_command", sandbox=id, command="true") == "not_found"
        assert (await manager.record("theirs")).is_live


async def test_a_long_folder_is_cut(mock: Mock) -> None:
    async with in_process(mock, CallLimits(entries=3)) as (client, _):
        await call(client, "create_sandbox", name="a")
        await call(client, "execute_command", sandbox="a", command="cd /tmp; touch 1 2 3 4 5")
        listed = await call(client, "list_directory", sandbox="a", path="/tmp")
        assert len(listed["entries"]) == 3
        assert listed["more"]


async def test_forks_and_fleets_end_with_the_server_unless_they_are_kept(mock: Mock) -> None:
    async with in_process(mock) as (client, _):
        await call(client, "create_sandbox", name="a")
        assert not (await call(client, "fork_sandbox", sandbox="a"))["kept"]
        kept = {(await call(client, "fork_sandbox", sandbox="a", keep=True))["id"]}
        assert (await call(client, "fleet_up", file="name: f\nphases: {web: {count: 2}}"))["ok"]
        assert (await call(client, "fleet_up", file="name: g\nphases: {db: {}}", keep=True))["ok"]
        kept |= {each["id"] for each in (await call(client, "fleet_status", fleet="g"))["members"]}
        assert len(mock.host.boxes) == 6
    assert set(mock.host.boxes) == kept


async def test_a_fleet_has_what_the_server_was_started_with() -> None:
    template = Spec.of(provider="mock", project="p", pids=32, memory="64M", allow=("python",), env={"A": "1"})
    fleet = read_fleet("name: f\nphases: {a: {memory: 1G, env: {B: '2'}}, b: {reach: ['a:80']}}", template)
    first, second = (phase.spec for phase in fleet.phases)
    assert (fleet.project, first.project, first.pids, first.memory) == ("p", "p", 32, 1 << 30)
    assert (first.env, second.memory) == ({"A": "1", "B": "2"}, 64 << 20)
    assert (first.network, first.allow, second.allow, second.reach) == ("rules", ("python",), ("python",), ("a:80",))
    alone = read_fleet("name: f\nphases: {a: {}, b: {reach: ['a:80']}}", Spec(provider="mock"))
    assert [(phase.spec.network, phase.spec.allow) for phase in alone.phases] == [("none", ()), ("rules", ())]


# what is cut


def test_a_character_that_is_cut_in_two_is_left_for_the_next_part() -> None:
    data = "aüü".encode()
    first = FileContent.of("p", data[:3], offset=0, size=5, limit=2)
    assert (first.content, first.encoding, first.next_offset) == ("a", "utf-8", 1)
    last = FileContent.of("p", data[1:], offset=1, size=5, limit=8)
    assert (last.content, last.next_offset) == ("üü", None)
    assert FileContent.of("p", data[:2], offset=0, size=2, limit=8).encoding == "base64"


# warm sandboxes


async def test_a_new_sandbox_is_a_warm_one_if_nothing_else_is_asked_for() -> None:
    mock = Mock()
    loaded, template = config.load({"provider": "mock"}), Spec(provider="mock", data=False)
    async with (
        AsyncSandboxManager(loaded, providers={"mock": mock}) as manager,
        AsyncSandboxPool(manager, template, size=2) as pool,
    ):
        caller = Caller(manager, pool.spec, pool=pool)
        async with Client(build_server(always(caller))) as client:
            await pool.wait_for_full(20)
            warm = set(mock.host.boxes)
            assert (await call(client, "list_sandboxes"))["sandboxes"] == []
            taken = await call(client, "create_sandbox", name="work", env={"A": "1"}, lifetime="1h")
            assert taken["id"] in warm
            ran = await call(client, "execute_command", sandbox="work", command="echo $A")
            assert ran["stdout"] == "1\n"
            other = await call(client, "create_sandbox", memory="64M")
            assert other["id"] not in warm
            assert pool.stats().hits == 1
        await caller.destroy_made()
    assert not mock.host.boxes


async def test_a_name_that_has_data_is_no_warm_one() -> None:
    mock = Mock()
    async with (
        AsyncSandboxManager(config.load({"provider": "mock"}), providers={"mock": mock}) as manager,
        AsyncSandboxPool(manager, size=1) as pool,
    ):
        caller = Caller(manager, pool.spec, pool=pool)
        await pool.wait_for_full(20)
        warm = set(mock.host.boxes)
        assert (await create_sandbox(caller, name="work")).id not in warm
        await caller.destroy_made()


async def test_the_program_keeps_sandboxes_warm_and_leaves_none(folder: Path) -> None:
    async with program("--pool", "1") as client:
        ids: set[str] = set()
        for _ in range(2):
            ids.add((await call(client, "create_sandbox"))["id"])
        assert len(ids) == 2
    assert boxes(folder) == []
