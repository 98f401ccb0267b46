"""Many boxes at once from a process that has found out nothing of its host yet: each is in its groups, and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.api import ask_json
from engines.daemons import Daemon
from engines.incusd import Incusd
from providers.local.forks import PLACE
from providers.test_local import PACKAGES, as_plain_user, interpreter_for_all

from skerry.host import cgroup
from skerry.vm import launch
from skerry.vm.folder import VmFolder

from .outside import LIMITS, at_work_in, group_of, groups_named, processes_of

pytestmark = pytest.mark.timeout(300)
_CREATES = str(Path(__file__).with_name("creates.py"))
_PERIOD_US = 100_000
CONTROLLERS = {"memory": "memory", "pids": "pids", "cpus": "cpu"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees from outside what bounds a process")


class Storm:
    """Boxes that were made at once, and how the processes of each are found without asking who made them."""

    def __init__(self, told: dict[str, Any], pid: int, processes: Callable[[str], set[int]]) -> None:
        self.failed: list[str] = told["failed"]
        self.enforced: dict[str, Any] = {box["id"]: box["enforced"] for box in told["boxes"]}
        self.pid = pid
        self._processes = processes

    def outside(self, most: dict[str, float]) -> list[str]:
        """Processes of boxes that a group allows more than that, or that are in none."""
        found = []
        for id in self.enforced:
            pids = self._processes(id)
            found += [] if pids else [f"{id}: no process is found"]
            for pid in pids:
                for controller, wanted in most.items():
                    group = group_of(pid, controller)
                    if group.most > wanted:
                        found.append(f"{id}: {controller} of process {pid} is {group.most}, in {group.path}")
        return found


@contextmanager
def storm(
    task: dict[str, Any],
    processes: Callable[[str], set[int]] = processes_of,
    *,
    command: tuple[str, ...] = (),
    **env: str,
) -> Iterator[Storm]:
    """Make them, and see after that no control group is left: neither a box's own, nor one that was made to try."""
    argv = [*(command or (sys.executable,)), _CREATES, json.dumps({"count": 8, **task})]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES, "HOME": "/nonexistent", **env}
    with subprocess.Popen(argv, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        made = Storm(
            json.loads(maker.stdout.readline() or '{"failed": ["no answer"], "boxes": []}'), maker.pid, processes
        )
        seen = {
            str(group_of(pid, each).path)
            for id in made.enforced
            for pid in processes(id)
            for each in ("memory", "pids")
        }
        try:
            yield made
        finally:
            maker.stdin.close()
            maker.wait()
    left = groups_named([*made.enforced, f"skerry-try-{made.pid}-"])
    assert left | {path for path in seen if "skerry" in path and os.path.exists(path)} == set()


def told_of(storm: Storm, field: str) -> set[bool]:
    return {bool(enforced[field]["by"]) for enforced in storm.enforced.values()}


def check(storm: Storm, most: dict[str, float], count: int = 8) -> None:
    assert storm.failed == []
    assert len(storm.enforced) == count
    assert storm.outside(most) == []
    assert {field: told_of(storm, field) for field in CONTROLLERS} == {field: {True} for field in CONTROLLERS}


MOST = {"memory": LIMITS["memory"], "pids": LIMITS["pids"], "cpu": _PERIOD_US / 2}


@needs_root
@pytest.mark.parametrize("round", range(2))
def test_local_boxes_of_root(local: dict[str, Any], round: int) -> None:
    if why_not := cgroup.find().why_not:
        pytest.skip(f"this host lets us make no cgroups: {why_not}")
    with storm({"provider": "local", "settings": local}) as boxes:
        check(boxes, MOST)


@contextmanager
def delegated(uid: int) -> Iterator[list[Path]]:
    """A group of each hierarchy that a plain user may make groups in."""
    groups = []
    try:
        for parent in set(cgroup.find().parents.values()):
            group = parent.path / f"skerry-delegated-{os.getpid()}"
            group.mkdir()
            groups.append(group)
            for path in (group, *group.glob("cgroup.*"), *group.glob("tasks")):
                os.chown(path, uid, uid)
        yield groups
    finally:
        for pid in cgroup.members(groups):  # a zygote is where whoever started it was, for a minute
            if PLACE in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        cgroup.remove(groups, 5)


@pytest.fixture
def plain(local: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The command of a Python that a plain user may run."""
    if os.geteuid() != 0:
        pytest.skip("not root, who alone sees from outside what bounds a process")
    if (python := interpreter_for_all()) is None:
        pytest.skip("no Python of this version that a plain user may start, or a checkout that only root may read")
    for name in ("state", "cache"):
        (folder / name).mkdir(exist_ok=True)
        for path in (folder / name, *(folder / name).rglob("*")):
            os.chown(path, 61_234, 61_234)
    return (*as_plain_user(), python)


def test_local_boxes_of_a_plain_user_where_groups_are_delegated(local: dict[str, Any], plain: tuple[str, ...]) -> None:
    found = cgroup.find()
    if found.why_not:
        pytest.skip(f"this host lets us make no cgroups: {found.why_not}")
    if any(parent.version == 2 for parent in found.parents.values()):
        pytest.skip("on cgroup v2 a plain user's groups come from systemd")
    with delegated(61_234) as groups:
        join = "; ".join(f"echo 0 > {group}/cgroup.procs" for group in groups)
        command = ("/bin/sh", "-c", f'{join}; exec "$@"', "sh", *plain)
        with storm({"provider": "local", "settings": local}, command=command) as boxes:
            check(boxes, MOST)


def test_local_boxes_of_a_plain_user_without_groups_claim_none(local: dict[str, Any], plain: tuple[str, ...]) -> None:
    with storm({"provider": "local", "settings": local}, command=plain) as boxes:
        assert boxes.failed == []
        for id, enforced in boxes.enforced.items():
            held = {field for field in ("memory", "cpus") if enforced[field]["by"]}
            groups = {field: group_of(pid, field) for field in held & {"memory"} for pid in processes_of(id)}
            assert all(str(group.path) != "/none" for group in groups.values())
            if enforced["pids"]["by"].startswith("RLIMIT_NPROC"):
                limits = [Path(f"/proc/{pid}/limits").read_text() for pid in processes_of(id)]
                assert limits
                assert all(f"Max processes             {LIMITS['pids']} " in each for each in limits)


@pytest.mark.parametrize("runtime", [None, "runsc"], ids=["runc", "gvisor"])
def test_docker(
    docker_daemon: Daemon,
    docker_images: dict[str, str],
    folder: Path,
    runtime: str | None,
    request: pytest.FixtureRequest,
) -> None:
    if runtime is not None:
        request.getfixturevalue("gvisor")
    _engine("docker", docker_daemon, docker_images, folder, {} if runtime is None else {"runtime": runtime})


def test_podman(podman_daemon: Daemon, podman_images: dict[str, str], folder: Path) -> None:
    _engine("podman", podman_daemon, podman_images, folder, {})


def _engine(name: str, daemon: Daemon, images: dict[str, str], folder: Path, more: dict[str, str]) -> None:
    def first_process(id: str) -> set[int]:
        return {ask_json(daemon.address, "GET", f"/containers/skerry-{id}/json")["State"]["Pid"]}

    settings = {
        "host": daemon.address,
        "state_dir": str(folder / "state"),
        "cache_dir": str(folder / "cache"),
        **LIMITS,
    }
    spec = {"image": images["busybox"], "data": False, **more}
    # gVisor's own kernel counts the processes; the host's group has room for its own tasks too
    most = MOST | ({"pids": 4 * LIMITS["pids"] + 128} if more else {})
    with storm({"provider": name, "settings": settings, "spec": spec, "count": 4}, first_process) as boxes:
        check(boxes, most, 4)


def test_incus(incus_daemon: Incusd, incus_image: str, folder: Path) -> None:
    settings = {"host": incus_daemon.address, "cache_dir": str(folder / "cache"), **LIMITS}
    spec = {"image": incus_image, "data": False}
    with storm({"provider": "incus", "settings": settings, "spec": spec, "count": 4}) as boxes:
        check(boxes, MOST, 4)


@needs_root
def test_qemu(vm_cache: Path, vm_image: str, folder: Path) -> None:
    settings = {
        "state_dir": str(folder / "state"),
        "cache_dir": str(vm_cache.parent),
        "start_timeout_s": 120.0,
        **LIMITS,
    }
    names = []

    def machine(id: str) -> set[int]:
        names.append(launch._group_name(VmFolder(folder / "state" / id / "vm")))
        return at_work_in(str(folder / "state" / id))

    # The whole of a machine: its memory, what the hypervisor needs beside it, one processor.
    most = {"memory": float(1 << 30), "pids": 512.0, "cpu": float(_PERIOD_US)}
    with storm({"provider": "qemu", "settings": settings, "spec": {"data": False}, "count": 4}, machine) as boxes:
        check(boxes, most, 4)
    assert groups_named(names) == set()
