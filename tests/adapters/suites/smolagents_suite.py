"""smolagents' own tests of executors, on one of ours, and what they do not ask for; runs in its environment."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
from smolagents import CodeAgent, FinalAnswerTool, Model, tool
from smolagents.local_python_executor import CodeOutput
from smolagents.models import ChatMessage, MessageRole
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.utils import AgentError

import skerry
from skerry.adapters.smolagents import SandboxFailed, SkerryExecutor
from skerry.sync.loop_thread import loop_thread

# Their source distribution has left out this file, which says when a test of paid services runs.
markers = ModuleType("tests.utils.markers")
markers.require_run_all = pytest.mark.skip  # type: ignore[attr-defined]
sys.modules |= {"tests.utils": ModuleType("tests.utils"), "tests.utils.markers": markers}
theirs = importlib.import_module("tests.test_remote_executors")


@pytest.fixture
def custom_executor() -> Iterator[SkerryExecutor]:
    options = json.loads(os.environ.get("SUITE_SANDBOX", "{}"))
    with skerry.Sandbox(**options) as sandbox:
        executor = SkerryExecutor(sandbox, logger=AgentLogger(LogLevel.OFF))
        yield executor
        with suppress(skerry.SandboxGone):
            executor.cleanup()


class TestSkerryExecutor(theirs.CommonDockerExecutorIntegration):  # type: ignore[misc,name-defined]
    """What each of their own remote executors passes."""


class Scripted(Model):
    """A model that says what it is told to."""

    def __init__(self, *steps: str) -> None:
        super().__init__()
        self.steps = list(steps)

    def generate(self, messages: list[ChatMessage], **_: Any) -> ChatMessage:
        self.seen = str(messages)
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"<code>\n{self.steps.pop(0)}\n</code>")


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


def test_an_agent_uses_tools_and_variables_from_step_to_step(custom_executor: SkerryExecutor) -> None:
    model = Scripted("x = add(1, 2)\nprint('so far', x)", "final_answer(x * start)")
    agent = CodeAgent(tools=[add], model=model, executor=custom_executor, verbosity_level=LogLevel.OFF)
    assert agent.run("compute", additional_args={"start": 14}) == 42
    assert "so far 3" in model.seen


def test_an_error_of_the_code_is_told_to_the_model(custom_executor: SkerryExecutor) -> None:
    model = Scripted("1 / 0", "import os; os._exit(3)", "final_answer('still here')")
    agent = CodeAgent(tools=[], model=model, executor=custom_executor, verbosity_level=LogLevel.OFF)
    assert agent.run("fail") == "still here"
    assert "ZeroDivisionError" in model.seen
    assert "what it knew is lost" in model.seen


class Losing(SkerryExecutor):
    """One whose box is gone when the first step comes."""

    def __call__(self, code: str) -> CodeOutput:
        box: Any = self.sandbox._async
        loop_thread.run(box.connection.provider.destroy(box.id))
        return super().__call__(code)


def test_a_machine_that_is_lost_ends_the_run(custom_executor: SkerryExecutor) -> None:
    losing = Losing(custom_executor.sandbox, logger=AgentLogger(LogLevel.OFF))
    agent = CodeAgent(tools=[], model=Scripted("1"), executor=losing, verbosity_level=LogLevel.OFF)
    with pytest.raises(SandboxFailed) as raised:
        agent.run("go")
    assert isinstance(raised.value.error, skerry.SandboxGone)


def test_a_machine_that_is_lost_during_a_step_ends_the_run(custom_executor: SkerryExecutor) -> None:
    box: Any = custom_executor.sandbox._async
    losing = threading.Timer(1.0, lambda: loop_thread.run(box.connection.provider.destroy(box.id)))
    losing.start()
    agent = CodeAgent(
        tools=[],
        model=Scripted("import time\ntime.sleep(60)", "final_answer(1)"),
        executor=custom_executor,
        additional_authorized_imports=["time"],
        verbosity_level=LogLevel.OFF,
    )
    with pytest.raises(SandboxFailed) as raised:
        agent.run("go")
    losing.join()
    assert raised.value.error.infrastructure


def test_a_step_that_takes_too_long_is_interrupted_and_nothing_is_forgotten(custom_executor: SkerryExecutor) -> None:
    custom_executor("kept = 5")
    custom_executor._timeout_s = 0.5
    with pytest.raises(AgentError, match="too long"):
        custom_executor("while True: pass")
    custom_executor._timeout_s = None
    assert custom_executor("kept").output == "5"


def test_a_large_answer_comes_whole(custom_executor: SkerryExecutor) -> None:
    custom_executor.send_tools({"final_answer": FinalAnswerTool()})
    assert custom_executor("final_answer('x' * 3_000_000)").output == "x" * 3_000_000
