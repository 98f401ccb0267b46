"""The Incus cluster of the tests runs, and leaves nothing behind, whatever becomes of those who started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from escape.host import control_groups

from . import leftovers
from .daemons import _sweep
from .incus_cluster import Cluster, running_cluster
from .incus_leftovers import bridge_of, switch_of
from .incusd import IMAGE

_NAME = "skerry-00000000-0000-4000-9000-00000000000"
_RUN = """
import signal
from engines.incus_cluster import running_cluster
with running_cluster() as cluster:
    print(*(each.folder for each in cluster.members.values()), flush=True)
    signal.pause()
"""


@pytest.mark.usefixtures("incus_cluster")
def test_a_stopped_cluster_leaves_nothing() -> None:
    with running_cluster() as cluster:
        folders = [each.folder for each in cluster.members.values()]
        for number, member in enumerate(cluster.members):
            launch(cluster, f"{_NAME}{number}", member)
        cluster.kill("n2")
        cluster.cut_off("n3")
    expect_nothing(folders)


@pytest.mark.usefixtures("incus_cluster")
def test_what_a_killed_run_left_is_cleared_by_the_next() -> None:
    argv = [sys.executable, "-c", _RUN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as run:
        assert run.stdout is not None
        folders = [Path(word) for word in run.stdout.readline().split()]
        run.kill()
    assert len(folders) == 3
    assert any(leftovers.processes(folder) for folder in folders)
    _sweep()
    expect_nothing(folders)


def launch(cluster: Cluster, name: str, member: str) -> None:
    source = {"type": "image", "alias": IMAGE}
    cluster.ask("POST", f"/1.0/instances?target={member}", {"name": name, "source": source, "start": True})


def expect_nothing(folders: list[Path]) -> None:
    for folder in folders:
        assert leftovers.processes(folder) == []
        assert leftovers.mounts(folder) == []
        assert not folder.exists()
        assert not Path("/sys/class/net", bridge_of(folder)).exists()
        assert not Path("/run/netns", bridge_of(folder)).exists()
        assert not Path("/run/netns", switch_of(folder)).exists()
    assert control_groups(_NAME) == []
