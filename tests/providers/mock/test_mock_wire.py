"""The mock speaks PROTOCOL.md: seen frame by frame, without the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skerry.agent.guest import wire
from skerry.model.spec import Spec, new_id
from skerry.net.stream import Stream
from skerry.providers.mock import Mock


class Raw:
    """The bare frames of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.frames: asyncio.Queue[tuple[dict[str, Any], bytes] | None] = asyncio.Queue()
        self._parser = wire.Parser()
        stream.start(self)

    def received(self, data: memoryview) -> None:
        for message, attachment in self._parser.feed(data):
            self.frames.put_nowait((message, bytes(attachment)))

    def closed(self, error: Exception | None) -> None:
        self.frames.put_nowait(None)

    def send(self, message: dict[str, Any], attachment: bytes = b"") -> None:
        if attachment:
            message = {**message, "bytes": len(attachment)}
        self.stream.write(wire.encode(message), attachment)

    def request(self, id: int, method: str, attachment: bytes = b"", **params: Any) -> None:
        self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params}, attachment)

    async def next(self) -> tuple[dict[str, Any], bytes] | None:
        return await asyncio.wait_for(self.frames.get(), 5)

    async def answer(self, id: int) -> dict[str, Any]:
        while (frame := await self.next()) is not None:
            if frame[0].get("id") == id:
                return frame[0]
        raise AssertionError("the stream ended before the answer")


@pytest.fixture
async def raw(mock_provider: Mock) -> Raw:
    id = new_id()
    await mock_provider.create(id, Spec(provider="mock"))
    return Raw(await mock_provider.dial(id))


@pytest.fixture
async def greeted(raw: Raw) -> Raw:
    raw.request(0, "hello", protocol=1)
    assert (await raw.answer(0))["result"]["protocol"] == 1
    return raw


async def test_without_a_hello_it_speaks_the_plain_dialect(raw: Raw) -> None:
    for id, (method, params, result) in enumerate(
        [
            ("ping", {}, {"pong": True}),
            ("write_file", {"path": "d/f", "content": "text"}, {"success": True}),
            ("read_file", {"path": "d/f"}, {"content": "text"}),
            ("list_dir", {"path": "d"}, {"entries": [{"name": "f", "is_dir": False, "size": 4}]}),
            ("exec", {"cmd": "cat d/f; exit 3"}, {"exit_code": 3, "stdout": "text", "stderr": ""}),
            ("exec_code", {"lang": "sh", "code": "echo x"}, {"exit_code": 0, "stdout": "x\n", "stderr": ""}),
        ]
    ):
        raw.request(id, method, **params)
        assert (await raw.answer(id))["result"] == result


async def test_it_has_no_network(greeted: Raw) -> None:
    greeted.request(1, "network")
    assert (await greeted.answer(1))["error"]["data"]["kind"] == "unsupported"
    greeted.request(2, "take", wish=1)
    assert (await greeted.answer(2))["error"]["data"]["kind"] == "not_found"


async def test_a_broken_frame_closes_the_stream(greeted: Raw) -> None:
    greeted.stream.write(b"not json\n")
    assert await greeted.next() is None


async def test_no_more_is_sent_than_there_is_credit_for(greeted: Raw) -> None:
    greeted.request(1, "exec", argv=["yes"], window=10)
    first = await greeted.next()
    assert first is not None
    assert first[1] == b"y\n" * 5
    for _ in range(20):
        await asyncio.sleep(0)
    assert greeted.frames.empty()
    greeted.send({"method": "credit", "params": {"id": 1, "bytes": 4}})
    second = await greeted.next()
    assert second is not None
    assert second[1] == b"y\n" * 2
    greeted.send({"method": "cancel", "params": {"id": 1}})
    assert (await greeted.answer(1))["result"]["signal"] == 9


async def test_credit_comes_back_for_what_was_consumed(greeted: Raw) -> None:
    greeted.request(1, "exec", argv=["wc", "-c"], stdin=True)
    greeted.send({"method": "data", "params": {"id": 1}}, bytes(1 << 20))
    frame = await greeted.next()
    assert frame is not None
    assert frame[0] == {"method": "credit", "params": {"id": 1, "bytes": 1 << 20}}
    greeted.send({"method": "end", "params": {"id": 1}})
    output = await greeted.next()
    assert output is not None
    assert output[1] == b"1048576\n"
    exit = (await greeted.answer(1))["result"]
    assert exit == {
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "duration_s": 0.0,
        "stdout_bytes": 8,
        "stderr_bytes": 0,
    }


async def test_every_method_of_the_protocol_is_known(greeted: Raw) -> None:
    methods = """ping exec exec_code attach processes signal resize read_file write_file stat list_dir make_dir move
        remove chmod chown symlink xattr tree_download tree_upload watch metrics connect set_lifetime sync_clock"""
    for id, method in enumerate(methods.split(), 1):
        greeted.request(id, method)
        greeted.send({"method": "end", "params": {"id": id}})
        answer = await greeted.answer(id)
        assert answer.get("error", {}).get("code") != -32601, method
    greeted.request(99, "nonsense")
    assert (await greeted.answer(99))["error"]["code"] == -32601


@pytest.mark.parametrize(
    ("method", "params", "kind"),
    [
        ("exec", {}, "invalid"),
        ("exec", {"argv": []}, "invalid"),
        ("exec", {"argv": ["true"], "timeout_s": "soon"}, "invalid"),
        ("exec", {"argv": ["true"], "env": {"A": 1}}, "invalid"),
        ("exec", {"argv": ["sh"], "pty": {"rows": 0, "cols": 0}}, "invalid"),
        ("exec_code", {"language": "klingon"}, "invalid"),
        ("exec_code", {"language": "perl"}, "no_interpreter"),
        ("signal", {"process": 9, "signal": 15}, "no_process"),
        ("read_file", {"path": "x", "offset": -1}, "invalid"),
        ("read_file", {"path": "a\0b"}, "invalid"),
        ("read_file", {"path64": "abc"}, "invalid"),
        ("list_dir", {"path": "/", "depth": 0}, "invalid"),
        ("set_lifetime", {"lifetime_s": -1}, "invalid"),
        ("connect", {"port": 1}, "refused"),
        ("connect", {"port": 1, "host": "10.0.0.1"}, "denied"),
        ("sync_clock", {"time": 1}, "denied"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_kind(
    greeted: Raw, method: str, params: dict[str, Any], kind: str
) -> None:
    greeted.request(1, method, **params)
    assert (await greeted.answer(1))["error"]["data"]["kind"] == kind


async def test_a_call_cancelled_before_it_ends_is_still_answered(greeted: Raw) -> None:
    greeted.request(1, "exec", argv=["cat"], stdin=True)
    greeted.send({"method": "cancel", "params": {"id": 1}})
    await greeted.answer(1)
    greeted.request(2, "watch", path="/tmp")
    await greeted.next()
    greeted.send({"method": "cancel", "params": {"id": 2}})
    assert (await greeted.answer(2))["result"] == {}


async def test_two_runs_are_alike_to_the_byte() -> None:
    async def run() -> list[Any]:
        mock = Mock()
        id = new_id()
        await mock.create(id, Spec(provider="mock"))
        raw = Raw(await mock.dial(id))
        raw.request(0, "hello", protocol=1)
        raw.request(1, "exec", shell="sleep 5; ls /tmp; seq 3 | sort -r; echo $$")
        await raw.answer(0)
        frames = []
        while (frame := await raw.next()) is not None:
            frames.append(frame)
            if frame[0].get("id") == 1:
                break
        await mock.destroy(id)
        return frames

    assert await run() == await run()
