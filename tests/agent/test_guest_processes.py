"""Processes at their edges: odd arguments, pipes that stay open, trees that will not die, too many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import ArgumentsTooLong, BoxFull, InvalidSpec, SkerryError
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest, wait_until


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("argv", [[""], ["", "x"]])
async def test_a_program_without_a_name_is_not_found(sandbox: AsyncSandbox, argv: list[str]) -> None:
    assert (await sandbox.exec(argv)).exit_code in (126, 127)


async def test_arguments_arrive_byte_for_byte(sandbox: AsyncSandbox) -> None:
    odd = ["", " ", "a b", "\n", "$HOME", "*", "-n", "é", "\\", "'", '"', "\x01\x7f"]
    result = await sandbox.exec(["printf", "%s\\0", *odd])
    assert result.stdout.split(b"\0")[:-1] == [arg.encode() for arg in odd]


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["a\0b"], {}),
        (["true"], {"A=B": "x"}),
        (["true"], {"": "x"}),
        (["true"], {"A": "x\0y"}),
        (["true"], {"A\0": "x"}),
    ],
)
async def test_what_no_process_can_have_is_refused(sandbox: AsyncSandbox, argv: list[str], env: dict[str, str]) -> None:
    with pytest.raises(InvalidSpec):
        await sandbox.exec(argv, env=env)
    await sandbox.ping()


@pytest.mark.parametrize(
    "params",
    [
        {"argv": []}, {"argv": "true"}, {"argv": [1]}, {}, {"shell": 5}, {"argv": ["\ud800"]},
        {"argv": ["true"], "env": ["A"]}, {"argv": ["true"], "env": {"A": 1}},
        {"argv": ["true"], "timeout_s": -1}, {"argv": ["true"], "timeout_s": "1"}, {"argv": ["true"], "cwd": 5},
        {"argv": ["true"], "cwd": "a\0b"}, {"argv": ["true"], "user": 5}, {"argv": ["true"], "user": "0:x"},
        {"argv": ["true"], "pty": 5},
        {"argv": ["true"], "pty": {"rows": 0, "cols": 1}}, {"argv": ["true"], "pty": {"rows": 1e3}},
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_requests_are_refused_as_invalid(guest: Guest, params: dict[str, Any]) -> None:
    with guest.wire() as wire:
        answer = wire.call(1, "exec", **params)
        assert answer["error"]["data"]["kind"] == "invalid", answer
        assert wire.call(2, "ping")["result"] == {}


@pytest.mark.parametrize("pty", [None, {"rows": 24, "cols": 80}], ids=["pipes", "terminal"])
@pytest.mark.parametrize("wrong", [{"cwd": "/no/such/folder"}, {"argv": ["\ud800"]}, {"cwd": "/etc/passwd"}], ids=repr)
def test_a_process_that_did_not_start_leaves_no_descriptor(
    guest: Guest, wrong: dict[str, Any], pty: dict[str, int] | None
) -> None:
    with guest.wire() as wire:
        assert "error" in wire.call(1, "exec", **{"argv": ["true"], "pty": pty, **wrong})
        pid = wire.call(2, "hello", protocol=1)["result"]["pid"]
        before = len(os.listdir(f"/proc/{pid}/fd"))
        for number in range(3, 13):
            assert "error" in wire.call(number, "exec", **{"argv": ["true"], "pty": pty, **wrong})
        assert len(os.listdir(f"/proc/{pid}/fd")) == before


def test_a_user_that_it_cannot_become_is_refused() -> None:
    if os.geteuid() == 0:
        pytest.skip("root can become anybody")
    with Guest() as guest, guest.wire() as wire:
        assert wire.call(1, "exec", argv=["true"], user="12345")["error"]["data"]["kind"] == "unsupported"


async def test_another_user_is_really_another(sandbox: AsyncSandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    result = await sandbox.exec("id -u; id -g; id -G", user="12345:23456", cwd="/")
    assert result.text.split() == ["12345", "23456", "23456"]
    process = await sandbox.pty("id -u; id -G", user="12345:23456", cwd="/")
    assert b"".join([data async for _, data in process]).split() == [b"12345", b"23456"]


async def test_a_huge_argument_is_an_error_not_the_end(sandbox: AsyncSandbox, guest: Guest) -> None:
    for size in (500_000, 2_000_000):
        with pytest.raises(ArgumentsTooLong) as raised:
            await sandbox.exec(["echo", "x" * size])
        assert raised.value.rpc_code == -32000
    with pytest.raises(InvalidSpec, match="16 MiB"):
        await sandbox.run_code("sh", b"#" * (20 << 20))
    assert os.listdir(guest.home) == []


@pytest.mark.parametrize("more", [-1, 1 << 30, "1", True, None, 1.5], ids=repr)
def test_an_attachment_of_a_strange_length_is_refused(guest: Guest, more: object) -> None:
    with guest.wire() as wire:
        for id, method in ((1, "exec"), (2, "exec_code")):
            assert wire.call(id, method, more=more, shell="true")["error"]["data"]["kind"] == "invalid"
        assert wire.call(3, "ping")["result"] == {}


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"{} {}", b"[" * 100_000, b'{"argv":5}'], ids=repr)
def test_an_attachment_of_an_exec_that_is_no_object_is_refused(guest: Guest, text: bytes) -> None:
    with guest.wire() as wire:
        wire.send({"id": 1, "method": "exec", "params": {}}, text)
        assert wire.answer(1)["error"]["data"]["kind"] == "invalid"
        wire.send({"id": 2, "method": "exec", "params": {"more": len(text)}})
        wire.send({"method": "data", "params": {"id": 2}}, text)
        assert wire.answer(2)["error"]["data"]["kind"] == "invalid"
        assert wire.call(3, "ping")["result"] == {}


def test_an_attachment_that_ends_early_or_is_given_up_starts_nothing(guest: Guest) -> None:
    with guest.wire() as wire:
        for id, last in ((1, "end"), (2, "cancel")):
            wire.send({"id": id, "method": "exec_code", "params": {"language": "sh", "more": 10}})
            wire.send({"method": "data", "params": {"id": id}}, b"echo")
            wire.send({"method": last, "params": {"id": id}})
            assert "error" in wire.answer(id)
        assert wire.call(3, "processes")["result"] == {"processes": []}


def test_what_follows_a_long_command_is_its_input(guest: Guest) -> None:
    """All in one frame, and cut at every place."""
    command = b'{"argv":["cat"]}'
    with guest.wire() as wire:
        for at in range(len(command) + 4):
            wire.send({"id": at + 1, "method": "exec", "params": {"stdin": True, "more": len(command)}})
            whole = command + b"1234"
            for piece in filter(None, (whole[:at], whole[at:])):
                wire.send({"method": "data", "params": {"id": at + 1}}, piece)
            wire.send({"method": "end", "params": {"id": at + 1}})
            assert wire.answer(at + 1)["result"]["stdout_bytes"] == 4


async def test_input_for_a_process_that_closed_it_is_no_error(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("exec 0<&-; echo closed; sleep 0.1; exit 4", stdin=b"x" * 10_000_000)
    assert (result.text, result.exit_code) == ("closed\n", 4)
    assert (await sandbox.exec("true", stdin=b"x" * 10_000_000)).ok


async def test_all_output_comes_before_the_end(sandbox: AsyncSandbox) -> None:
    size = 3_000_000
    for _ in range(5):
        result = await sandbox.exec(f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2; exit 7")
        assert (len(result.stdout), len(result.stderr), result.exit_code) == (size, size, 7)


async def test_a_child_that_keeps_the_pipe_does_not_hold_up_the_end(sandbox: AsyncSandbox) -> None:
    async with asyncio.timeout(8):
        result = await sandbox.exec("echo first; sleep 30 & echo $!")
    first, pid = result.text.split()
    assert first == "first"
    assert runs(int(pid))
    os.kill(int(pid), 9)


async def test_output_is_capped_and_the_process_not_held_up(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("head -c 50000000 /dev/zero; echo done >&2", limit=1000)
    assert (result.stdout_cut, result.truncated, result.error_text) == (50_000_000 - 1000, True, "done\n")
    assert (await sandbox.exec("printf 12345", limit=5)).truncated is False
    cut = await sandbox.exec("printf 123456", limit=5)
    assert (cut.truncated, cut.stdout) == (True, b"123\n[... 1 bytes left out ...]\n56")
    assert (await sandbox.exec("printf 1", limit=0)).stdout == b""


ESCAPES = {
    "ignores SIGTERM": "trap '' TERM HUP INT; echo $$ > pid; while :; do sleep 0.05; done",
    "another session": "setsid sh -c 'echo $$ > pid; exec sleep 60' & wait",
    "daemonised": "(setsid sh -c 'trap \"\" TERM; (echo $$ > pid; exec sleep 60) & exit' &) ; sleep 60",
    "daemonised and the parent gone": "(setsid sh -c 'echo $$ > pid; exec sleep 60' >/dev/null 2>&1 &); sleep 60",
    "a new group": "set -m; sh -c 'echo $$ > pid; exec sleep 60' & wait",
}


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES)
async def test_a_timeout_kills_all_that_was_started(sandbox: AsyncSandbox, guest: Guest, script: str) -> None:
    running = asyncio.create_task(sandbox.exec(script, timeout_s=0.5))
    pid_file = guest.home / "pid"
    await asyncio.to_thread(wait_until, lambda: pid_file.exists() and bool(pid_file.read_text()), "it runs")
    pid = int(pid_file.read_text())
    async with asyncio.timeout(8):
        assert (await running).timed_out
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(_kill, pid)
        await asyncio.to_thread(wait_until, lambda: not runs(pid), "what it started is dead")


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, 9)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_foreground_process_dies_when_nobody_waits_for_it(guest: Guest, how: str) -> None:
    sandbox = guest.sandbox()
    process = await sandbox.start("echo $$; exec sleep 60")
    async for _, data in process:
        pid = int(data)
        break
    await (process.detach() if how == "cancel" else sandbox.close())
    await asyncio.to_thread(wait_until, lambda: not runs(pid) and not guest.children(), "the process is gone")
    await sandbox.close()


async def test_many_open_processes_die_quickly_when_their_stream_closes(guest: Guest) -> None:
    """Each is found by a search through all processes: that must not grow with the square of their number."""
    client = await guest.client()
    calls = [client.open("exec", {"argv": ["sleep", "60"]}) for _ in range(400)]
    await asyncio.to_thread(wait_until, lambda: len(guest.children()) == len(calls), "all run")
    client.close()
    async with asyncio.timeout(5):
        again = await guest.client()
    again.close()
    await asyncio.to_thread(wait_until, lambda: not guest.children(), "all are gone")


async def test_a_thousand_at_once_are_answered_or_refused(sandbox: AsyncSandbox, guest: Guest) -> None:
    await sandbox.ping()
    fds = guest.fds()
    outcomes = await asyncio.gather(*(sandbox.exec(["true"]) for _ in range(1000)), return_exceptions=True)
    wrong = [each for each in outcomes if isinstance(each, BaseException) and not isinstance(each, BoxFull)]
    assert not wrong, wrong[:3]
    assert any(not isinstance(each, BaseException) and each.ok for each in outcomes)
    await sandbox.ping()
    wait_until(lambda: not guest.children(), "no zombies are left")
    wait_until(lambda: guest.fds() == fds, "all descriptors are let go")


@pytest.mark.parametrize("nofile", [61, 62, 63, 64])  # so that each of the descriptors of a start is once the last
@pytest.mark.parametrize("terminal", [False, True])
async def test_without_descriptors_it_refuses_and_recovers(terminal: bool, nofile: int) -> None:
    with Guest(rlimits={"nofile": nofile}) as guest:
        client = await guest.client()
        fds = guest.fds()
        params: dict[str, Any] = {"shell": "sleep 0.3", "pty": {}} if terminal else {"shell": "sleep 0.3"}
        calls = [client.open("exec", params) for _ in range(60)]
        results = await asyncio.gather(*(call.result(dict[str, Any], 8) for call in calls), return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds == {dict, BoxFull}
        assert guest.fds() == fds
        assert await client.call("ping", type=dict[str, Any]) == {}
        client.close()


async def test_a_timeout_kills_though_no_descriptor_is_free() -> None:
    with Guest(rlimits={"nofile": 40}) as guest:
        client = await guest.client()
        calls = [client.open("exec", {"argv": ["sleep", "60"], "timeout_s": 0.3}) for _ in range(30)]
        results = await asyncio.gather(*(call.result(dict[str, Any], 8) for call in calls), return_exceptions=True)
        ended = [result for result in results if isinstance(result, dict)]
        assert ended
        assert all(result["timed_out"] for result in ended)
        assert all(isinstance(result, dict | BoxFull) for result in results)
        client.close()


async def test_five_hundred_of_everything_leave_nothing_open(sandbox: AsyncSandbox, guest: Guest) -> None:
    (guest.home / "f").write_bytes(b"x" * 1000)
    await sandbox.ping()
    await use_everything(sandbox)
    before = guest.fds()
    for _ in range(50):
        await asyncio.gather(*(use_everything(sandbox) for _ in range(10)))
    await sandbox.ping()
    wait_until(lambda: guest.fds() == before, f"the descriptors are {before} again")
    wait_until(lambda: not guest.children(), "no child is left")


async def use_everything(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec(["cat"], stdin=b"x")).ok
    assert len(await sandbox.files.read("f")) == 1000
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await (await sandbox.pty("true")).wait()).ok
    async with await sandbox.files.watch("."):
        pass
    tunnel = await sandbox.connect(1)
    with pytest.raises(SkerryError):
        await tunnel.read()
    with pytest.raises(SkerryError):
        await sandbox.files.read("missing")
    assert await sandbox.files.exists("f")


async def test_a_background_process_that_floods_costs_bounded_memory(sandbox: AsyncSandbox, guest: Guest) -> None:
    before = guest.memory()
    process = await sandbox.start("head -c 100000000 /dev/zero; echo end", background=True)
    number = process.number
    assert number is not None
    await asyncio.to_thread(wait_until, lambda: not guest.children(), "it has ended")
    assert guest.memory() - before < 30 << 20
    again = await sandbox.processes.attach(number)
    kept = b"".join([data async for _, data in again])
    assert len(kept) <= 1 << 21
    assert kept.endswith(b"end\n")


async def test_several_readers_of_one_process_see_the_same(guest: Guest) -> None:
    client = await guest.client()
    started = await client.call("exec", {"shell": "read x; seq 100000", "background": True, "stdin": True},
                                type=dict[str, int])  # fmt: skip
    readers = [client.open("attach", {"process": started["process"]}) for _ in range(3)]
    await readers[0].send(b"go\n")

    async def read(call: Any) -> bytes:
        return b"".join([data async for _, data in call.chunks()])

    seen = await asyncio.gather(*(read(call) for call in readers))
    assert seen[0].endswith(b"\n100000\n")
    assert seen[0] == seen[1] == seen[2]
    client.close()


async def test_a_stalled_reader_blocks_only_its_own_call(guest: Guest) -> None:
    client = await guest.client()
    stalled = client.open("exec", {"argv": ["head", "-c", "50000000", "/dev/zero"]}, window=100_000)
    for _ in range(5):
        assert await client.call("ping", type=dict[str, Any], timeout_s=8) == {}
    other = client.open("exec", {"argv": ["head", "-c", "5000000", "/dev/zero"]})
    assert sum([len(data) async for _, data in other.chunks()]) == 5_000_000
    assert not stalled.done
    assert sum([len(data) async for _, data in stalled.chunks()]) == 50_000_000
    client.close()


def test_credit_is_used_to_the_byte(guest: Guest) -> None:
    (guest.home / "f").write_bytes(b"x" * 1000)
    with guest.wire() as wire:
        for id, method in ((1, {"method": "exec", "params": {"argv": ["cat", "f"], "window": 10}}),
                           (2, {"method": "read_file", "params": {"path": "f", "window": 10}})):  # fmt: skip
            wire.send({"id": id, **method})
            got = 0
            for allowed in (10, 15, 16, 500, 1000):
                if allowed > 10:
                    wire.send({"method": "credit", "params": {"id": id, "bytes": allowed - got}})
                while got < allowed:
                    message, data = wire.receive()
                    assert message["method"] == "data"
                    got += len(data)
                assert got == allowed
                wire.send({"id": 100 + allowed + id * 2000, "method": "ping"})
                if got < 1000:
                    assert wire.receive()[0]["id"] == 100 + allowed + id * 2000
            wire.send({"method": "credit", "params": {"id": id, "bytes": 1}})
            assert wire.answer(id)["result"]


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_a_listing_gets_through_a_narrow_window(guest: Guest, window: int) -> None:
    for i in range(50):
        (guest.home / f"file-{i}").touch()
    with guest.wire() as wire:
        wire.send({"id": 1, "method": "list_dir", "params": {"path": ".", "window": window}})
        seen = b""
        while True:
            message, data = wire.receive()
            if message.get("id") == 1:
                break
            assert len(data) <= window
            seen += data
            wire.send({"method": "credit", "params": {"id": 1, "bytes": len(data)}})
        assert seen.count(b"\n") == 50


async def test_abandoned_chatty_calls_do_not_end_the_stream(guest: Guest) -> None:
    """What is on its way for a call that we gave up is no fault of the agent, however many frames it is."""
    client = await guest.client()
    talk = "import os\nwhile True: os.write(1, b'x')"
    for _ in range(12):
        call = client.open("exec", {"argv": [sys.executable, "-S", "-c", talk]})
        count = 0
        async for _ in call.chunks():
            count += 1
            if count > 200:
                break
        await asyncio.sleep(0.05)  # the flow goes on while we do not look
        call.abandon()
    assert await client.call("ping", type=dict[str, Any]) == {}
    client.close()


async def test_a_temporary_file_that_somebody_removed_does_not_hold_up_the_others(guest: Guest) -> None:
    client = await guest.client()
    client.open("write_file", {"path": "a", "atomic": True})
    client.open("exec", {"argv": ["sleep", "60"]})
    await asyncio.to_thread(wait_until, lambda: bool(guest.children()) and bool(os.listdir(guest.home)), "both began")
    for name in os.listdir(guest.home):
        os.unlink(guest.home / name)
    client.close()
    await asyncio.to_thread(wait_until, lambda: not guest.children(), "the process of the closed stream is gone")
    assert guest.fds().count("socket") == 1
