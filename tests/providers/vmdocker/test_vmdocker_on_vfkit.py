"""Projects in machines of vfkit: all but macOS and Apple's framework, whose part QEMU has here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from providers.vmdocker import on_a_mac
from vm.vfkit import like_a_mac, stand_in

from skerry.vm.vfkit.folder import find_all

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("vmdocker-vfkit")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for vfkit; no machine is left in it."""
    with tempfile.TemporaryDirectory(prefix="vfkit-", dir="/tmp") as path:
        yield Path(path)
        left = [pid for vm in Path(path).glob("*/vm") for pid in find_all(vm)]
        for pid in left:
            os.kill(pid, 9)
        assert left == []


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A `vfkit` that runs the stand-in."""
    program = tmp_path / "bin" / "vfkit"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport runpy\nrunpy.run_path({stand_in.__file__!r}, run_name='__main__')\n"
    )
    program.chmod(0o755)
    return program


def as_on_a_mac(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script where nothing of Linux's is to be found."""
    argv = [sys.executable, like_a_mac.__file__, script, *arguments]
    told = {**os.environ, "SKERRY_CONFIG": os.devnull, **env}
    return subprocess.run(argv, env=told, capture_output=True, text=True, timeout=800)


def test_the_doctor_of_a_mac_tells_what_to_install(folder: Path) -> None:
    script = folder / "skerry.py"
    script.write_text("from skerry.cli import main\nmain()\n")
    done = as_on_a_mac(str(script), "doctor", "--json", SKERRY_STATE_DIR=str(folder))
    (found,) = (each for each in json.loads(done.stdout)["providers"] if each["name"] == "vmdocker")
    assert (found["reason"], found["fix"]) == ("vfkit is not installed", "brew install vfkit")


def test_a_project_lives_in_a_machine_of_vfkit_with_the_interpreter_of_its_image(
    vm_cache: Path, docker_vm_image: str, folder: Path, program: Path, root: Path
) -> None:
    settings = {
        "state_dir": str(folder),
        "cache_dir": str(vm_cache.parent),
        "idle_s": 3,
        "ready_timeout_s": 300,
        "start_timeout_s": 180,
        "timeout_s": 120,
        "vm_cpus": 1,
    }
    path = f"{program.parent}:{os.environ['PATH']}"
    done = as_on_a_mac(on_a_mac.__file__, json.dumps(settings), str(root), PATH=path)
    assert done.returncode == 0, done.stderr[-8000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("kernel") != os.uname().release
    assert seen.pop("python") == "3 13"
    assert seen == {
        "hypervisor": "vfkit 0.6.1, hvf",
        "state": "stopped",
        "kept": "x",
        "went": True,
        "left": [],
    }
