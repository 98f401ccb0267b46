"""Sandboxes in evaluations by Inspect itself, and what its self-check does not ask for. It runs in the environment of
Inspect, on the provider that the settings name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageAssistant, execute_tools
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.tool import ToolCall, bash
from inspect_ai.util import (
    ExecCompleted,
    ExecRemoteStreamingOptions,
    ExecStdout,
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    sandbox,
)

import skerry
from skerry.adapters.inspect_ai import SkerryConfig, SkerrySandboxEnvironment, open_manager

pytestmark = pytest.mark.anyio

Work = Callable[[], Awaitable[str]]
OUTPUT_LIMIT = 10 << 20
IMAGE = json.loads(os.environ.get("SUITE_SANDBOX", "{}")).get("image")
COMPOSE = """
services:
  db:
    environment: {WHO: the database}
  main:
    x-default: true
    depends_on: [db]
    mem_limit: 256m
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def box() -> AsyncIterator[SkerrySandboxEnvironment]:
    kind = SkerrySandboxEnvironment
    await kind.task_init("use", None)
    environments = await kind.sample_init("use", None, {})
    yield environments["default"].as_type(kind)
    await kind.sample_cleanup("use", None, environments, interrupted=False)
    await kind.task_cleanup("use", None, cleanup=True)


async def left() -> int:
    async with open_manager() as manager:
        return await manager.count()


async def evaluate(tmp_path: Path, work: Work, box: str | tuple[str, str] | SandboxEnvironmentSpec) -> EvalLog:
    """One sample whose answer is what `work` returns; `42` is right."""

    @solver
    def solve():  # type: ignore[no-untyped-def]
        async def run(state: TaskState, generate: Generate) -> TaskState:
            state.output.completion = await work()
            return state

        return run

    sample = Sample("?", target="42", files={"greeting": "hello"}, setup="#!/bin/sh\necho $(cat greeting) >> greeting")
    task = Task(dataset=[sample], solver=solve(), scorer=includes(), sandbox=box)
    (log,) = await eval_async(task, model="mockllm/model", log_dir=str(tmp_path))
    return log


async def test_a_sample_has_its_files_its_setup_and_a_sandbox_of_its_own(tmp_path: Path) -> None:
    async def work() -> str:
        assert await sandbox().read_file("greeting") == "hello" + "hello\n"
        return (await sandbox().exec(["python3", "-c", "print(6 * 7)"])).stdout

    log = await evaluate(tmp_path, work, "skerry")
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1
    assert await left() == 0


async def test_fields_of_a_spec_come_from_the_configuration_and_back_from_a_log(tmp_path: Path) -> None:
    config = SkerryConfig(memory="128M", env={"WHO": "me"})

    async def work() -> str:
        return (await sandbox().exec(["sh", "-c", "echo $WHO 42"])).stdout

    log = await evaluate(tmp_path, work, SandboxEnvironmentSpec("skerry", config))
    assert log.samples is not None
    assert log.samples[0].output.completion == "me 42\n"
    assert log.eval.sandbox == SandboxEnvironmentSpec("skerry", config)
    for wrong in ({"memroy": "1G"}, {"memory": "a lot"}):
        with pytest.raises(ValueError, match=r"memory|memroy"):
            SkerryConfig(**wrong)


async def test_services_of_a_compose_file_are_environments_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE)

    async def work() -> str:
        assert "WHO" not in (await sandbox().exec(["env"])).stdout
        assert "WHO=the database" in (await sandbox("db").exec(["env"])).stdout
        assert await left() == 2
        return "42"

    log = await evaluate(tmp_path, work, ("skerry", str(tmp_path / "compose.yaml")))
    assert log.status == "success", log.error
    assert await left() == 0


BUILT = """
services:
  default:
    build: {context: made, args: {WHAT: "42"}}
    init: true
    command: tail -f /dev/null
    x-skerry: {provider: docker, writable_root: true}
"""


@pytest.mark.skipif(IMAGE is None, reason="boxes of this provider are not made of images")
async def test_an_image_of_a_compose_file_is_built_before_the_first_sample(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(BUILT)
    (tmp_path / "made").mkdir()
    (tmp_path / "made/Dockerfile").write_text(f"FROM {IMAGE}\nARG WHAT\nENV WHAT=$WHAT\nCOPY given /given\n")
    (tmp_path / "made/given").write_text("given")

    async def work() -> str:
        return (await sandbox().exec(["sh", "-c", "cat /given; echo $WHAT"])).stdout

    log = await evaluate(tmp_path, work, ("skerry", str(tmp_path / "compose.yaml")))
    assert log.status == "success", log.error
    assert log.samples is not None
    assert log.samples[0].output.completion == "given42\n"


async def test_a_box_that_is_lost_is_an_error_of_the_sample_and_no_score(tmp_path: Path) -> None:
    """Also where a tool of the model was the first to see it."""

    async def work() -> str:
        kept = sandbox().as_type(SkerrySandboxEnvironment).sandbox
        await kept.connection.provider.destroy(kept.id)
        call = ToolCall(id="1", function="bash", arguments={"command": "echo 42"})
        told, _ = await execute_tools([ChatMessageAssistant(content="", tool_calls=[call])], [bash()])
        return f"42 {told}"

    log = await evaluate(tmp_path, work, "skerry")
    assert log.status == "error", log.samples[0].output.completion
    assert log.samples is not None
    assert log.samples[0].error is not None
    assert "SandboxGone" in log.samples[0].error.traceback
    assert not log.samples[0].scores
    assert await left() == 0


async def test_a_box_that_is_lost_during_a_command_is_an_error_of_the_sample_and_no_score(tmp_path: Path) -> None:
    async def work() -> str:
        kept = sandbox().as_type(SkerrySandboxEnvironment).sandbox
        command = asyncio.ensure_future(sandbox().exec(["sh", "-c", "touch begun; sleep 60"]))
        await sandbox().exec(["sh", "-c", "until [ -e begun ]; do sleep 0.02; done"], timeout=30)
        await kept.connection.provider.destroy(kept.id)
        await command
        return "42"

    log = await evaluate(tmp_path, work, "skerry")
    assert log.status == "error"
    assert log.samples is not None
    assert not log.samples[0].scores
    assert await left() == 0


async def test_a_host_without_room_is_an_error_of_the_sample_and_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise skerry.HostFull("the host has no memory left")

    async def work() -> str:
        return "42"

    monkeypatch.setattr(skerry.AsyncSandboxManager, "create", full)
    log = await evaluate(tmp_path, work, "skerry")
    assert log.status == "error"
    assert log.samples is None or not log.samples[0].scores
    assert "HostFull" in str(log)


async def test_an_interrupted_sample_leaves_nothing(box: SkerrySandboxEnvironment) -> None:
    kind = SkerrySandboxEnvironment
    before = await left()
    environments = await kind.sample_init("use", None, {})
    ending = asyncio.ensure_future(kind.sample_cleanup("use", None, environments, interrupted=True))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert await left() == before


async def test_what_a_killed_evaluation_left_is_ended_by_the_command_line(box: SkerrySandboxEnvironment) -> None:
    kind = SkerrySandboxEnvironment
    async with skerry.AsyncSandboxManager() as manager:
        other = await manager.create()
        environments = await kind.sample_init("use", None, {})
        ours = environments["default"].as_type(kind).sandbox
        await kind.cli_cleanup(ours.id)
        assert not await manager.exists(ours.id)
        lost = (await kind.sample_init("use", None, {}))["default"].as_type(kind).sandbox
        await kind.cli_cleanup(None)
        assert not await manager.exists(lost.id)
        assert await manager.exists(other.id)  # no evaluation's
        await manager.destroy(other.id)


async def test_a_person_gets_in_by_the_command_of_its_connection(box: SkerrySandboxEnvironment) -> None:
    connection = await box.connection(user="1000")
    assert connection.command == f"skerry exec -it --user 1000 {box.sandbox.id}"
    await box.sandbox.connection.provider.destroy(box.sandbox.id)
    with pytest.raises(ConnectionError):
        await box.connection()
    for attempt in (box.exec(["true"]), box.read_file("x"), box.write_file("x", "x")):
        with pytest.raises(skerry.SandboxGone):
            await attempt


async def test_a_remote_process_is_talked_with_as_it_speaks(box: SkerrySandboxEnvironment) -> None:
    process = await box.exec_remote(["cat"], ExecRemoteStreamingOptions(input="ünï ", stdin_open=True))
    assert process.pid > 0
    events = aiter(process)
    assert await anext(events) == ExecStdout("ünï ")
    await process.write_stdin("more")
    assert await anext(events) == ExecStdout("more")
    await process.close_stdin()
    assert await anext(events) == ExecCompleted(0)
    done = await box.exec_remote(["sh", "-c", "cat; exit 3"], ExecRemoteStreamingOptions(input="all"), stream=False)
    assert (done.returncode, done.stdout) == (3, "all")


async def test_a_remote_process_need_not_read_its_input(box: SkerrySandboxEnvironment) -> None:
    for size in (1, 100_000, 3 << 20):
        process = await box.exec_remote(["true"], ExecRemoteStreamingOptions(input="x" * size))
        assert [event async for event in process] == [ExecCompleted(0)]


async def test_a_remote_process_takes_more_input_than_any_pipe_holds(box: SkerrySandboxEnvironment) -> None:
    process = await box.exec_remote(["cat"], ExecRemoteStreamingOptions(input="x" * (12 << 20)))
    count = 0
    async for event in process:
        count += len(event.data) if isinstance(event, ExecStdout) else 0
    assert count == 12 << 20


async def test_a_remote_process_that_nobody_reads_lives_until_it_is_killed(box: SkerrySandboxEnvironment) -> None:
    noisy = "i=0; while [ $i -lt 300 ]; do head -c 20000 /dev/zero; i=$((i+1)); done; touch spoken; sleep 1000"
    process = await box.exec_remote(["sh", "-c", noisy])
    wait = "until [ -e spoken ]; do sleep 0.05; done"
    assert (await box.exec(["sh", "-c", wait], timeout=30)).success
    await process.kill()
    await process.kill()
    assert [event async for event in process if isinstance(event, ExecCompleted)] == []
    alive = "for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; echo; done | grep -c '^sleep 1000'"
    assert (await box.exec(["sh", "-c", alive])).stdout == "0\n"


async def test_output_beyond_the_limit_is_told_with_its_beginning_and_its_end(box: SkerrySandboxEnvironment) -> None:
    script = "echo begin; head -c {size} /dev/zero | tr '\\0' x; echo end"
    within = await box.exec(["sh", "-c", script.format(size=OUTPUT_LIMIT - 10)])
    assert len(within.stdout) == OUTPUT_LIMIT
    with pytest.raises(OutputLimitExceededError) as raised:
        await box.exec(["sh", "-c", script.format(size=OUTPUT_LIMIT * 2)])
    kept = raised.value.truncated_output or ""
    assert kept.startswith("begin\n")
    assert kept.endswith("xend\n")


async def test_a_timeout_tells_what_was_said_until_then(box: SkerrySandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as raised:
        await box.exec(["sh", "-c", "echo so far; sleep 1000"], timeout=1)
    assert raised.value.truncated_output == "so far\n"  # type: ignore[attr-defined]


async def test_what_is_no_file_is_an_error_for_the_model(box: SkerrySandboxEnvironment) -> None:
    await box.write_file("file", "x")
    for attempt, error in (
        (box.read_file("file/below"), FileNotFoundError),
        (box.write_file("file/below", "x"), PermissionError),
        (box.read_file("/dev/null"), PermissionError),
    ):
        with pytest.raises(error):
            await attempt
    assert not (await box.exec(["printf", "%s", "x" * (4 << 20)])).success
