"""Commands, code and background processes over REST: what the answers say."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from surfaces.server.use_world import Box, box_of, events_of
from surfaces.server.world import Served


@pytest.fixture
async def box(served: Served) -> AsyncIterator[Box]:
    async with box_of(served) as box:
        yield box


async def test_a_command_that_fails_is_an_answer(box: Box) -> None:
    answer = await box.post("/exec", json={"command": "echo out; echo err >&2; exit 3"})
    assert answer.status_code == 200
    found = answer.json()
    assert (found["exit_code"], found["stdout"], found["stderr"]) == (3, "out\n", "err\n")
    assert (found["encoding"], found["truncated"], found["timed_out"]) == ("utf-8", False, False)


async def test_a_list_is_a_program_and_its_arguments(box: Box) -> None:
    answer = await box.post("/exec", json={"command": ["echo", "a b", "$HOME", ";", "id"]})
    assert answer.json()["stdout"] == "a b $HOME ; id\n"


async def test_options_reach_the_command(box: Box) -> None:
    body = {"command": "echo $WHO; pwd; cat", "env": {"WHO": "me"}, "cwd": "/tmp", "stdin": "typed"}
    assert (await box.post("/exec", json=body)).json()["stdout"] == "me\n/tmp\ntyped"


async def test_input_and_output_may_be_no_text(box: Box) -> None:
    raw = b"\xff\x00\xfe"
    body = {"command": ["cat"], "stdin_base64": base64.b64encode(raw).decode()}
    found = (await box.post("/exec", json=body)).json()
    assert (found["encoding"], base64.b64decode(found["stdout"])) == ("base64", raw)


async def test_what_has_just_been_paused_or_destroyed_runs_no_command(box: Box) -> None:
    body = {"command": "true"}
    assert (await box.post("/exec", json=body)).status_code == 200
    await box.post("/pause")
    assert (await box.post("/exec", json=body)).status_code == 409
    await box.post("/resume")
    assert (await box.post("/exec", json=body)).status_code == 200
    await box.client.delete(f"/v1/sandboxes/{box.id}")
    assert (await box.post("/exec", json=body)).status_code == 410


async def test_a_program_that_is_missing_is_told(box: Box) -> None:
    found = (await box.post("/exec", json={"command": ["no-such-program"]})).json()
    assert (found["exit_code"], found["not_started"]) == (127, "not_found")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": []},
        {"command": 5},
        {"command": "a\0b"},
        {"command": "x", "timeout_s": -1},
        {"command": "x", "limit": -1},
        {"command": "x", "limit": 1 << 40},
        {"command": "x", "stdin": "a", "stdin_base64": "YQ=="},
        {"command": "x", "stdin_base64": "not base64!"},
        {"command": "x", "unknown": 1},
        {"command": "x", "env": {"A": 5}},
        [],
    ],
)
@pytest.mark.parametrize("path", ["/exec", "/exec/stream"])
async def test_a_command_that_cannot_be_is_refused(box: Box, path: str, body: Any) -> None:
    answer = await box.post(path, json=body)
    assert answer.status_code == 400 or "event: error" in answer.text, answer.text


async def test_what_is_not_json_is_refused(box: Box) -> None:
    answer = await box.post("/exec", content=b'{"command": "id"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415


async def test_code_runs_in_its_language(box: Box) -> None:
    answer = await box.post("/code", json={"language": "sh", "code": "echo code"})
    assert answer.json()["stdout"] == "code\n"
    events = await box.all_events("POST", "/code/stream", json={"language": "sh", "code": "echo streamed"})
    assert [event.event for event in events] == ["stdout", "exit"]
    assert events[0].data == {"text": "streamed\n"}


async def test_code_without_a_language_is_refused(box: Box) -> None:
    for path in ("/code", "/code/stream"):
        answer = await box.post(path, json={"code": "1"})
        assert (answer.status_code, answer.json()["field"]) == (400, "language")


async def test_output_is_told_as_it_comes_and_then_the_end(box: Box) -> None:
    events = await box.all_events("POST", "/exec/stream", json={"command": "echo out; echo err >&2; exit 4"})
    said = {event.event: event.data for event in events[:-1]}
    assert said == {"stdout": {"text": "out\n"}, "stderr": {"text": "err\n"}}
    assert (events[-1].event, events[-1].data["exit_code"]) == ("exit", 4)


async def test_the_input_of_a_streamed_command_is_given(box: Box) -> None:
    events = await box.all_events("POST", "/exec/stream", json={"command": ["cat"], "stdin": "héé"})
    assert "".join(event.data["text"] for event in events[:-1]) == "héé"


async def test_what_fails_in_a_stream_is_an_event(box: Box) -> None:
    events = await box.all_events("POST", "/exec/stream", json={"command": "pwd", "cwd": "/no/such/folder"})
    assert (events[-1].event, events[-1].data["code"]) == ("error", "path_not_found")


async def test_the_ledger_tells_a_streamed_command_and_its_end(box: Box) -> None:
    await box.all_events("POST", "/exec/stream", json={"command": "exit 7"})
    manager = box.served.server.manager
    lines = [line async for line in manager.ledger.show() if line.sandbox == box.id]
    begun = next(line for line in lines if line.kind == "exec")
    ended = next(line for line in lines if line.kind == "exit")
    assert begun.who.tenant == "acme"
    assert ended.facts["exit_code"] == 7


async def test_a_background_process_is_heard_again(box: Box) -> None:
    started = await box.post("/processes", json={"command": "echo hello; exit 2", "tag": "mine"})
    assert started.status_code == 201
    number = started.json()["process"]
    for _ in range(2):
        events = await box.all_events("GET", f"/processes/{number}/output")
        assert [event.event for event in events] == ["stdout", "exit"]
        assert events[-1].data["exit_code"] == 2
    (info,) = (await box.get("/processes")).json()["items"]
    assert (info["process"], info["tag"], info["running"]) == (number, "mine", False)


async def test_a_background_process_is_given_input(box: Box) -> None:
    number = (await box.post("/processes", json={"command": ["cat"], "stdin": True})).json()["process"]
    assert (await box.post(f"/processes/{number}/stdin", content=b"one\n")).status_code == 204
    assert (await box.post(f"/processes/{number}/stdin?close=true", content=b"two\n")).status_code == 204
    events = await box.all_events("GET", f"/processes/{number}/output")
    assert "".join(event.data["text"] for event in events[:-1]) == "one\ntwo\n"
    assert events[-1].data["exit_code"] == 0
    late = await box.post(f"/processes/{number}/stdin", content=b"three\n")
    assert (late.status_code, late.json()["code"]) == (409, "wrong_state")


@pytest.mark.parametrize("named", [9, "KILL", "SIGKILL", "kill"])
async def test_a_background_process_is_signalled(box: Box, named: int | str) -> None:
    number = (await box.post("/processes", json={"command": ["sleep", "1000"]})).json()["process"]
    assert (await box.post(f"/processes/{number}/signal", json={"signal": named})).status_code == 204
    events = await box.all_events("GET", f"/processes/{number}/output")
    assert (events[-1].data["exit_code"], events[-1].data["signal"]) == (137, 9)


@pytest.mark.parametrize("body", [{"signal": 0}, {"signal": 65}, {"signal": "NOPE"}, {"signal": "__class__"}, {}])
async def test_a_signal_that_is_none_is_refused(box: Box, body: dict[str, Any]) -> None:
    number = (await box.post("/processes", json={"command": ["sleep", "1000"]})).json()["process"]
    assert (await box.post(f"/processes/{number}/signal", json=body)).status_code == 400


@pytest.mark.parametrize("number", ["7", "-1", "x", "9" * 30, "1.5"])
async def test_a_process_that_is_none_is_unknown(box: Box, number: str) -> None:
    for method, path, body in [
        ("GET", "output", None),
        ("POST", "stdin", None),
        ("POST", "signal", {"signal": 9}),
        ("POST", "resize", {"rows": 10, "cols": 10}),
    ]:
        answer = await box.client.request(method, box.url(f"/processes/{number}/{path}"), json=body)
        assert answer.status_code in (400, 404), (path, answer.text)


@pytest.mark.parametrize("command", ["", []])
async def test_a_background_process_of_nothing_is_refused(box: Box, command: Any) -> None:
    for more in ({}, {"pty": {}}):
        answer = await box.post("/processes", json={"command": command, **more})
        assert (answer.status_code, answer.json()["field"]) == (400, "command")


@pytest.mark.parametrize("size", [{"rows": 0}, {"cols": 70000}, {"rows": "many"}])
async def test_a_terminal_of_no_size_is_refused(box: Box, size: dict[str, Any]) -> None:
    assert (await box.post("/processes", json={"command": "x", "pty": size})).status_code == 400
    assert (await box.post("/processes/1/resize", json=size)).status_code == 400


async def test_events_are_replayed_from_the_last_that_was_seen(box: Box) -> None:
    async with box.client.stream("GET", "/v1/events") as answer:
        seen = [event async for event in events_of(answer)]
    assert [event.event for event in seen][-1] == "ready"
    assert all(event.data["sandbox"] == box.id for event in seen)
    await box.post("/pause")
    headers = {"last-event-id": seen[-1].id or ""}
    async with box.client.stream("GET", "/v1/events?follow=true", headers=headers) as answer:
        following = events_of(answer)
        assert (await anext(following)).event == "paused"
        await box.post("/resume")
        assert (await anext(following)).data["state"] == "ready"
    async with box.client.stream("GET", f"/v1/events?after=-1&sandbox={box.id}") as answer:
        assert [event async for event in events_of(answer)] == []


async def test_another_tenants_events_are_not_told(served: Served, box: Box) -> None:
    other = await served.client("other")
    async with other.stream("GET", "/v1/events") as answer:
        assert [event async for event in events_of(answer)] == []
    assert (await other.get(f"/v1/events?sandbox={box.id}")).status_code == 404


@pytest.mark.parametrize("query", ["after=-2", "after=x", "follow=maybe", f"after={2**70}"])
async def test_events_from_nowhere_are_refused(box: Box, query: str) -> None:
    assert (await box.client.get(f"/v1/events?{query}")).status_code == 400
    assert (await box.client.get("/v1/events", headers={"last-event-id": "x"})).status_code == 400


async def test_those_who_follow_are_let_go_when_the_server_drains(box: Box) -> None:
    async with box.client.stream("GET", "/v1/events?follow=true&after=-1") as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(":")
        box.served.server.is_draining.set()
        assert not [line async for line in lines if line.startswith("data")]


async def test_a_stream_in_which_nothing_happens_says_that_it_is_there(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.surfaces.rest.streams.KEEP_ALIVE_S", 0.02)
    async with box.client.stream("GET", "/v1/events?follow=true&after=-1") as answer:
        comments = 0
        async for line in answer.aiter_lines():
            comments += line.startswith(":")
            if comments == 3:
                break
