"""Commands and terminals of a real sandbox: streams, clients that go away, and those that come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
from manager.world import until
from surfaces.server.use_world import Box, Screen, local_box
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from skerry.surfaces.server import connections
from skerry.surfaces.server.connections import SocketConnection


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with local_box(folder) as box:
        yield box


async def _runs(box: Box, mark: str) -> bool:
    """Whether a process with this among its arguments runs in the box; the search itself has it in another form."""
    search = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -cx '[{mark[0]}]{mark[1:]}'"
    return int((await box.sh(search))["stdout"]) > 0


async def _ends(box: Box, mark: str) -> None:
    async def is_over() -> bool:
        return not await _runs(box, mark)

    await until(is_over)


async def _begins(box: Box, mark: str) -> None:
    async def is_there() -> bool:
        return await _runs(box, mark)

    await until(is_there)


async def test_a_command_dies_with_the_client_that_waits_for_it(box: Box) -> None:
    waiting = asyncio.create_task(box.post("/exec", json={"command": ["sleep", "7341"]}))
    await _begins(box, "7341")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await _ends(box, "7341")


async def test_a_key_does_not_keep_a_command_alive(box: Box) -> None:
    headers = {"idempotency-key": "again"}
    waiting = asyncio.create_task(box.post("/exec", json={"command": ["sleep", "7342"]}, headers=headers))
    await _begins(box, "7342")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await _ends(box, "7342")


async def test_a_streamed_command_dies_with_its_client(box: Box) -> None:
    async with box.events("POST", "/exec/stream", json={"command": "echo begun; exec sleep 7343"}) as events:
        assert (await anext(events)).data == {"text": "begun\n"}
        await _begins(box, "7343")
    await _ends(box, "7343")


async def test_a_command_whose_client_does_not_read_is_held_up_and_dies_with_it(box: Box) -> None:
    body = {"command": ["sh", "-c", "echo begun; exec yes", "7344"]}
    async with box.events("POST", "/exec/stream", json=body) as events:
        await anext(events)
        assert (await box.sh("echo quick"))["stdout"] == "quick\n"

    async def is_over() -> bool:
        return not any(each["running"] for each in (await box.get("/processes")).json()["items"])

    await until(is_over)


async def test_a_client_that_never_reads_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.2)
    body = b'{"command": ["yes", "7347"]}'
    async with box.raw("POST", "/exec/stream", b"content-type: application/json", body=body) as (_, writer):
        await writer.drain()
        await _begins(box, "7347")
        await _ends(box, "7347")


async def test_an_upload_that_stands_still_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.surfaces.server.guard._BODY_S", 0.2)
    async with box.raw("PUT", "/files/content?path=half", length=1000, body=b"half") as (reader, _):
        assert (await reader.readline()).split()[1] == b"408"
    assert (await box.get("/files")).json()["items"] == []


async def test_much_output_comes_whole(box: Box) -> None:
    size = 0
    body = {"command": "head -c 20000000 /dev/zero | tr '\\0' 'é'; echo end >&2"}
    async with box.events("POST", "/exec/stream", json=body) as events:
        async for event in events:
            if event.event == "stdout":
                size += len(event.data.get("text", "").encode()) or len(event.data["base64"]) // 4 * 3
    assert event.event == "exit"
    assert event.data["exit_code"] == 0
    assert size >= 20_000_000


async def test_input_larger_than_any_buffer_comes_back(box: Box) -> None:
    text = "x" * (6 << 20)
    events = await box.all_events("POST", "/exec/stream", json={"command": ["cat"], "stdin": text})
    assert sum(len(event.data["text"]) for event in events[:-1]) == len(text)


async def test_letters_are_not_cut_between_pieces(box: Box) -> None:
    body = {"command": ["sh", "-c", r"printf '\303'; sleep 0.2; printf '\251'; sleep 0.2; printf '\377'"]}
    events = await box.all_events("POST", "/exec/stream", json=body)
    assert [event.data for event in events[:-1]] == [{"text": "é"}, {"base64": "/w=="}]


async def test_output_is_bounded_as_it_was_asked_for(box: Box) -> None:
    body = {"command": "head -c 1000000 /dev/zero | tr '\\0' x", "limit": 1000}
    found = (await box.post("/exec", json=body)).json()
    assert found["truncated"]
    assert found["stdout_cut"] == 999_000
    assert len(found["stdout"]) < 1100
    events = await box.all_events("POST", "/exec/stream", json=body)
    assert sum(len(event.data["text"]) for event in events[:-1]) == 1000
    assert events[-1].data["truncated"]


async def test_a_command_that_takes_too_long_is_killed_and_told(box: Box) -> None:
    found = (await box.post("/exec", json={"command": "echo so far; sleep 1000", "timeout_s": 0.3})).json()
    assert (found["exit_code"], found["timed_out"], found["stdout"]) == (124, True, "so far\n")
    events = await box.all_events("POST", "/exec/stream", json={"command": "sleep 1000", "timeout_s": 0.3})
    assert events[-1].data["timed_out"]


async def test_a_background_process_outlives_its_listeners(box: Box) -> None:
    body = {"command": ["sh", "-c", "echo ready; read line; echo got $line"], "stdin": True}
    number = (await box.post("/processes", json=body)).json()["process"]
    async with box.events("GET", f"/processes/{number}/output") as events:
        assert (await anext(events)).data == {"text": "ready\n"}
    large = b"y" * 3_000_000 + b"\n"
    assert (await box.post(f"/processes/{number}/stdin", content=large)).status_code == 204
    events_again = await box.all_events("GET", f"/processes/{number}/output")
    assert sum(len(event.data["text"]) for event in events_again[:-1]) == len("ready\ngot ") + len(large)


def _terminal(**query: str | int) -> str:
    return f"/terminal?{urlencode(query)}"


async def test_a_terminal_is_typed_on_resized_and_left(box: Box) -> None:
    async with box.socket(_terminal(command="sh", rows=30, cols=100)) as socket:
        screen = Screen(socket)
        assert await screen.process() > 0
        await screen.type("stty size; echo $TERM\n")
        await screen.shows("30 100")
        await screen.shows("xterm-256color")
        await screen.tell(type="resize", rows=41, cols=141)
        await screen.type("stty size\n")
        await screen.shows("41 141")
        await screen.type("sleep 7345\n")
        await _begins(box, "7345")
        await screen.type("\x03")
        await screen.type("echo after-$((1+1))\n")
        await screen.shows("after-2")
        await screen.type("exit 5\n")
        assert (await screen.end())["exit_code"] == 5
        assert await screen.close() == 1000


async def test_a_terminal_that_lost_its_client_is_attached_to_again(box: Box) -> None:
    async with box.socket(_terminal(command="sh")) as socket:
        screen = Screen(socket)
        number = await screen.process()
        await screen.type("mark=kept-$((40+2)); echo $mark\n")
        await screen.shows("kept-42")
        socket.transport.abort()
    async with box.socket(_terminal(process=number, rows=50, cols=60)) as socket:
        screen = Screen(socket)
        assert await screen.process() == number
        await screen.shows("kept-42")
        await screen.type("echo again-$mark; stty size\n")
        await screen.shows("again-kept-42")
        await screen.shows("50 60")
        await screen.tell(type="signal", signal="KILL", tree=True)
        assert (await screen.end())["signal"] == 9


async def test_a_terminal_may_end_with_its_connection(box: Box) -> None:
    async with box.socket(_terminal(command="exec sleep 7346", keep="false")):
        await _begins(box, "7346")
    await _ends(box, "7346")


async def test_a_terminal_is_let_go_when_the_server_drains(box: Box) -> None:
    async with box.socket(_terminal(command="sh")) as socket:
        screen = Screen(socket)
        await screen.process()
        box.served.server.is_draining.set()
        assert await screen.close() == 1012


async def test_without_a_command_a_terminal_is_the_shell(box: Box) -> None:
    async with box.socket("/terminal") as socket:
        screen = Screen(socket)
        await screen.type("echo shell-$((2*3))\n")
        await screen.shows("shell-6")
        await screen.type("exit\n")
        await screen.end()


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("rows=0", 4400),
        ("cols=100000", 4400),
        ("process=99", 4404),
        ("process=1&command=sh", 4400),
        ("term=a;b", 4400),
        ("cwd=/no/such/folder", 4404),
        ("unknown=1", 4400),
    ],
)
async def test_a_terminal_that_cannot_be_is_refused(box: Box, query: str, code: int) -> None:
    async with box.socket(f"/terminal?{query}") as socket:
        assert await Screen(socket).close() == code


@pytest.mark.parametrize(
    "message",
    [
        "no json",
        "{}",
        '{"type":"resize"}',
        '{"type":"resize","rows":0,"cols":1}',
        '{"type":"signal","signal":99}',
        "[" * 9999,
    ],
)
async def test_a_message_that_means_nothing_ends_the_connection(box: Box, message: str) -> None:
    async with box.socket(_terminal(command="sh")) as socket:
        screen = Screen(socket)
        number = await screen.process()
        await socket.send(message)
        assert await screen.close() == 4400
        assert (screen.told[-1]["type"], screen.told[-1]["problem"]["status"]) == ("error", 400)
    infos = (await box.get("/processes")).json()["items"]
    assert [each["running"] for each in infos if each["process"] == number] == [True]


async def test_another_tenants_terminal_is_unknown(box: Box) -> None:
    other = Box(box.served, await box.served.client("other"), box.id)
    async with other.socket("/terminal") as socket:
        assert await Screen(socket).close() == 4404


_LISTENER = """
import os, socket, time
with socket.create_server(("127.0.0.1", 7000)) as server:
    open("listens", "w").close()
    peer, _ = server.accept()
    while not os.path.exists("go"):
        time.sleep(0.01)
    count = 0
    while data := peer.recv(1 << 16):
        count += len(data)
    peer.sendall(b"%d bytes" % count)
    peer.close()
"""
"""A program in the box that reads what comes on a port only when it is told to, and says how much it was."""


async def _listens(box: Box, program: str = _LISTENER) -> None:
    await box.post("/processes", json={"command": ["python3", "-c", program, "flood"]})

    async def is_there() -> bool:
        return (await box.get("/files/stat", params={"path": "listens"})).status_code == 200

    await until(is_there)


async def test_a_tunnel_carries_bytes_both_ways_and_says_where_they_end(box: Box) -> None:
    await _listens(box)
    await box.sh("touch go")
    async with box.socket("/ports/7000") as socket:
        await socket.send(b"x" * 1000)
        await socket.send('{"type":"eof"}')
        assert await socket.recv() == b"1000 bytes"
        assert await socket.recv() == '{"type":"eof"}'


async def test_a_client_whose_bytes_wait_for_a_slow_reader_is_not_taken_for_dead(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered = asyncio.Semaphore(0)

    def start(self: SocketConnection) -> None:
        self.ping_interval = self.ping_timeout = 0.05
        WebSocketsSansIOProtocol.start_keepalive(self)

    def late(self: SocketConnection) -> None:
        unanswered.release()
        keepalive_timeout(self)

    keepalive_timeout = SocketConnection.keepalive_timeout
    monkeypatch.setattr(SocketConnection, "start_keepalive", start)
    monkeypatch.setattr(SocketConnection, "keepalive_timeout", late)
    await _listens(box)
    async with box.socket("/ports/7000") as socket:
        size, piece = 64 << 20, b"x" * (1 << 19)

        async def send() -> None:
            for _ in range(size // len(piece)):
                await socket.send(piece)
            await socket.send('{"type":"eof"}')

        sending = asyncio.create_task(send())
        for _ in range(3):
            await unanswered.acquire()
        await box.sh("touch go")
        await sending
        assert await socket.recv() == b"%d bytes" % size


async def test_a_client_that_reads_nothing_of_a_tunnel_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.2)
    flood = _LISTENER.replace("while data := peer.recv(1 << 16):", "while peer.sendall(bytes(1 << 20)) is None:")
    await box.sh("touch go")
    await _listens(box, flood)
    async with box.socket("/ports/7000"):
        await _ends(box, "flood")


async def test_a_service_tells_its_state_and_its_log(folder: Path) -> None:
    async with local_box(folder, command="echo serving; exec sleep 1000") as box:

        async def runs() -> bool:
            service = (await box.get("/service")).json()["service"]
            return service is not None and service["state"] == "running"

        await until(runs)
        async with box.events("GET", "/service/log?follow=true") as events:
            assert (await anext(events)).data == {"text": "serving\n"}
        (event,) = await box.all_events("GET", "/service/log")
        assert event.data == {"text": "serving\n"}


async def test_a_sandbox_that_ends_ends_its_streams(box: Box) -> None:
    async with box.events("POST", "/exec/stream", json={"command": "echo begun; sleep 1000"}) as events:
        await anext(events)
        await box.delete("?grace_s=0")
        last = [event async for event in events][-1]
        assert last.event in ("error", "exit")
    with pytest.raises(httpx.HTTPStatusError, match="410"):
        (await box.post("/exec", json={"command": "true"})).raise_for_status()
