"""Inspect AI's own check of sandbox environments, on real boxes, in an environment that has Inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines.daemons import Daemon

from . import frameworks

pytestmark = pytest.mark.timeout(300)

ALL = 44
ONE_USER = {"test_exec_as_user"}
"""What a box cannot do that runs everything as one user, as those of `local` do; nor can Inspect's own."""


def run(
    suite: str = "inspect_suite.py", *, timeout_s: float = 240, sandbox: dict[str, object] | None = None, **env: str
) -> dict[str, str]:
    frameworks.required("inspect")
    env |= {"SUITE_SANDBOX": json.dumps(sandbox or {})}
    return frameworks.suite("inspect", suite, env=env, cwd=frameworks.SUITES, timeout_s=timeout_s)


def failed(outcome: dict[str, str]) -> dict[str, str]:
    return {test.rpartition("::")[2]: why for test, why in outcome.items() if why != "passed"}


def test_evaluations_run_in_sandboxes_and_what_is_lost_is_no_score(folder: Path) -> None:
    assert set(failed(run("inspect_use.py")).values()) <= {"skipped"}


def test_the_whole_self_check_passes_but_for_becoming_another_user(folder: Path) -> None:
    outcome = run()
    assert set(failed(outcome)) == ONE_USER, failed(outcome)
    assert len(outcome) == ALL


@pytest.mark.whole
def test_the_whole_self_check_passes_on_docker(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    docker = {"SKERRY_PROVIDER": "docker", "SKERRY_PROVIDERS__DOCKER__HOST": docker_daemon.address}
    outcome = run(sandbox={"image": docker_images["debian"], "writable_root": True, "admin": True}, **docker)
    assert failed(outcome) == {}
    assert len(outcome) == ALL


@pytest.mark.timeout(900)
@pytest.mark.whole
def test_the_whole_self_check_passes_on_qemu(folder: Path, vm_cache: Path, debian_vm_image: str) -> None:
    qemu = {"SKERRY_PROVIDER": "qemu", "SKERRY_PROVIDERS__QEMU__CACHE_DIR": str(vm_cache.parent)}
    qemu["SKERRY_PROVIDERS__QEMU__START_TIMEOUT_S"] = "120"
    sandbox = {"image": debian_vm_image, "writable_root": True, "memory": "512M"}
    outcome = run(timeout_s=800, sandbox=sandbox, **qemu)
    assert failed(outcome) == {}
    assert len(outcome) == ALL


@pytest.mark.whole
def test_an_image_that_a_compose_file_builds_is_what_samples_have(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    outcome = run(
        "inspect_use.py",
        sandbox={"image": docker_images["debian"]},
        SKERRY_PROVIDERS__DOCKER__HOST=docker_daemon.address,
    )
    assert failed(outcome) == {}


@pytest.mark.timeout(600)
@pytest.mark.whole
@pytest.mark.parametrize("adapter", ["inspect_ai.py", "inspect_process.py"])
def test_types_are_those_of_inspect(adapter: str) -> None:
    frameworks.required("inspect")
    assert frameworks.type_errors("inspect", adapter) == ""
