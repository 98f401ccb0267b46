"""Random and mutated conversations: callers see only errors of ours, the loop sees none at all.

An input that once broke the client goes into `corpus/` as a file of the bytes the agent sent, and is replayed for ever.
Hypothesis prints a failing input; write it with `pathlib.Path("tests/agent/corpus/NAME").write_bytes(...)`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.agent.client import AgentClient
from skerry.errors import SkerryError
from skerry.sandbox.processes import Exit

from .lying_agent import ENTRY, EXIT, HELLO, LyingAgent, turns

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


async def converse(pieces: list[bytes]) -> None:
    """Four calls are open (ids 1 to 4) while the agent says all of this, and then hangs up."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    agent = LyingAgent()
    client = AgentClient(agent)
    seen = bytearray()
    calls = [client.open("hello"), client.open("exec", on_data=lambda fd, data: seen.extend(data)),
             client.open("list_dir", window=4096), client.open("write_file")]  # fmt: skip

    async def read() -> None:
        async for _ in calls[2].chunks():
            pass

    tasks = [asyncio.create_task(read()), asyncio.create_task(calls[3].send(b"x" * 5_000_000))]
    tasks += [asyncio.create_task(call.result(Exit)) for call in calls]
    await turns(3)
    for piece in pieces:
        agent.raw(piece)
        await turns(2)
    agent.end()
    await turns()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    strange = [each for each in results if isinstance(each, BaseException) and not isinstance(each, SkerryError)]
    assert not strange, strange
    assert not unhandled, unhandled
    assert not client.is_open


def say(pieces: list[bytes]) -> None:
    asyncio.run(converse(pieces))


ids = st.one_of(st.integers(1, 5), st.integers(), st.none(), st.text(max_size=3), st.floats(), st.lists(st.integers()))
counts = st.one_of(st.integers(0, 100), st.integers(), st.none(), st.text(max_size=3), st.booleans())
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
results = st.one_of(st.sampled_from([{}, EXIT, HELLO, ENTRY]), values)
answers = st.fixed_dictionaries({"id": ids, "result": results})
errors = st.fixed_dictionaries(
    {
        "id": ids,
        "error": st.one_of(
            values,
            st.fixed_dictionaries(
                {
                    "code": counts,
                    "message": st.text(max_size=5),
                    "data": st.one_of(values, st.just({"kind": "not_found"})),
                }
            ),
        ),
    }
)
notifications = st.fixed_dictionaries(
    {
        "method": st.one_of(st.sampled_from(["data", "end", "credit", "cancel", "ping"]), st.text(max_size=4)),
        "params": st.one_of(
            st.fixed_dictionaries({"id": ids}, optional={"fd": counts, "bytes": counts}), values
        ),
    },
    optional={"bytes": counts, "id": ids},
)  # fmt: skip


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    message = draw(st.one_of(answers, errors, notifications))
    attachment = b""
    count = message.get("bytes")
    if type(count) is int and 0 <= count <= 4096:
        attachment = b"x" * (count + draw(st.sampled_from([0, 0, 0, -1, 1])))
    return json.dumps(message).encode() + b"\n" + attachment


@st.composite
def mutated(draw: st.DrawFn) -> list[bytes]:
    """A valid conversation with a byte changed, a piece dropped or said twice, cut anywhere."""
    data = draw(st.integers(0, 3000))
    whole = b"".join(
        [
            json.dumps({"id": 1, "result": HELLO}).encode() + b"\n",
            b'{"method":"data","params":{"id":2,"fd":1},"bytes":%d}\n' % data + b"y" * data,
            json.dumps({"id": 2, "result": EXIT}).encode() + b"\n",
            b'{"method":"credit","params":{"id":4,"bytes":1000}}\n',
            b'{"method":"data","params":{"id":3,"fd":1},"bytes":5}\nabcd\n{"method":"end","params":{"id":3}}\n',
            json.dumps({"id": 3, "error": {"code": -32000, "message": "no", "data": {"kind": "denied"}}}).encode()
            + b"\n",
        ]
    )
    at = draw(st.integers(0, len(whole) - 1))
    match draw(st.sampled_from(["change", "drop", "repeat", "insert"])):
        case "change":
            whole = whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
        case "drop":
            whole = whole[:at] + whole[at + draw(st.integers(1, 200)) :]
        case "repeat":
            whole = whole[:at] + whole[max(0, at - draw(st.integers(1, 200))) :]
        case _:
            whole = whole[:at] + draw(st.binary(max_size=20)) + whole[at:]
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_end_in_an_error_of_ours(pieces: list[bytes]) -> None:
    say(pieces)


@FUZZ
@given(st.lists(frames(), max_size=10))
def test_random_frames_end_in_an_error_of_ours(pieces: list[bytes]) -> None:
    say(pieces)


@FUZZ
@given(mutated())
def test_a_conversation_that_was_tampered_with_ends_in_an_error_of_ours(pieces: list[bytes]) -> None:
    say(pieces)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_once_broke_it_does_not_any_more(path: Path) -> None:
    data = path.read_bytes()
    say([data])
    say([data[at : at + 1] for at in range(min(len(data), 2000))])
