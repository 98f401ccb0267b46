"""Processes by E2B's wire: started, listened to, written to, signalled, and told of."""

from __future__ import annotations

import asyncio
import base64
import json

import httpx
import pytest
from surfaces.e2b.envd.envd_world import Client, Sandboxed, basic, coded, packed

PROCESS = "process.Process/"


async def test_a_process_tells_its_pid_its_output_and_its_end(envd: Client) -> None:
    text, (end, last) = await envd.run("/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    assert text == b"out\n"
    assert end["end"] == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert last == {}


async def test_bytes_that_are_no_text_come_as_they_are(envd: Client) -> None:
    text, _ = await envd.run("/bin/sh", "-c", r"printf 'a\342\000b'")
    assert text == b"a\xe2\x00b"


async def test_all_output_of_a_process_that_ends_at_once_comes(envd: Client) -> None:
    text, _ = await envd.run("/bin/sh", "-c", "head -c 3000000 /dev/zero")
    assert len(text) == 3_000_000


async def test_a_process_begins_in_its_users_home_with_its_own_environment(envd: Client) -> None:
    options = {"process": {"cmd": "/bin/sh", "args": ["-c", "pwd; echo $HOME $USER $A"], "envs": {"A": "b"}}}
    text, _ = await envd.run("sh", options=options)
    assert text.split() == [b"/home/user", b"/home/user", b"user", b"b"]


async def test_a_folder_that_is_not_there_is_an_invalid_argument(envd: Client) -> None:
    for cwd, why in (("/nowhere", "exist"), ("/etc/passwd", "entered"), ("nowhere", "exist")):
        message = {"process": {"cmd": "true", "cwd": cwd}}
        status, error = await envd.failure(PROCESS + "Start", packed(message))
        assert (status, error["code"]) == (200, "invalid_argument")
        assert why in error["message"]


async def test_a_user_who_is_not_there_is_not_let_in(envd: Client) -> None:
    message = packed({"process": {"cmd": "true"}})
    for user in ("nobody-here", "", "a\0b", "x" * 300):
        _, error = await envd.failure(PROCESS + "Start", message, authorization=basic(user))
        assert error["code"] == "unauthenticated"
        assert "invalid username" in error["message"]
    _, error = await envd.failure(PROCESS + "Start", message, authorization="Basic ///")
    assert error["code"] == "unauthenticated"


async def test_a_user_whom_the_box_cannot_become_is_refused(envd: Client) -> None:
    _, error = await envd.failure(PROCESS + "Start", packed({"process": {"cmd": "id"}}), authorization=basic("root"))
    assert error["code"] == "unimplemented"
    text, _ = await envd.run("id", "-un", authorization=basic("user"))
    assert text == b"user\n"


async def test_a_process_that_takes_too_long_ends_its_stream_with_its_deadline(envd: Client) -> None:
    async with envd.process("sleep", "60", connect_timeout_ms="300") as answers:
        pid = await answers.pid()
        (last,) = await answers.rest()
    assert last["error"]["code"] == "deadline_exceeded"
    assert (await envd.run("/bin/sh", "-c", f"kill -0 {pid} 2>/dev/null || echo gone"))[0] == b"gone\n"


async def test_a_timeout_that_is_none_is_an_invalid_argument(envd: Client) -> None:
    for text in ("soon", "-1", "99999999999", "1.5", "²"):
        content = packed({"process": {"cmd": "true"}})
        head = [(b"content-type", b"application/connect+json"), (b"connect-timeout-ms", text.encode())]
        response = await envd.http.post("/process.Process/Start", content=content, headers=head)
        assert json.loads(response.content[5:])["error"]["code"] == "invalid_argument", text


async def test_a_process_lives_on_when_its_client_goes_and_another_hears_what_it_says_then(envd: Client) -> None:
    async with envd.process("/bin/sh", "-c", "echo before; read x; echo after $x", options={"stdin": True}) as answers:
        pid = await answers.pid()
        assert await answers.output(b"before") == b"before\n"
    async with envd.stream(PROCESS + "Connect", {"process": {"pid": pid}}) as answers:
        assert await answers.pid() == pid
        await envd.result(PROCESS + "SendInput", {"process": {"pid": pid}, "input": {"stdin": coded(b"you\n")}})
        messages = await answers.rest()
    assert base64.b64decode(messages[0]["event"]["data"]["stdout"]) == b"after you\n"
    assert messages[1]["event"]["end"]["exitCode"] == 0


async def test_several_clients_hear_the_same(envd: Client) -> None:
    async with envd.process("cat", options={"stdin": True}) as first:
        pid = await first.pid()
        async with envd.stream(PROCESS + "Connect", {"process": {"pid": pid}}) as second:
            assert await second.pid() == pid
            await envd.result(PROCESS + "SendInput", {"process": {"pid": pid}, "input": {"stdin": coded(b"hi")}})
            assert await first.output(b"hi") == await second.output(b"hi") == b"hi"
        await envd.result(PROCESS + "CloseStdin", {"process": {"pid": pid}})
        assert (await first.rest())[0]["event"]["end"]["exitCode"] == 0


async def test_how_a_process_ended_is_told_to_who_comes_late(envd: Client) -> None:
    async with envd.process("/bin/sh", "-c", "exit 7") as answers:
        pid = await answers.pid()
        await answers.rest()
    async with envd.stream(PROCESS + "Connect", {"process": {"pid": pid}}) as answers:
        assert await answers.pid() == pid
        assert (await answers.rest())[0]["event"]["end"]["exitCode"] == 7
    assert await envd.code(PROCESS + "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}) == "not_found"


async def test_a_killed_process_is_no_more_when_that_is_answered(envd: Client) -> None:
    async with envd.process("sleep", "60") as answers:
        pid = await answers.pid()
        await envd.result(PROCESS + "SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert (await envd.run("/bin/sh", "-c", f"kill -0 {pid} 2>/dev/null || echo gone"))[0] == b"gone\n"
        end, last = await answers.rest()
    assert end["event"]["end"] == {
        "exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed",
    }  # fmt: skip
    assert last == {}


async def test_a_signal_is_for_the_process_alone(envd: Client) -> None:
    script = "sleep 60 & echo $!; wait"
    async with envd.process("/bin/sh", "-c", script) as answers:
        pid = await answers.pid()
        child = int(await answers.output(b"\n"))
        await envd.result(PROCESS + "SendSignal", {"process": {"pid": pid}, "signal": 9})
        assert (await answers.rest())[0]["event"]["end"]["status"] == "signal: killed"
    assert (await envd.run("kill", "-0", str(child)))[1][0]["end"]["exitCode"] == 0


async def test_processes_are_found_by_their_tags(envd: Client) -> None:
    async with envd.process("cat", options={"stdin": True, "tag": "mine"}) as answers:
        pid = await answers.pid()
        (known,) = (await envd.result(PROCESS + "List"))["processes"]
        assert (known["pid"], known["tag"], known["config"]["cmd"]) == (pid, "mine", "cat")
        assert known["config"]["cwd"] == "/home/user"
        await envd.result(PROCESS + "CloseStdin", {"process": {"tag": "mine"}})
        await answers.rest()
    assert (await envd.result(PROCESS + "List"))["processes"] == []
    assert await envd.code(PROCESS + "SendInput", {"process": {"tag": "mine"}, "input": {"stdin": ""}}) == "not_found"


async def test_a_process_that_is_not_there_is_not_found(envd: Client) -> None:
    for method in ("SendInput", "CloseStdin", "SendSignal", "Update"):
        message = {"process": {"pid": 999999}, "signal": "SIGNAL_SIGKILL", "input": {"stdin": ""}}
        assert await envd.code(PROCESS + method, message) == "not_found"
    _, error = await envd.failure(PROCESS + "Connect", packed({"process": {"pid": 999999}}))
    assert error["code"] == "not_found"
    for selector in ({}, {"pid": "x"}, {"pid": -1}):
        assert await envd.code(PROCESS + "SendSignal", {"process": selector}) == "invalid_argument"


async def test_stdin_is_there_unless_a_client_says_no(envd: Client) -> None:
    async with envd.process("cat") as answers:
        pid = await answers.pid()
        await envd.result(PROCESS + "SendInput", {"process": {"pid": pid}, "input": {"stdin": coded(b"x")}})
        assert await answers.output(b"x") == b"x"
        await envd.result(PROCESS + "CloseStdin", {"process": {"pid": pid}})
        await answers.rest()
    async with envd.process("sleep", "60", options={"stdin": False}) as answers:
        selector = {"process": {"pid": await answers.pid()}}
        code = await envd.code(PROCESS + "SendInput", {**selector, "input": {"stdin": coded(b"x")}})
        assert code == "failed_precondition"
        assert await envd.code(PROCESS + "SendInput", {**selector, "input": {}}) == "unimplemented"
        assert await envd.code(PROCESS + "SendInput", {**selector, "input": {"stdin": "!"}}) == "invalid_argument"
        assert await envd.code(PROCESS + "SendInput", {**selector, "input": {"pty": ""}}) == "failed_precondition"


async def test_input_is_taken_before_that_is_answered_and_a_client_may_give_up(envd: Client) -> None:
    async with envd.process("sleep", "60", options={"stdin": True}) as answers:  # which reads nothing
        selector = {"process": {"pid": await answers.pid()}}
        much = {**selector, "input": {"stdin": coded(bytes(1 << 20))}}
        assert await envd.code(PROCESS + "SendInput", much, connect_timeout_ms="300") == "deadline_exceeded"


async def test_a_stream_of_input_comes_in_its_order(envd: Client) -> None:
    async with envd.process("cat", options={"stdin": True}) as answers:
        pid = await answers.pid()

        async def body() -> object:
            yield packed({"start": {"process": {"pid": pid}}})
            for number in range(100):
                yield packed({"data": {"input": {"stdin": coded(b"%d\n" % number)}}})
                if number == 50:
                    yield packed({"keepalive": {}})

        head = {"content-type": "application/connect+json"}
        response = await envd.http.post("/process.Process/StreamInput", content=body(), headers=head)  # type: ignore[arg-type]
        assert response.content == packed({}).replace(b" ", b"") + packed({}, 2)
        await envd.result(PROCESS + "CloseStdin", {"process": {"pid": pid}})
        messages = await answers.rest()
    text = b"".join(base64.b64decode(each["event"]["data"]["stdout"]) for each in messages[:-2])
    assert text.split() == [b"%d" % number for number in range(100)]


async def test_a_stream_of_input_to_nobody_fails(envd: Client) -> None:
    data = packed({"data": {"input": {"stdin": ""}}})
    assert (await envd.failure(PROCESS + "StreamInput", data))[1]["code"] == "invalid_argument"
    start = packed({"start": {"process": {"pid": 99999}}})
    assert (await envd.failure(PROCESS + "StreamInput", start))[1]["code"] == "not_found"


async def test_a_terminal_has_its_size_and_is_typed_on(envd: Client) -> None:
    options = {"pty": {"size": {"rows": 10, "cols": 90}}}
    async with envd.process("/bin/sh", options=options) as answers:
        selector = {"process": {"pid": await answers.pid()}}
        await envd.result(PROCESS + "SendInput", {**selector, "input": {"pty": coded(b"stty size\n")}})
        await answers.output(b"10 90", "pty")
        await envd.result(PROCESS + "Update", {**selector, "pty": {"size": {"rows": 20, "cols": 100}}})
        await envd.result(PROCESS + "SendInput", {**selector, "input": {"pty": coded(b"stty size\n")}})
        await answers.output(b"20 100", "pty")
        assert await envd.code(PROCESS + "CloseStdin", selector) == "failed_precondition"
        assert await envd.code(PROCESS + "SendInput", {**selector, "input": {"stdin": ""}}) == "failed_precondition"
        async with envd.stream(PROCESS + "Connect", selector) as second:
            await second.pid()
            await envd.result(PROCESS + "SendInput", {**selector, "input": {"pty": coded(b"exit 4\n")}})
            assert (await second.rest())[-2]["event"]["end"]["exitCode"] == 4
    async with envd.process("sleep", "60") as answers:
        selector = {"process": {"pid": await answers.pid()}}
        assert await envd.code(PROCESS + "Update", {**selector, "pty": {"size": {"rows": 1, "cols": 1}}}) != ""


async def test_a_silent_stream_says_that_it_is_there(envd: Client) -> None:
    async with envd.process("sleep", "60", keepalive_ping_interval="1") as answers:
        await answers.pid()
        assert await answers.event() == {"keepalive": {}}


async def test_a_sandbox_that_is_lost_breaks_its_streams_off(envd: Client, boxed: Sandboxed) -> None:
    async with envd.process("sleep", "60") as answers:
        await answers.pid()
        killing = asyncio.create_task(boxed.sandbox.destroy(grace_s=0))
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await answers.rest()
        await killing
    response = await envd.call(PROCESS + "List")
    assert response.status_code == 502
    why = {"error_code": "sandbox_gone", "retryable": False, "infrastructure": True}
    assert response.json() == {"sandboxId": "sandbox0", "message": "The sandbox was not found", "code": 502, **why}
