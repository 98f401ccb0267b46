"""What LangChain's suite does not ask of a sandbox; runs in the framework's environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

import skerry
from skerry.adapters.langchain import SkerrySandbox
from skerry.sync.loop_thread import loop_thread


@pytest.fixture
def backend() -> Iterator[SkerrySandbox]:
    with skerry.Sandbox() as sandbox:
        yield SkerrySandbox(sandbox, timeout_s=30)


def lose(backend: SkerrySandbox) -> None:
    box: Any = backend.sandbox._async
    loop_thread.run(box.connection.provider.destroy(box.id))


class Scripted(GenericFakeChatModel):
    """A model that says what it is told to."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self


def agent(backend: SkerrySandbox) -> Any:
    call = {"name": "execute", "args": {"command": "echo hello; exit 3"}, "id": "1"}
    model = Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")]))
    return create_deep_agent(model=model, backend=backend)


def test_outputs_come_in_order_with_the_exit_code(backend: SkerrySandbox) -> None:
    done = backend.execute("echo one; echo two >&2; echo three; exit 3")
    assert (done.output, done.exit_code, done.truncated) == ("one\ntwo\nthree\n", 3, False)


def test_a_command_that_takes_too_long_is_an_answer(backend: SkerrySandbox) -> None:
    done = backend.execute("echo begun; sleep 60", timeout=1)
    assert done.exit_code == 124
    assert done.output.startswith("begun\n")
    assert "timeout" in done.output


def test_what_the_request_has_wrong_is_an_answer(backend: SkerrySandbox) -> None:
    done = backend.execute("true " + "x" * (17 << 20))
    assert done.exit_code == 126
    assert "MiB" in done.output
    assert backend.upload_files([("/proc/nothing", b"")])[0].error is not None


async def test_cancelling_ends_the_command(backend: SkerrySandbox) -> None:
    task = asyncio.create_task(backend.aexecute("touch begun; exec sleep 4711"))
    assert (await backend.aexecute("until [ -e begun ]; do sleep 0.02; done", timeout=30)).exit_code == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until_gone = "while pgrep -f 'sleep 471[1]'; do sleep 0.02; done"
    assert (await backend.aexecute(until_gone, timeout=10)).exit_code == 0


def test_a_machine_that_is_lost_is_no_answer(backend: SkerrySandbox) -> None:
    lose(backend)
    for attempt in (
        lambda: backend.execute("true"),
        lambda: backend.read("/x"),
        lambda: backend.upload_files([("/x", b"")]),
        lambda: backend.download_files(["/x"]),
    ):
        with pytest.raises(skerry.SandboxGone) as raised:
            attempt()
        assert raised.value.infrastructure


async def test_a_machine_that_is_lost_during_a_command_is_no_answer(backend: SkerrySandbox) -> None:
    task = asyncio.create_task(backend.aexecute("touch begun; exec sleep 60"))
    assert (await backend.aexecute("until [ -e begun ]; do sleep 0.02; done", timeout=30)).exit_code == 0
    await asyncio.to_thread(lose, backend)
    with pytest.raises(skerry.SkerryError) as raised:
        await task
    assert raised.value.infrastructure


async def test_an_agent_gets_answers_and_its_caller_the_errors_of_the_machinery(backend: SkerrySandbox) -> None:
    done = await agent(backend).ainvoke({"messages": [HumanMessage("go")]})
    (told,) = [message.content for message in done["messages"] if message.type == "tool"]
    assert "hello" in told
    assert "3" in told
    lose(backend)
    with pytest.raises(skerry.SandboxGone):
        await agent(backend).ainvoke({"messages": [HumanMessage("go")]})
    with pytest.raises(skerry.SandboxGone):
        agent(backend).invoke({"messages": [HumanMessage("go")]})
