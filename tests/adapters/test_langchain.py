"""A sandbox of deepagents: LangChain's own suite, and what that does not ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines.daemons import Daemon

from . import frameworks

pytestmark = pytest.mark.timeout(300)

ALL = 86
MORE = 7
_ASYNC = ("-o", "asyncio_mode=auto")
OVERTAKEN = {
    "test_write_existing_file_fails",
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_with_directories",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_question_mark",
}
"""What the newest suite wants of the newest deepagents and its own `BaseSandbox` does not do, whoever's sandbox it is:
paths of `glob` are absolute since 0.7.5 (so that rules of permission match), folders are none of them, and `write`
overwrites since 0.7.0. See https://github.com/langchain-ai/langchain/issues/39948."""


def run(name: str, suite: str = "langchain_suite.py", **env: str) -> dict[str, str]:
    frameworks.required(name)
    return frameworks.suite(name, suite, env=env, cwd=frameworks.SUITES, timeout_s=240, options=_ASYNC)


def failed(outcome: dict[str, str]) -> dict[str, str]:
    return {test.rpartition("::")[2]: why for test, why in outcome.items() if why != "passed"}


@pytest.mark.whole
def test_the_whole_standard_suite_passes(folder: Path) -> None:
    outcome = run("langchain-0.6")
    assert failed(outcome) == {}
    assert len(outcome) == ALL


def test_of_the_newest_deepagents_all_pass_that_it_has_not_overtaken(folder: Path) -> None:
    outcome = run("langchain")
    assert set(failed(outcome)) == OVERTAKEN, failed(outcome)
    assert len(outcome) == ALL


@pytest.mark.whole
def test_the_whole_standard_suite_passes_on_docker(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    docker = {"SKERRY_PROVIDER": "docker", "SKERRY_PROVIDERS__DOCKER__HOST": docker_daemon.address}
    options = json.dumps({"image": docker_images["debian"], "writable_root": True})
    outcome = run("langchain-0.6", SUITE_SANDBOX=options, **docker)
    assert failed(outcome) == {}
    assert len(outcome) == ALL


def test_commands_and_errors_are_what_an_agent_and_its_caller_need(folder: Path) -> None:
    outcome = run("langchain", "langchain_more.py")
    assert failed(outcome) == {}
    assert len(outcome) == MORE


@pytest.mark.whole
def test_the_adapter_fits_the_types_of_the_framework() -> None:
    frameworks.required("langchain")
    assert frameworks.type_errors("langchain", "langchain.py") == ""
