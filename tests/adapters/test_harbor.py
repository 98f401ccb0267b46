"""Tasks of Harbor in real boxes, in an environment that has Harbor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engines.daemons import Daemon

from . import frameworks

pytestmark = pytest.mark.timeout(300)

ADDRESS = f"127.77.{os.getpid() % 250 + 1}.1"
"""Of the loopback, and no other test's."""


def run(folder: Path, *, sandbox: dict[str, object] | None = None, **env: str) -> dict[str, str]:
    """What failed or was skipped, and why."""
    frameworks.required("harbor")
    config = folder / "suite.toml"
    config.write_text(f'[network.hosts]\n"web.test" = "{ADDRESS}"\n"other.test" = "{ADDRESS}"\n')
    own = {"SUITE_SANDBOX": json.dumps(sandbox or {}), "SUITE_ADDRESS": ADDRESS, "SKERRY_CONFIG": str(config)}
    env = {**own, "HOME": str(folder / "home"), **env}
    outcome = frameworks.suite("harbor", "harbor_use.py", env=env, cwd=frameworks.SUITES, timeout_s=240)
    assert outcome
    return {test.rpartition("::")[2]: why for test, why in outcome.items() if why != "passed"}


def test_the_oracle_and_all_that_tasks_need_work_without_images(folder: Path) -> None:
    failed = run(folder)
    assert {test: why for test, why in failed.items() if why != "skipped"} == {}


@pytest.mark.whole
def test_the_oracle_and_all_that_tasks_need_work_on_docker(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    sandbox = {"image": docker_images["debian"], "provider": "docker", "build_network": "none"}
    assert run(folder, sandbox=sandbox, SKERRY_PROVIDERS__DOCKER__HOST=docker_daemon.address) == {}
