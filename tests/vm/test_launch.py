"""Machines whose hypervisor is a small program: how they start, how they end, and what is left when anything dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storm.outside import group_of

from skerry.errors import CreateFailed, ProviderError
from skerry.host import cgroup, processes, scope, spawn, uids
from skerry.host.processes import Process
from skerry.vm import launch
from skerry.vm.base import MachineLimits
from skerry.vm.folder import Vm, VmFolder
from skerry.vm.launch import JailedProcess, Launch

from .standins import IS_ROOT, may_set_floor, run, script, seen_on_host, until, vm_folder

SLEEP = script("sleep 60")
LIMITS = MachineLimits(memory=64 << 20, cpus=0.5, pids=32)
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root gives machines uids and namespaces of their own")


@pytest.fixture
def folder() -> Iterator[VmFolder]:
    with vm_folder() as folder:
        yield folder


def process(found: Process | None) -> Process:
    assert found is not None
    return found


def test_a_hypervisor_runs_in_its_folder_with_nothing_of_ours(
    folder: VmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "very")
    left_open = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(left_open, True)
    try:
        said = run(folder, "pwd; env; cat; ls /proc/self/fd; grep -E '^(NoNewPrivs|CapEff)' /proc/self/status")
    finally:
        os.close(left_open)
    lines = said.split("\n")
    assert lines[0] == str(folder.path)
    assert "SECRET" not in said
    assert [line for line in lines if line.isdigit()] == ["0", "1", "2", "3"]  # the last is the listing's own
    assert "NoNewPrivs:\t1" in lines


def test_it_is_noted_before_it_runs_and_who_runs_it_after(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    assert folder.read() == vm
    assert folder.is_running()
    assert os.getsid(process(vm.warden).pid) != os.getsid(0)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has one size of pages"
)
@pytest.mark.parametrize("small", [False, True])
def test_its_memory_comes_in_small_pages_alone_if_that_is_said(folder: VmFolder, small: bool) -> None:
    vm = launch.start(folder, msgspec.structs.replace(SLEEP, small_pages=small), None)
    status = Path(f"/proc/{process(vm.vmm).pid}/status").read_text()
    assert f"THP_enabled:\t{int(not small)}" in status.splitlines()


def test_a_machine_is_killed_first_when_the_host_runs_out_of_memory(folder: VmFolder) -> None:
    """And not its warden, without which nobody tells how it ended."""
    vm = launch.start(folder, SLEEP, None)
    pids = (process(vm.vmm).pid, process(vm.warden).pid, "self")
    hypervisor, warden, ours = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    assert (hypervisor, warden) == (1000, max(0, ours))


def test_a_machine_cannot_put_others_before_itself_where_the_kernel_keeps_a_floor(folder: VmFolder) -> None:
    said = run(folder, "echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj")
    assert said.splitlines()[-1] == ("1000" if may_set_floor() else "0")


def test_a_warden_may_open_many_files_though_its_manager_may_not(folder: VmFolder) -> None:
    """One stream of a guest takes two; the hypervisor has the limit that the manager has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        vm = launch.start(folder, SLEEP, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = [Path(f"/proc/{process(each).pid}/limits").read_text() for each in (vm.warden, vm.vmm)]
    found = [re.search(r"^Max open files +(\d+) ", text, re.MULTILINE) for text in limits]
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    assert [match and int(match[1]) for match in found] == [most, 256]


def test_nobody_is_the_child_of_who_launched_it(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    for each in (vm.warden, vm.vmm):
        with pytest.raises(ChildProcessError):
            os.waitpid(process(each).pid, os.WNOHANG)


@needs_root
def test_it_has_a_user_and_namespaces_of_its_own(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    for each in (vm.warden, vm.vmm):
        pid = process(each).pid
        until(lambda pid=pid: f"Uid:\t{vm.uid}\t" in Path(f"/proc/{pid}/status").read_text())
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"Gid:\t{vm.uid}\t{vm.uid}\t{vm.uid}\t{vm.uid}\n" in status
        assert "Groups:\t \n" in status
        assert "CapEff:\t0000000000000000\n" in status
        assert "NoNewPrivs:\t1\n" in status
        for space in ("net", "ipc"):
            assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")


@needs_root
def test_it_has_no_higher_priority_than_others_though_who_launched_it_has(folder: VmFolder) -> None:
    def urgent() -> Vm:
        os.setpriority(os.PRIO_PROCESS, 0, -5)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return launch.start(folder, SLEEP, None)

    with ThreadPoolExecutor(1) as thread:  # a priority is a thread's and its children's
        vm = thread.submit(urgent).result()
    for each in (vm.warden, vm.vmm):
        pid = process(each).pid
        assert (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)) == (0, os.SCHED_OTHER)


def test_a_descriptor_above_the_limit_of_descriptors_stays_outside(folder: VmFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(0, fcntl.F_DUPFD, 700)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        said = run(folder, "ls /proc/self/fd")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(high)
    assert said.split() == ["0", "1", "2", "3"]


@needs_root
def test_it_gets_the_group_of_its_device_and_no_other(folder: VmFolder) -> None:
    vm = launch.start(folder, Launch(argv=["/bin/sleep", "60"], device_groups=(4321,)), None)
    until(lambda: "Groups:\t4321 \n" in Path(f"/proc/{process(vm.vmm).pid}/status").read_text())


@needs_root
def test_it_makes_files_in_its_folder_and_cannot_touch_ours(folder: VmFolder) -> None:
    said = run(folder, "touch own; rm -f vm.json; mv vm.json other; echo >> vm.json; rm -f lock; ls; id -u")
    vm = folder.read()
    assert vm is not None
    assert said.endswith(f"{vm.uid}\n")
    assert folder.file("own").exists()
    assert folder.file("lock").exists()
    assert not folder.file("other").exists()


@needs_root
def test_files_are_reached_though_its_user_may_not_walk_to_them(folder: VmFolder) -> None:
    shared, own = folder.path.parent / "shared", folder.file("disk")
    shared.write_text("shared")
    shared.chmod(0o644)
    own.write_text("own")
    argv = ["/bin/sh", "-c", f"cat {launch.file(0)} disk {shared}; echo more >> disk; echo more >> {launch.file(0)}"]
    with contextlib.suppress(CreateFailed):
        launch.start(folder, Launch(argv=argv, files=(shared,), own=("disk",)), None)
    until(folder.read_end)
    assert folder.read_console().startswith("sharedown")
    assert "Permission denied" in folder.read_console()
    assert own.read_text() == "ownmore\n"
    assert shared.read_text() == "shared"


@needs_root
def test_a_file_that_its_user_may_not_read_is_named_before_anything_starts(folder: VmFolder) -> None:
    closed = folder.path.parent / "closed"
    closed.touch(mode=0o600)
    with pytest.raises(CreateFailed, match=r"chmod o\+r"):
        launch.start(folder, Launch(argv=["/bin/true"], files=(closed,)), None)


def test_a_file_that_is_not_there_is_named(folder: VmFolder) -> None:
    with pytest.raises(CreateFailed, match="/nowhere"):
        launch.start(folder, Launch(argv=["/bin/true"], files=(Path("/nowhere"),)), None)


@needs_root
def test_a_link_is_not_given_away_in_place_of_a_drive(folder: VmFolder) -> None:
    ours = folder.path.parent / "ours"
    ours.touch()
    folder.file("disk").symlink_to(ours)
    with pytest.raises(CreateFailed):
        launch.start(folder, Launch(argv=["/bin/true"], own=("disk",)), None)
    assert ours.stat().st_uid == 0


@needs_root
def test_another_name_of_a_file_of_ours_is_not_given_away_in_place_of_a_drive(folder: VmFolder) -> None:
    """A hypervisor that was taken over can make one, where the kernel lets everybody link what is not theirs."""
    ours, volume = folder.path.parent / "ours", folder.path.parent / "volume"
    ours.touch()
    volume.touch()
    os.link(volume, folder.file("data"))
    what = Launch(argv=["/bin/sleep", "60"], own=("data",))
    launch.start(folder, what, None)
    launch.kill(folder)
    launch.start(folder, what, None)  # a volume has two names, and is given again and again
    launch.kill(folder)
    folder.file("data").unlink()
    os.link(ours, folder.file("data"))
    with pytest.raises(ProviderError, match="no file of its own"):
        launch.start(folder, what, None)
    assert ours.stat().st_uid == 0


def test_its_limits_hold_both_processes_and_go_with_it(folder: VmFolder) -> None:
    if not cgroup.find().parents:
        pytest.skip("no control groups can be made here")
    vm = launch.start(folder, SLEEP, LIMITS)
    groups = [Path(group) for group in vm.groups]
    assert groups
    assert {process(vm.warden).pid, process(vm.vmm).pid} <= cgroup.members(groups)
    launch.kill(folder)
    assert not any(group.exists() for group in groups)


@needs_root
def test_a_hypervisor_that_leaves_its_groups_as_it_starts_is_not_started(folder: VmFolder) -> None:
    """As a jailer has done, which begins as root."""
    parent = cgroup.find().parents.get("memory")
    if parent is None:
        pytest.skip("no control groups can be made here")
    elsewhere = parent.path / f"skerry-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        argv = script(f"sleep 60 & echo $! > {elsewhere}/cgroup.procs; echo $! > pid").argv
        leaving = Launch(argv=argv, jail=JailedProcess(uid=uids.take(), pid_file="pid"))
        with pytest.raises(ProviderError, match="memory"):
            launch.start(folder, leaving, LIMITS)
        assert cgroup.members([elsewhere])
        launch.kill(folder)
        assert cgroup.members([elsewhere]) == set()
    finally:
        launch.kill(folder)
        elsewhere.rmdir()


@pytest.mark.parametrize(
    ("program", "said"), [("exit 0", "ended with code 0"), ("exit 3", "code 3"), ("kill -9 $$", "killed by signal 9")]
)
def test_how_a_hypervisor_ended_is_told(folder: VmFolder, program: str, said: str) -> None:
    run(folder, program)
    assert said in folder.how_it_ended()


def test_a_program_that_is_not_there_is_told_of_on_the_console(folder: VmFolder) -> None:
    with contextlib.suppress(CreateFailed):
        launch.start(folder, Launch(argv=["/no/such/program"]), None)
    until(folder.read_end)
    assert "/no/such/program" in folder.read_console()


def test_a_hypervisor_that_ends_at_once_is_told_of_with_its_last_words(
    folder: VmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = spawn.Child.answer

    def answer_late(child: spawn.Child, deadline: float) -> dict[str, Any]:
        answered = answer(child, deadline)
        until(lambda: Process.of(answered["vmm"]) is None)
        return answered

    monkeypatch.setattr(spawn.Child, "answer", answer_late)
    with pytest.raises(CreateFailed, match=r"(?s)ended with code 3.*no such option"):
        launch.start(folder, script("echo no such option; exit 3"), None)


def test_the_hypervisor_dies_with_its_warden(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    os.kill(process(vm.warden).pid, signal.SIGKILL)
    until(lambda: not process(vm.vmm).is_alive())
    assert not folder.is_running()
    assert folder.how_it_ended() == "the machine is not running"


def test_the_warden_ends_with_the_hypervisor(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    os.kill(process(vm.vmm).pid, signal.SIGKILL)
    until(lambda: not process(vm.warden).is_alive())
    assert folder.how_it_ended() == "the machine was killed by signal 9"


def test_killing_is_quiet_when_there_is_nothing(folder: VmFolder) -> None:
    launch.kill(folder)
    launch.start(folder, SLEEP, None)
    launch.kill(folder)
    launch.kill(folder)
    launch.kill(VmFolder(folder.path.parent / "never"))
    assert not folder.channel.exists()


def test_nothing_starts_where_something_runs(folder: VmFolder) -> None:
    launch.start(folder, SLEEP, None)
    with pytest.raises(ProviderError, match="already"):
        launch.start(folder, SLEEP, None)
    assert folder.is_running()


def test_a_machine_that_ended_starts_again_in_its_folder(folder: VmFolder) -> None:
    run(folder, "echo first; exit 1")
    assert run(folder, "echo second") == "first\nsecond\n"
    assert folder.how_it_ended() == "the machine ended with code 0"


def test_nothing_starts_in_a_folder_that_was_removed(folder: VmFolder) -> None:
    folder.remove()
    with pytest.raises(CreateFailed, match="no folder"):
        launch.start(folder, SLEEP, None)


def test_a_launcher_that_waits_in_vain_says_so(folder: VmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_START", "/no/such/start.py")
    with pytest.raises(CreateFailed, match=r"start\.py"):
        launch.start(folder, SLEEP, None)


KILLED_AT = {
    "the note of what is meant": "folder.VmFolder.write = die",
    "the start of the warden": "spawn.Child.__init__ = die",
    "the placing in its group": "cgroup.place = die",
    "telling it what to do": "spawn.Child.tell = die",
    "its answer": "spawn.Child.answer = die",
    "the note of who runs": "folder.VmFolder.write_processes = die",
}


@pytest.mark.parametrize("before", KILLED_AT)
def test_a_launcher_killed_before_any_step_leaves_nothing_that_cannot_be_ended(folder: VmFolder, before: str) -> None:
    program = f"""if True:
        import os, sys
        from pathlib import Path
        from skerry.host import cgroup
        from skerry.vm import folder, launch
        from skerry.host import spawn
        from skerry.vm.base import MachineLimits
        def die(*_args, **_options): os.kill(os.getpid(), 9)
        {KILLED_AT[before]}
        what = launch.Launch(argv=["/bin/sleep", "60"])
        launch.start(folder.VmFolder(Path(sys.argv[1])), what, MachineLimits(memory=64 << 20, cpus=0.5))
    """
    ended = subprocess.run([sys.executable, "-c", program, folder.path], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    launch.kill(folder)
    assert seen_on_host(folder) == []
    vm = folder.read()
    assert vm is None or not any(Path(group).exists() for group in vm.groups)


@pytest.mark.skipif(not uids.are_available(), reason="only root gives machines uids of their own")
def test_no_two_machines_have_the_same_user(folder: VmFolder) -> None:
    with vm_folder() as other:
        first, second = (launch.start(each, SLEEP, None) for each in (folder, other))
        assert first.uid != second.uid


def _interfaces(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return sorted(line.split(":")[0].strip() for line in lines)


@needs_root
def test_a_machine_has_no_network_but_its_own_loopback(folder: VmFolder) -> None:
    vm = launch.start(folder, SLEEP, None)
    assert _interfaces(process(vm.vmm).pid) == ["lo"]


@pytest.mark.skipif(launch.why_no_network() is not None, reason=str(launch.why_no_network()))
@pytest.mark.parametrize("limits", [None, LIMITS])
@pytest.mark.parametrize("dies", ["warden", "vmm"])
def test_a_network_is_there_when_it_starts_and_goes_with_it(
    folder: VmFolder, limits: MachineLimits | None, dies: str
) -> None:
    vm = launch.start(folder, Launch(argv=["/bin/sleep", "60"], network=True), limits)
    assert _interfaces(process(vm.vmm).pid) == ["lo", "tap0"]
    beside = list(processes.find_by_arguments((str(process(vm.warden).pid), "tap0"), 2))
    assert beside
    os.kill(process(getattr(vm, dies)).pid, signal.SIGKILL)
    until(lambda: not any(each.is_alive() for each in beside))


@pytest.mark.skipif(launch.why_no_network() is not None, reason=str(launch.why_no_network()))
def test_a_network_costs_the_host_none_of_its_mounts(folder: VmFolder) -> None:
    name = f"skerry-test-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        launch.start(folder, Launch(argv=["/bin/sleep", "60"], network=True), None)
        launch.kill(folder)
        assert f"/run/netns/{name} " in Path("/proc/self/mounts").read_text()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@needs_root
def test_a_network_that_cannot_be_made_is_told_of(folder: VmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "why_no_network", lambda: None)
    monkeypatch.setattr(launch, "_network_command", lambda: ["/no/such/slirp4netns"])
    with pytest.raises(CreateFailed, match=r"(?s)network cannot be made.*/no/such/slirp4netns"):
        launch.start(folder, Launch(argv=["/bin/sleep", "60"], network=True), None)


def test_a_network_is_not_even_tried_where_there_can_be_none(folder: VmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "why_no_network", lambda: "it is not installed")
    with pytest.raises(CreateFailed, match="it is not installed"):
        launch.start(folder, Launch(argv=["/bin/sleep", "60"], network=True), None)
    assert folder.read() is None


@needs_root
def test_machines_that_are_started_at_once_are_all_in_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that has found out nothing of its host yet."""
    if why_not := cgroup.find().why_not:
        pytest.skip(f"this host lets us make no cgroups: {why_not}")
    monkeypatch.setattr(scope, "_found", {})
    trying, sweep = threading.Barrier(8), cgroup._sweep

    def sweep_together(parent: Path) -> None:
        """Whoever tries groups out does it at the same moment as all others who do."""
        with contextlib.suppress(threading.BrokenBarrierError):
            trying.wait(0.5)
        sweep(parent)

    monkeypatch.setattr(cgroup, "_sweep", sweep_together)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        folders = [stack.enter_context(vm_folder()) for _ in range(8)]
        together = threading.Barrier(8)
        started = threads.map(lambda folder: (together.wait(), launch.start(folder, SLEEP, LIMITS))[1], folders)
        for vm in started:
            for each in (vm.warden, vm.vmm):
                pid = process(each).pid
                assert group_of(pid, "memory").most <= LIMITS.memory
                assert group_of(pid, "pids").most <= LIMITS.pids
            assert all(Path(group).is_dir() for group in vm.groups)
