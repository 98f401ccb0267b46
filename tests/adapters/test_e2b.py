"""One program that is written for E2B, with E2B's SDK as it is, on sandboxes of several providers. The SDK's own tests
are run by `make e2b`."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.daemons import Daemon

from . import frameworks
from .e2b.server import Server

pytestmark = pytest.mark.timeout(300)

SCRIPT = frameworks.ROOT / "examples/e2b_agent.py"
SAID = """\
{"words": 7, "longest": "skerry"}
failed with 1
served with 200
['count.py', 'essay.txt']
running True
running False
"""


def said(settings: str = "") -> str:
    """What the program prints on a server with more settings."""
    frameworks.required("e2b")
    with Server("local", settings=settings) as server:
        return frameworks.run("e2b", SCRIPT, env=server.variables, cwd=SCRIPT.parent, timeout_s=240)


def template(provider: str, image: str) -> str:
    return f'[e2b.templates.base]\nprovider = "{provider}"\nimage = "{image}"\nuser = "app"\n'


def test_a_program_for_e2b_runs_as_it_is_on_local(folder: Path) -> None:
    assert said() == SAID


@pytest.mark.whole
def test_the_same_program_runs_on_docker(folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]) -> None:
    daemon = f'[providers.docker]\nhost = "{docker_daemon.address}"\n'
    assert said(template("docker", docker_images["debian"]) + daemon) == SAID


@pytest.mark.whole
def test_the_same_program_runs_on_qemu(folder: Path, vm_cache: Path, debian_vm_image: str) -> None:
    provider = f'[providers.qemu]\ncache_dir = "{vm_cache.parent}"\nstart_timeout_s = 120\n'
    assert said(template("qemu", debian_vm_image) + provider) == SAID
