"""Users of a box, as its agent tells of them: an old one cannot, a lying one is not believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from skerry.errors import AgentProtocolError, NotFound, Unsupported, UserNotFound
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.sandbox.users import account, find_process, processes

from .lying_agent import ENTRY, LyingAgent, Message, requests_only, sandbox_of
from .test_hostile_answers import always

USER = {"name": "user", "uid": 1000, "gid": 1000, "home": "/home/user"}


async def test_an_agent_too_old_for_it_is_told_as_such() -> None:
    @requests_only
    def old(agent: LyingAgent, message: Message) -> None:
        agent.send({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no method"}})

    with pytest.raises(Unsupported, match="older version"):
        await account(sandbox_of(old), "user")


@pytest.mark.parametrize(
    "answer",
    [{}, [], {**USER, "home": "home"}, {**USER, "home": "/a\0b"}, {**USER, "name": 5}, {**USER, "uid": -1},
     {**USER, "uid": 1 << 40}],
)  # fmt: skip
async def test_a_user_who_cannot_be_is_a_protocol_error(answer: Any) -> None:
    with pytest.raises(AgentProtocolError):
        await account(sandbox_of(always(answer)), "user")


@pytest.mark.parametrize(
    "more",
    [{}, {"owner": 5, "group": "x"}, {"owner": "a", "group": "b", "xattrs": {"a": "%"}},
     {"owner": "a", "group": "b", "leads_to": {"type": "unicorn", "mode": 1}},
     {"owner": "a", "group": "b", "leads_to": {"type": "file", "mode": -1}}],
)  # fmt: skip
async def test_details_that_cannot_be_are_a_protocol_error(more: dict[str, Any]) -> None:
    with pytest.raises(AgentProtocolError):
        await sandbox_of(always({**ENTRY, **more})).files.details("x")


async def test_a_kept_watch_with_more_events_than_there_can_be_is_a_protocol_error() -> None:
    record = msgspec.json.encode({"event": "create", "path": "/x"}) + b"\n"
    sandbox = sandbox_of(always({"watch": 1}, (record * 5000, 1)))
    with pytest.raises(AgentProtocolError, match="more than it keeps"):
        await sandbox.files.kept_watch(1).events()


async def test_users_are_told_by_name_and_number(sandbox: AsyncSandbox) -> None:
    own = await account(sandbox, "root" if (await sandbox.exec(["id", "-u"])).text.strip() == "0" else "user")
    by_call = await sandbox.call("user", {"user": str(own.user.uid)})
    assert (by_call["name"], by_call["uid"]) == (own.user.name, own.user.uid)
    with pytest.raises(UserNotFound):
        await sandbox.call("user", {"user": "nobody-like-this"})


async def test_processes_are_found_while_they_run_and_for_a_while_after(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start(["sleep", "1000"], background=True, tag="mine")
    found = await find_process(sandbox, tag="mine")
    assert (found.pid, found.number) == (process.pid, process.number)
    assert [each.cwd for each in await processes(sandbox)] == [(await sandbox.cwd())]
    await found.signal(9, alone=True, wait=True)
    with pytest.raises(NotFound):
        await find_process(sandbox, pid=process.pid)
    late = await find_process(sandbox, pid=process.pid, ended=True)
    assert (await late.wait()).signal == 9


async def test_a_held_process_says_nothing_before_somebody_listens(sandbox: AsyncSandbox) -> None:
    params = {"shell": "head -c 3000000 /dev/zero", "background": True, "hold": True}
    started = await sandbox.call("exec", params)
    process = await sandbox.processes.attach(started["process"])
    assert sum([len(data) async for _, data in process]) == 3_000_000
