"""Tasks of Harbor, run by Harbor itself with its oracle agent, in the environment of Harbor. SUITE_SANDBOX has the
keywords of the environment as JSON; where they name an image, tasks are made of that."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, SandboxBuildFailedError
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.config import AgentConfig, TaskConfig, TrialConfig
from harbor.models.trial.config import EnvironmentConfig as TrialEnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

import skerry
from skerry.adapters.harbor import SkerryEnvironment
from skerry.adapters.opened import open_manager

pytestmark = pytest.mark.anyio

KEYWORDS = json.loads(os.environ.get("SUITE_SANDBOX", "{}"))
IMAGE = KEYWORDS.pop("image", None)
with_image = pytest.mark.skipif(IMAGE is None, reason="boxes of this provider are not made of images")
TASK = """
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60.0
[environment]
network_mode = "no-network"
workdir = "/app"
memory_mb = 256
cpus = 1
"""
SOLVE = "#!/bin/sh\necho 42 > answer.txt\n"
TEST = """#!/bin/sh
if [ "$(cat /app/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
WEB, OTHER = "web.test", "other.test"
FETCH = """import sys, urllib.request
try:
    print(urllib.request.urlopen(f"http://{sys.argv[1]}/", timeout=10).read().decode())
except OSError as error:
    print("refused")
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    files = {
        "task.toml": TASK,
        "instruction.md": "Write the answer to answer.txt",
        "solution/solve.sh": SOLVE,
        "tests/test.sh": TEST,
    }
    if IMAGE is not None:
        files["environment/Dockerfile"] = f"FROM {IMAGE}\nWORKDIR /app\nCOPY given.txt /given.txt\n"
        files["environment/given.txt"] = "given"
    for name, text in files.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "task/environment").mkdir(exist_ok=True)
    return tmp_path / "task"


async def left() -> int:
    async with open_manager() as manager:
        return await manager.count()


async def run(task: Path, agent: AgentConfig | None = None) -> TrialResult:
    environment = TrialEnvironmentConfig(import_path="skerry.adapters.harbor:SkerryEnvironment", kwargs=KEYWORDS)
    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=agent or AgentConfig(name="oracle"),
        environment=environment,
    )
    return await (await Trial.create(config)).run()


def rewards(result: TrialResult) -> dict[str, float] | None:
    return None if result.verifier_result is None else result.verifier_result.rewards


async def test_the_oracle_solves_a_task(task: Path) -> None:
    result = await run(task)
    assert result.exception_info is None, result.exception_info
    assert rewards(result) == {"reward": 1}
    assert await left() == 0


async def test_an_answer_that_is_wrong_is_a_result(task: Path) -> None:
    (task / "solution/solve.sh").write_text("#!/bin/sh\necho 41 > answer.txt\n")
    result = await run(task)
    assert result.exception_info is None, result.exception_info
    assert rewards(result) == {"reward": 0}


class LosingAgent(BaseAgent):
    """Its box is taken away while it works."""

    @staticmethod
    def name() -> str:
        return "losing"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        assert isinstance(environment, SkerryEnvironment)
        lost = environment._member(None)
        await lost.connection.provider.destroy(lost.id)
        await environment.exec("echo 42 > answer.txt")


async def test_a_box_that_is_lost_is_an_exception_of_the_trial_and_no_reward(task: Path) -> None:
    result = await run(task, AgentConfig(import_path="harbor_use:LosingAgent"))
    assert result.exception_info is not None
    assert result.exception_info.exception_type == "SandboxGone"
    assert rewards(result) is None
    assert await left() == 0


async def test_a_box_that_is_lost_while_its_tests_run_is_an_exception_and_no_reward(task: Path) -> None:
    (task / "tests/test.sh").write_text("#!/bin/sh\ntouch /app/begun; sleep 60\n")
    (task / "solution/solve.sh").write_text("#!/bin/sh\ntrue\n")
    trial = asyncio.ensure_future(run(task))
    async with open_manager() as manager:
        while not trial.done():
            for each in await manager.list():
                with suppress(skerry.SkerryError):
                    box = await manager.get(each.id)
                    if await box.files.exists("/app/begun"):
                        await box.connection.provider.destroy(each.id)
            await asyncio.sleep(0.1)
    result = await trial
    assert result.exception_info is not None
    assert rewards(result) is None


Make = Callable[..., Awaitable[SkerryEnvironment]]


@pytest.fixture
async def make(task: Path) -> AsyncIterator[Make]:
    made: list[SkerryEnvironment] = []

    async def make(policy: NetworkPolicy | None = None, **more: Any) -> SkerryEnvironment:
        environment = SkerryEnvironment(
            environment_dir=task / "environment",
            environment_name="task",
            session_id="task__1__env",
            trial_paths=TrialPaths(trial_dir=task.parent / "trial"),
            task_env_config=EnvironmentConfig(memory_mb=256, cpus=1, workdir="/app"),
            network_policy=policy or NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
            **{**KEYWORDS, **more},
        )
        made.append(environment)
        await environment.start(force_build=False)
        return environment

    yield make
    for each in made:
        await each.stop(delete=True)
        await each.stop(delete=True)
    assert await left() == 0


async def test_commands_have_their_folder_variables_user_and_time(make: Make) -> None:
    box = await make(persistent_env={"KEPT": "always"})
    assert (await box.exec("pwd")).stdout == "/app\n"
    assert (await box.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
    assert (await box.exec("echo $KEPT $MORE", env={"MORE": "now"})).stdout == "always now\n"
    assert (await box.exec("exit 7")).return_code == 7
    slow = await box.exec("echo so far; sleep 1000", timeout_sec=1)
    assert (slow.return_code, slow.stdout) == (124, "so far\n")
    assert "longer than 1 seconds" in (slow.stderr or "")
    assert (await box.exec("id -u", user="root")).return_code == 0
    assert (await box.exec("id", user="nobody-here")).return_code != 0
    assert (await box.exec("true", cwd="/nowhere")).return_code != 0


async def test_what_no_kernel_runs_is_a_result(make: Make) -> None:
    box = await make()
    for command in ("true " + "x" * (4 << 20), "true " + "x" * (20 << 20)):
        assert (await box.exec(command)).return_code == 126


async def test_a_task_has_the_limits_it_asks_for(make: Make) -> None:
    spec = (await make())._member(None).spec
    assert (spec.memory, spec.cpus) == (256 << 20, 1)


async def test_files_and_folders_go_in_and_come_out(make: Make, tmp_path: Path) -> None:
    box = await make()
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below/script.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "below/script.sh").chmod(0o755)
    await box.upload_dir(source, "/tests")
    assert (await box.exec("/tests/below/script.sh")).stdout == "ran\n"
    await box.upload_file(source / "below/script.sh", "/app/one.sh")
    await box.upload_file(source / "below/script.sh", "/app")
    assert (await box.exec("cat one.sh script.sh | grep -c ran")).stdout == "2\n"
    await box.download_dir("/tests", tmp_path / "out/tests")
    assert (tmp_path / "out/tests/below/script.sh").read_text() == "#!/bin/sh\necho ran\n"
    await box.download_file("/app/one.sh", tmp_path / "out/new/one.sh")
    assert (tmp_path / "out/new/one.sh").read_text() == "#!/bin/sh\necho ran\n"
    assert await box.is_dir("/tests/below")
    assert await box.is_file("/app/one.sh")
    await box.download_dir_with_exclusions(source_dir="/tests", target_dir=tmp_path / "some", exclude=["*.sh"])
    assert [each.name for each in (tmp_path / "some").rglob("*")] == ["below"]


@pytest.fixture
async def site() -> AsyncIterator[None]:
    """A web server on the loopback, where the settings say that `web.test` and `other.test` are."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, os.environ["SUITE_ADDRESS"], 80)
    except PermissionError:
        pytest.skip("no root here, who alone listens on port 80")
    async with server:
        yield


async def test_rules_of_the_network_change_between_phases(make: Make, site: None) -> None:
    def only(*hosts: str) -> NetworkPolicy:
        return NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=list(hosts))

    nothing = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
    box = await make(only(WEB), phase_network_policies=[nothing, only(OTHER)])
    await box.upload_file(_written(box, FETCH), "/app/fetch.py")

    async def reached() -> list[str]:
        done = await box.exec(f"for each in {WEB} {OTHER}; do python3 fetch.py $each; done", timeout_sec=40)
        return (done.stdout or "").split()

    assert await reached() == ["hello", "refused"]
    await box.set_network_policy(nothing)
    assert await reached() == ["refused", "refused"]
    await box.set_network_policy(only(OTHER))
    assert await reached() == ["refused", "hello"]


def _written(box: SkerryEnvironment, text: str) -> Path:
    path = box.environment_dir.parent / "written"
    path.write_text(text)
    return path


async def test_a_public_phase_after_rules_is_refused_or_has_the_rules_that_stand_for_it(make: Make) -> None:
    nothing, public = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK), NetworkPolicy()
    with pytest.raises(ValueError, match="bridge"):
        await make(nothing, phase_network_policies=[public])
    box = await make(nothing, phase_network_policies=[public], public="python")
    await box.set_network_policy(public)
    assert (await box._member(None).network.show()).allow == ("python",)


async def test_a_dockerfile_that_cannot_be_built_leaves_nothing(make: Make, task: Path) -> None:
    """Nor is one passed over where boxes are not made of images, unless that was said."""
    (task / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nRUN no-such-program\n")
    with pytest.raises(ValueError if IMAGE is None else SandboxBuildFailedError, match=r"image|skerry-harbor"):
        await make()
    if IMAGE is None:
        assert (await (await make(dockerfile=False)).exec("true")).return_code == 0
        return
    assert await left() == 0


@with_image
async def test_an_image_is_built_once_and_has_what_the_task_copies_into_it(make: Make) -> None:
    assert (await (await make()).exec("cat /given.txt")).stdout == "given"
    box = await make()
    assert box._manager is not None
    names = [name for image in await box._manager.images(provider=box._provider) for name in image.names]
    assert len([name for name in names if name.startswith("skerry-harbor:")]) >= 1


COMPOSE = """
services:
  main:
    depends_on: [db]
    environment:
      SHELL_PATH: $$PATH
      GIVEN: ${GIVEN_BY_TASK:-by default}
    expose: [8000]
  db:
    image: ${IMAGE_OF_DB}
    command: sleep infinity
    environment: {WHO: the database}
"""


@with_image
async def test_services_of_a_compose_file_are_reached_by_their_names(make: Make, task: Path, tmp_path: Path) -> None:
    (task / "environment/docker-compose.yaml").write_text(COMPOSE)
    box = await make(persistent_env={"IMAGE_OF_DB": IMAGE})
    main = (await box.exec("env; cat /given.txt")).stdout or ""
    assert "SHELL_PATH=$PATH" in main
    assert "GIVEN=by default" in main
    assert main.endswith("given")
    told = await box.service_exec("echo $WHO > /told; cat /told", service="db")
    assert told.stdout == "the database\n"
    await box.service_download_file("/told", tmp_path / "told", service="db")
    assert (tmp_path / "told").read_text() == "the database\n"
    with pytest.raises(RuntimeError, match="no service 'cache'"):
        await box.service_exec("true", service="cache")
    await box.stop_service("main")
    with pytest.raises(skerry.SkerryError):
        await box.exec("true")
    assert (await box.service_exec("cat /told", service="db")).stdout == "the database\n"
