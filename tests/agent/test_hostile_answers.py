"""An agent that lies in what it answers: callers see errors of ours, and the host keeps nothing half-made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import AgentProtocolError, CallTimeout, LimitReached, SkerryError
from skerry.sandbox import files as files_module
from skerry.sandbox import processes as processes_module
from skerry.sandbox.sandbox import AsyncSandbox

from .lying_agent import ENTRY, EXIT, LyingAgent, Message, Script, requests_only, sandbox_of, turns

NONSENSE: list[Any] = [{}, [], None, 5, "x", {"size": "big"}, {"size": None}, {"size": 1e300}, {"size": []}]
STRANGE_EXITS: dict[str, dict[str, Any]] = {
    "a string": {**EXIT, "exit_code": "0"},
    "a float": {**EXIT, "exit_code": 0.5},
    "huge": {**EXIT, "exit_code": 10**18},
    "negative": {**EXIT, "exit_code": -1},
    "a boolean": {**EXIT, "exit_code": True},
    "a list": {**EXIT, "exit_code": [0]},
    "neither code nor signal": {**EXIT, "exit_code": None},
    "a signal of the moon": {**EXIT, "exit_code": None, "signal": 10**12},
    "a negative signal": {**EXIT, "exit_code": None, "signal": -200},
    "a duration as text": {**EXIT, "duration_s": "long"},
    "nothing": {},
}


def always(result: Any, *frames: tuple[bytes, int]) -> Script:
    """Answer every request with this, after these (content, fd)."""

    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        for content, fd in frames:
            agent.data(message["id"], content, fd)
        agent.answer(message, result)

    return script


def by_method(**results: Any) -> Script:
    """Answer each method with its own result, or say its bytes and then `{}`."""

    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        result = results[message["method"]]
        if isinstance(result, bytes):
            agent.data(message["id"], result)
            result = {"size": len(result), "bytes_sent": len(result)}
        agent.answer(message, result)

    return script


@pytest.mark.parametrize("exit", STRANGE_EXITS.values(), ids=STRANGE_EXITS)
async def test_a_strange_exit_is_an_error_not_a_result(exit: dict[str, Any]) -> None:
    with pytest.raises(AgentProtocolError):
        await sandbox_of(always(exit)).exec(["true"])


async def test_more_output_than_was_allowed_is_cut() -> None:
    sandbox = sandbox_of(always(EXIT, (b"x" * 100, 1), (b"y" * 100, 1), (b"e" * 5, 2)))
    result = await sandbox.exec(["true"], limit=150)
    assert result.stdout == b"x" * 75 + b"\n[... 50 bytes left out ...]\n" + b"y" * 75
    assert result.stderr == b"eeeee"
    assert result.truncated


async def test_an_exec_by_a_deadline_ends_though_the_agent_takes_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "_ANSWER_GRACE_S", 0.05)
    sandbox = sandbox_of(lambda *_: None)
    async with asyncio.timeout(5):
        with pytest.raises(CallTimeout):
            await sandbox.exec(["cat"], stdin=b"x" * (6 << 20), timeout_s=0.05)
    await sandbox.close()


async def test_a_process_with_a_deadline_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "_ANSWER_GRACE_S", 0.05)
    sandbox = sandbox_of(lambda *_: None)
    process = await sandbox.start(["cat"], timeout_s=0.05)
    async with asyncio.timeout(5):
        with pytest.raises(CallTimeout):
            await process.wait()
    await sandbox.close()


async def test_a_write_ends_though_the_agent_gives_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "PATIENCE_S", 0.05)
    sandbox = sandbox_of(lambda *_: None)
    async with asyncio.timeout(5):
        with pytest.raises(CallTimeout):
            await sandbox.files.write("x", b"x" * (6 << 20))
    await sandbox.close()


async def test_a_listing_that_never_ends_ends_by_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "PATIENCE_S", 0.05)
    sandbox = sandbox_of(lambda *_: None)
    async with asyncio.timeout(5):
        with pytest.raises(CallTimeout):
            await sandbox.files.list()
    await sandbox.close()


async def test_a_log_of_a_service_that_never_ends_is_an_error() -> None:
    def script(agent: LyingAgent, message: Message) -> None:
        """Send as much as there is credit for, and no answer."""
        if message.get("method") == "service_log":
            agent.data(message["id"], b"x" * (1 << 20), 1)
        elif message.get("method") == "credit":
            agent.data(message["params"]["id"], b"x" * message["params"]["bytes"], 1)

    sandbox = sandbox_of(script)
    async with asyncio.timeout(10):
        with pytest.raises(AgentProtocolError, match="more of a log"):
            [piece async for piece in sandbox.service.logs()]
    await sandbox.close()


Use = Callable[[AsyncSandbox], Awaitable[object]]
USES: dict[str, Use] = {
    "write": lambda s: s.files.write("x", b"abc"),
    "append": lambda s: s.files.append("x", b"abc"),
    "stat": lambda s: s.files.stat("x"),
    "metrics": lambda s: s.metrics(),
    "processes": lambda s: s.processes.list(),
    "service": lambda s: s.service.status(),
    "background": lambda s: s.start(["x"], background=True),
    "exec": lambda s: s.exec(["x"]),
    "code": lambda s: s.run_code("python", "1"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("result", NONSENSE, ids=repr)
async def test_a_nonsense_answer_is_an_error_of_ours(use: Use, result: Any) -> None:
    with pytest.raises(SkerryError):
        await use(sandbox_of(always(result)))


USAGE = {"total": 1, "used": 1, "free": 1}
MEASURED = {"uptime_s": 1.0, "cpu_percent": 1.0, "cpu_s": 1.0, "memory_bytes": 1, "disk": USAGE, "processes": 1}
PROCESS = {"process": 1, "pid": 1, "argv": ["x"], "running": True, "started": 1.0, "exit_code": 1, "signal": 1}


SERVICE = {"state": "running", "healthy": True, "process": 1, "pid": 1, "restarts": 1, "exit_code": 1, "started": 1.0}


def _with_each_number(answer: Any, number: str) -> Iterator[bytes]:
    """The answer as JSON, again and again, with that for one of its numbers."""
    text = json.dumps(answer)
    for found in re.finditer(r"(?<=: )[\d.]+", text):
        yield f"{text[: found.start()]}{number}{text[found.end() :]}".encode()


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "1e400", "1e308", "NaN", "-1e308", str(2**63 + 3000)])
@pytest.mark.parametrize(
    ("use", "answer"),
    [
        (lambda s: s.metrics(), MEASURED),
        (lambda s: s.processes.list(), {"processes": [PROCESS]}),
        (lambda s: s.service.status(), {"service": SERVICE}),
        (lambda s: s.files.stat("x"), ENTRY),
        (lambda s: s.exec(["x"]), EXIT),
        (lambda s: s.start(["x"], background=True), {"process": 1}),
        (lambda s: s.files.append("x", b""), {"size": 1}),
    ],
    ids=["metrics", "processes", "service", "stat", "exec", "start", "append"],
)
async def test_no_number_of_an_agent_is_one_that_cannot_be_printed(use: Use, answer: Any, number: str) -> None:
    for said in _with_each_number(answer, number):

        @requests_only
        def script(agent: LyingAgent, message: Message, said: bytes = said) -> None:
            agent.raw(b'{"id":%d,"result":%s}\n' % (message["id"], said))

        with pytest.raises(AgentProtocolError):
            await use(sandbox_of(script))
    assert await use(sandbox_of(always(answer))) is not None


@pytest.mark.parametrize(
    "record",
    [
        {**ENTRY, "name": "a/b"},
        {**ENTRY, "name": "/etc/passwd"},
        {**ENTRY, "name": "a\0b"},
        {**ENTRY, "name": ".."},
        {**ENTRY, "name": "."},
        {**ENTRY, "name": ""},
        {**ENTRY, "name": None, "name64": "Ly4uL2V0Yw=="},
        {**ENTRY, "name": None, "name64": "é"},
        {**ENTRY, "name": None},
        {**ENTRY, "type": "unicorn"},
        {**ENTRY, "size": -1},
        {**ENTRY, "mode": "rwx"},
        {"name": "x"},
    ],
    ids=repr,
)
async def test_a_file_that_cannot_be_is_a_protocol_error(record: dict[str, Any]) -> None:
    sandbox = sandbox_of(always({"count": 1}, (files_module.msgspec.json.encode(record) + b"\n", 1)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.list()


@pytest.mark.parametrize("records", [b"{}\n", b"[[[\n", b"\xff\n", b'{"name":"\xff"}\n', b"[" * 50_000 + b"\n", b"\n"])
async def test_records_of_the_wrong_form_are_a_protocol_error(records: bytes) -> None:
    sandbox = sandbox_of(always({"count": 1}, (records, 1)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.list()


async def test_a_last_record_that_is_cut_off_is_not_passed_over() -> None:
    record = files_module.msgspec.json.encode(ENTRY)
    sandbox = sandbox_of(always({"count": 2}, (record + b"\n" + record[:-5], 1)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.list()


async def test_a_record_without_end_is_cut_off_in_bounded_memory() -> None:
    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        def more() -> None:
            if agent.is_open and not agent.asked("cancel") and len(agent.messages) < 1000:
                asyncio.get_running_loop().call_later(0.001, more)
                agent.data(message["id"], b"x" * 200_000)

        more()

    tracemalloc.start()
    try:
        with pytest.raises(AgentProtocolError, match="without end"):
            await sandbox_of(script).files.list()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


async def test_a_watch_that_ends_before_it_begins_is_an_error_of_ours() -> None:
    with pytest.raises(SkerryError):
        await sandbox_of(always({})).files.watch("x")


async def test_a_watch_that_never_begins_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.timeout
    monkeypatch.setattr(files_module.asyncio, "timeout", lambda _s: real(0.02))
    with pytest.raises(SkerryError):
        await sandbox_of(lambda *_: None).files.watch("x")


# reading and downloading


@pytest.mark.parametrize("claimed", [0, 2, 4, 10**12, -1])
async def test_a_file_that_is_longer_or_shorter_than_the_agent_says_is_not_believed(claimed: int) -> None:
    sandbox = sandbox_of(always({"size": claimed, "bytes_sent": claimed}, (b"abc", 1)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.read("x")


async def test_a_range_is_never_longer_than_was_asked_for() -> None:
    sandbox = sandbox_of(always({"size": 9, "bytes_sent": 9}, (b"123456789", 1)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.read("x", length=3)


async def test_file_contents_on_the_error_descriptor_are_not_contents() -> None:
    sandbox = sandbox_of(always({"size": 3, "bytes_sent": 3}, (b"abc", 2)))
    with pytest.raises(AgentProtocolError):
        await sandbox.files.read("x")


async def test_a_download_is_whole_and_has_no_special_bits(tmp_path: Path) -> None:
    sandbox = sandbox_of(by_method(stat={**ENTRY, "mode": 0o6777, "size": 3}, read_file=b"abc"))
    await sandbox.files.download("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert (tmp_path / "x").stat().st_mode & 0o7000 == 0
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("told", [".bashrc", "..", ".", ""])
async def test_a_download_into_a_folder_is_named_by_the_caller_not_by_the_agent(tmp_path: Path, told: str) -> None:
    """An agent that chose the name could put `.bashrc` or `authorized_keys` into a folder of the host."""
    sandbox = sandbox_of(by_method(stat={**ENTRY, "name": told}, read_file=b"abc"))
    try:
        await sandbox.files.download("wanted.txt", tmp_path)
    except SkerryError:
        assert os.listdir(tmp_path) == []
    else:
        assert os.listdir(tmp_path) == ["wanted.txt"]


async def test_an_endless_download_stops_at_its_limit_and_leaves_nothing(tmp_path: Path) -> None:
    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        if message["method"] == "stat":
            agent.answer(message, ENTRY)
            return

        def more() -> None:
            if agent.is_open and not agent.asked("cancel") and len(agent.messages) < 1000:
                asyncio.get_running_loop().call_soon(more)
                agent.data(message["id"], b"x" * 10_000)

        more()

    async with asyncio.timeout(5):
        with pytest.raises(LimitReached):
            await sandbox_of(script).files.download("x", tmp_path / "x", max_bytes=1_000_000)
    assert os.listdir(tmp_path) == []


async def test_a_download_that_breaks_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        if message["method"] == "stat":
            agent.answer(message, ENTRY)
        else:
            agent.data(message["id"], b"half")
            agent.end(ConnectionResetError("gone"))

    with pytest.raises(SkerryError):
        await sandbox_of(script).files.download("x", tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


async def test_a_download_to_where_nothing_can_be_is_an_error_of_ours(tmp_path: Path) -> None:
    sandbox = sandbox_of(by_method(stat=ENTRY, read_file=b"abc"))
    with pytest.raises((SkerryError, FileNotFoundError)):
        await sandbox.files.download("x", tmp_path / "no" / "such" / "folder")


async def test_a_cancelled_download_writes_no_more_into_whatever_file_comes_next(tmp_path: Path) -> None:
    """The rest of an attachment comes after the cancellation: the descriptor's number may be another file's by then."""

    @requests_only
    def script(agent: LyingAgent, message: Message) -> None:
        if message["method"] == "stat":
            agent.answer(message, ENTRY)
        else:
            agent.raw(b'{"method":"data","params":{"id":%d},"bytes":100}\nhalf' % message["id"])

    sandbox = sandbox_of(script)
    downloading = asyncio.create_task(sandbox.files.download("x", tmp_path / "x"))
    await turns()
    downloading.cancel()
    await asyncio.gather(downloading, return_exceptions=True)
    agent = sandbox.connection.provider.agents[0]  # type: ignore[attr-defined]
    with contextlib.ExitStack() as files:
        innocent = [files.enter_context((tmp_path / f"innocent{i}").open("w+b", buffering=0)) for i in range(5)]
        agent.raw(b"x" * 96)
        assert [file.tell() for file in innocent] == [0] * 5
    await sandbox.close()


def test_a_cancelled_download_of_a_folder_does_not_hold_up_the_program(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from tests.agent.lying_agent import ENTRY, requests_only, sandbox_of

        @requests_only
        def script(agent, message):
            if message["method"] == "stat":
                agent.answer(message, {**ENTRY, "type": "dir"})

        async def main():
            sandbox = sandbox_of(script)
            try:
                async with asyncio.timeout(0.2):
                    await sandbox.files.download("x", sys.argv[1])
            except TimeoutError:
                print("cancelled")

        asyncio.run(main())
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "folder")]
    root = Path(__file__).parents[2]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=15)
    assert done.stdout == "cancelled\n", done.stderr


async def test_a_listing_with_names_that_are_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of entries bounds nothing if each may be as long as a record."""
    monkeypatch.setattr(files_module, "MAX_LISTED", 1 << 16)
    record = files_module.msgspec.json.encode({**ENTRY, "path": "/" + "x" * 50_000}) + b"\n"
    with pytest.raises(LimitReached):
        await sandbox_of(always({"count": 3}, (record * 3, 1))).files.list()


@pytest.mark.parametrize("fd", [1, 2])
async def test_pieces_of_a_range_are_never_more_than_was_asked_for(fd: int) -> None:
    sandbox = sandbox_of(always({"size": 9, "bytes_sent": 9}, (b"123456789", fd)))
    with pytest.raises(AgentProtocolError):
        _ = [piece async for piece in sandbox.files.iter_chunks("x", length=3 if fd == 1 else None)]
