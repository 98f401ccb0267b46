"""An executor of smolagents: those of its own tests that each remote executor has to pass, and what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines.daemons import Daemon

from . import frameworks

pytestmark = pytest.mark.timeout(400)

NAME = "smolagents"
THEIRS, OURS = 10, 6


def run(options: dict[str, Any], **env: str) -> dict[str, str]:
    frameworks.required(NAME)
    (packages,) = frameworks.required("smolagents-box").glob("lib/python*/site-packages")
    whole = {"mounts": [f"{packages}:/mnt/packages:ro"], "env": {"PYTHONPATH": "/mnt/packages"}, **options}
    sources = frameworks.sources_of(NAME)
    suite = frameworks.SUITES / "smolagents_suite.py"
    env = {"PYTHONPATH": str(sources), "SUITE_SANDBOX": json.dumps(whole), **env}
    return frameworks.suite(NAME, suite, env=env, cwd=frameworks.SUITES, timeout_s=300)


def test_their_tests_of_remote_executors_pass(folder: Path) -> None:
    outcome = run({})
    assert {test: why for test, why in outcome.items() if why != "passed"} == {}
    assert len(outcome) == THEIRS + OURS


@pytest.mark.whole
def test_their_tests_of_remote_executors_pass_on_docker(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    docker = {"SKERRY_PROVIDER": "docker", "SKERRY_PROVIDERS__DOCKER__HOST": docker_daemon.address}
    outcome = run({"image": docker_images["debian"]}, **docker)
    assert {test: why for test, why in outcome.items() if why != "passed"} == {}
    assert len(outcome) == THEIRS + OURS
