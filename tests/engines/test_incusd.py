"""The Incus of the tests runs, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from escape.host import control_groups

from . import leftovers
from .incusd import IMAGE, Incusd, running_incus

_NAME = "skerry-00000000-0000-4000-8000-000000000000"


def launch(daemon: Incusd, name: str = _NAME) -> int:
    source = {"type": "image", "alias": IMAGE}
    nic = {"type": "nic", "network": daemon.bridge}
    daemon.ask("POST", "/1.0/instances", {"name": name, "source": source, "devices": {"eth0": nic}, "start": True})
    pid: int = daemon.ask("GET", f"/1.0/instances/{name}/state")["pid"]
    return pid


@pytest.mark.usefixtures("incus_daemon")
def test_a_stopped_incus_leaves_nothing() -> None:
    with running_incus() as daemon:
        folder, bridge = daemon.folder, daemon.bridge
        pid = launch(daemon)
        daemon.kill()
        daemon.start()
        assert daemon.ask("GET", f"/1.0/instances/{_NAME}/state")["pid"] == pid
    expect_nothing(folder, bridge)


@pytest.mark.usefixtures("incus_daemon")
def test_what_a_killed_incus_left_is_cleared() -> None:
    with running_incus() as daemon:
        folder, bridge = daemon.folder, daemon.bridge
        launch(daemon)
        daemon.kill()
    expect_nothing(folder, bridge)


def expect_nothing(folder: Path, bridge: str) -> None:
    assert leftovers.processes(folder) == []
    assert leftovers.mounts(folder) == []
    assert not folder.exists()
    assert not Path("/sys/class/net", bridge).exists()
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True, timeout=10).stdout
    assert bridge not in rules
    assert control_groups(_NAME) == []
