from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from escape.host import control_groups
from providers.clients import all_served
from vm.standins import may_set_floor

from skerry.agent.client import AgentClient
from skerry.errors import (
    AgentUnreachable,
    Conflict,
    CreateFailed,
    InvalidSpec,
    NotFound,
    SkerryError,
    Unsupported,
    UserNotFound,
)
from skerry.host import disks, processes, uids
from skerry.manager.create import create_or_nothing
from skerry.model.spec import Mount, Spec, new_id
from skerry.providers.base import BoxState
from skerry.providers.local import Local, LocalConfig, boxes, creation
from skerry.sandbox.sandbox import AsyncSandbox

IS_ROOT = os.geteuid() == 0


async def run_in(local: Local, command: list[str] | str, spec: Spec | None = None) -> str:
    sandbox = await AsyncSandbox.create(spec or Spec(), local)
    try:
        return (await sandbox.exec(command)).stdout.decode()
    finally:
        await sandbox.destroy()


@pytest.fixture
def stranger() -> Iterator[processes.Process]:
    child = subprocess.Popen(["sleep", "60"])
    identity = processes.Process.of(child.pid)
    assert identity is not None
    yield identity
    child.kill()
    child.wait()


def seen_on_host(id: str) -> list[str]:
    """Processes that bear the id, without asking the provider."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if id.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


async def test_nothing_of_the_managers_environment_or_options_is_seen_inside(
    local: Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_DB_PASSWORD", "hunter2")
    spec = Spec(env={"OF_THE_SPEC": "swordfish"})
    said = await run_in(local, "cat /proc/1/environ /proc/1/cmdline /proc/*/environ | tr '\\0' '\\n'; env", spec)
    assert "hunter2" not in said
    assert str(tmp_path) not in said
    assert said.count("swordfish") >= 1
    assert "swordfish" not in await run_in(local, "cat /proc/1/environ /proc/1/cmdline", spec)


async def test_descriptors_that_others_left_inheritable_do_not_get_into_a_box(local: Local) -> None:
    read_fd, write_fd = os.pipe()
    os.set_inheritable(read_fd, True)
    os.set_inheritable(write_fd, True)
    sandbox = await AsyncSandbox.create(Spec(), local)
    try:
        inside = (await sandbox.exec("ls -l /proc/self/fd")).text
        for pid in seen_on_host(sandbox.id) if IS_ROOT else ():  # the agent shows its own to root alone
            inside += "\n".join(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
        mine = os.readlink(f"/proc/self/fd/{read_fd}")
    finally:
        await sandbox.destroy()
        os.close(read_fd)
        os.close(write_fd)
    assert mine not in inside
    assert str(Path.home()) not in inside


async def test_signals_that_the_manager_ignores_are_not_ignored_in_a_box(local: Local) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = await run_in(local, ["cat", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGINT, before)
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert not ignored & (1 << (signal.SIGINT - 1))


async def test_a_box_has_no_capabilities_a_filter_and_no_new_privileges(local: Local) -> None:
    status = await run_in(local, ["cat", "/proc/self/status"], Spec(user="root"))
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


@pytest.mark.skipif(not IS_ROOT, reason="only root has uids to give")
async def test_two_boxes_have_different_uids_on_the_host_and_neither_is_root(local: Local) -> None:
    ids = [new_id(), new_id()]
    try:
        for id in ids:
            await local.create(id, Spec(user="root"))
        owners = {os.stat(f"/proc/{pid}").st_uid for id in ids for pid in seen_on_host(id)}
    finally:
        for id in ids:
            await local.destroy(id)
    assert len(owners) == 2
    assert min(owners) > 0x70000000


def test_no_uid_is_given_out_twice(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: uids.take(tmp_path / "counter", tmp_path / "reserved"), range(200)))
    assert len(set(taken)) == 200


@pytest.mark.parametrize("count", [1, 3000])
def test_no_uid_is_given_out_again_after_the_host_was_booted(tmp_path: Path, count: int) -> None:
    """What is in /run is gone then, and the files of stopped boxes are not."""
    (tmp_path / "counter").write_bytes(b"700")  # of a version that reserved none
    for _ in range(3):
        taken = [uids.take(tmp_path / "counter", tmp_path / "reserved") for _ in range(count)]
        (tmp_path / "counter").unlink()
        assert uids.take(tmp_path / "counter", tmp_path / "reserved") > max(taken)


def test_the_log_of_a_start_cannot_grow() -> None:
    log = creation.Log()
    try:
        os.write(log.fd, b"it failed\n")
        assert log.text() == "it failed"
        with pytest.raises(PermissionError):
            os.pwrite(log.fd, b"x", 64 * 1024)
    finally:
        log.close()


async def test_a_box_that_cannot_be_made_says_why_and_leaves_nothing(local: Local, tmp_path: Path) -> None:
    spec = Spec(mounts=(Mount(source=str(tmp_path), target="/etc/nowhere/x"),))
    with pytest.raises(CreateFailed, match="nowhere") as caught:
        await create_or_nothing(local, new_id(), spec)
    assert "bwrap" in caught.value.log
    assert await local.discover() == {}


@pytest.mark.parametrize(
    ("spec", "error", "word"),
    [
        (Spec(mounts=(Mount(source="/nowhere/at/all", target="/data"),)), InvalidSpec, "/nowhere/at/all"),
        (Spec(mounts=(Mount(source="/dev/null", target="/data"),)), InvalidSpec, "/dev/null"),
        (Spec(root="/nowhere/at/all"), InvalidSpec, "/nowhere/at/all"),
        (Spec(root="/etc/passwd"), InvalidSpec, "not a folder"),
        (Spec.of(network="bridge"), Unsupported, "bridge"),
        (Spec(user="postgres"), UserNotFound, "postgres"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(local: Local, spec: Spec, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        await create_or_nothing(local, new_id(), spec)
    assert await local.discover() == {}


async def test_a_mount_is_seen_where_it_was_asked_for_and_read_only_if_so(local: Local, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    folder.chmod(0o777)
    file.write_text("content")
    spec = Spec(
        mounts=(
            Mount(source=str(folder), target="/data/deep"),
            Mount(source=str(folder), target="/home/user/closed", read_only=True),
            Mount(source=str(file), target="/srv/file", read_only=True),
        )
    )
    said = await run_in(
        local, "cat /srv/file; touch /data/deep/made; touch closed/x || echo ' refused'; ls closed", spec
    )
    assert said == "content refused\nmade\n"
    assert [path.name for path in folder.iterdir()] == ["made"]


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed")
async def test_a_root_folder_without_python_works_and_is_not_written_to(local: Local, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    (root / "sbin").symlink_to("bin")
    command = "busybox id -u; busybox readlink /sbin; busybox touch /x /bin/x /etc/x ~/ok; busybox ls ~"
    said = await run_in(local, command, Spec(root=str(root)))
    assert said == "1000\nbin\nok\n"
    assert sorted(path.name for path in root.iterdir()) == ["bin", "etc", "sbin"]


@pytest.mark.skipif(not IS_ROOT, reason="a disk image needs root")
async def test_a_disk_holds_what_was_asked_for_and_no_more(local: Local) -> None:
    sandbox = await AsyncSandbox.create(Spec.of(disk="16M"), local)
    try:
        filled = await sandbox.exec("dd if=/dev/zero of=big bs=1M count=64 2>&1; stat -c %s big; stat -f -c %T .")
        mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if sandbox.id in line]
    finally:
        await sandbox.destroy()
    text = filled.stdout.decode()
    assert "No space left" in text
    assert int(text.split()[-2]) < 16 << 20
    assert mounted
    assert sandbox.id not in Path("/proc/mounts").read_text()


async def test_a_taken_id_is_refused_and_its_box_lives_on(local: Local) -> None:
    id = new_id()
    await local.create(id, Spec())
    try:
        with pytest.raises(Conflict):
            await local.create(id, Spec())
        assert (await local.discover())[id].state is BoxState.RUNNING
        (await local.dial(id)).close()
    finally:
        await local.destroy(id)


async def test_a_folder_of_any_depth_can_hold_the_boxes(tmp_path: Path, cache: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    provider = Local(LocalConfig(state_dir=str(deep), cache_dir=str(cache)))
    assert await run_in(provider, ["echo", "here"]) == "here\n"
    await provider.aclose()


async def test_a_manager_that_dies_before_it_noted_the_processes_leaves_no_box_running(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: boxes.Box, running: list[processes.Process]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(boxes.Box, "write_processes", die)
    id = new_id()
    box = boxes.Box(local._state_dir, id)
    box.make()
    making = creation.Creation(local._host, local._defaults, box, Spec(), lambda _: None)
    with pytest.raises(KeyboardInterrupt), contextlib.closing(making):
        await asyncio.to_thread(making.start)
    await local.destroy(id)
    assert seen_on_host(id) == []
    assert await local.discover() == {}


async def test_a_box_whose_manager_died_in_mid_start_ends_by_itself(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation.Creation, "_config", lambda *_: b"")
    id = new_id()
    with pytest.raises(CreateFailed):
        await local.create(id, Spec())
    deadline = time.monotonic() + 5
    while seen_on_host(id) and time.monotonic() < deadline:
        local._reap()
        await asyncio.sleep(0.01)
    assert seen_on_host(id) == []
    await local.destroy(id)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", None])
async def test_a_damaged_note_does_not_keep_a_box_from_being_destroyed(local: Local, damage: bytes | None) -> None:
    id = new_id()
    await local.create(id, Spec())
    note = local._state_dir / id / "meta.json"
    if damage is None:
        note.unlink()
    else:
        note.write_bytes(damage)
    assert (await local.discover())[id].state is BoxState.REMAINS
    await local.destroy(id)
    assert seen_on_host(id) == []
    assert control_groups(id) == []


async def test_after_a_reboot_a_box_is_dead_and_no_stranger_with_its_pid_is_killed(
    local: Local, stranger: processes.Process
) -> None:
    box = boxes.Box(local._state_dir, new_id())
    box.make()
    box.write_meta(boxes.Meta(created_at=0, boot_id="another", uid=None, groups=[]))
    box.write_processes([stranger])
    box.mark_whole()
    assert (await local.discover())[box.id].state is BoxState.DEAD
    await local.destroy(box.id)
    assert stranger.is_alive()


def test_a_pid_that_was_given_to_another_is_not_killed(stranger: processes.Process) -> None:
    assert processes.wait_until_dead([processes.Process(stranger.pid, stranger.start - 1)], 1, kill=True)
    assert stranger.is_alive()
    assert processes.wait_until_dead([stranger], 5, kill=True)
    assert not stranger.is_alive()


def test_a_process_is_found_only_by_its_exact_arguments() -> None:
    id = new_id()
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "/.skerry/agent/start.py"]
    lookalike = subprocess.Popen([*sleep, f"x{id}", "4"], stdout=subprocess.PIPE)
    exact = subprocess.Popen([*sleep, id, "4"], stdout=subprocess.PIPE)
    try:
        for process in (lookalike, exact):
            assert process.stdout is not None
            process.stdout.readline()
        found = {process.pid for process in processes.find_by_arguments(("/.skerry/agent/start.py", id), 3)}
    finally:
        for process in (lookalike, exact):
            process.kill()
            process.communicate()
    assert found == {exact.pid}


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.005, 0.02])
async def test_destroy_leaves_nothing_of_a_create_that_was_cancelled(
    tmp_path: Path, cache: Path, delay_s: float
) -> None:
    local = Local(LocalConfig(state_dir=str(tmp_path), cache_dir=str(cache)))
    id = new_id()
    creating = asyncio.create_task(local.create(id, Spec()))
    await asyncio.sleep(delay_s)
    creating.cancel()
    await local.destroy(id)
    await asyncio.gather(creating, return_exceptions=True)
    await asyncio.to_thread(local._threads.shutdown, wait=True)
    await local.aclose()
    assert seen_on_host(id) == []
    assert list(tmp_path.iterdir()) == []


async def test_no_dead_child_stays_behind(local: Local) -> None:
    id = new_id()
    await local.create(id, Spec())
    await local.destroy(id)
    await local.discover()
    assert local._children == set()


async def test_an_agent_is_greeted_once_from_its_creation_to_the_first_command(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    call = AgentClient.open

    def noted(self: AgentClient, method: str, *args: Any, **options: Any) -> Any:
        said.append(method)
        return call(self, method, *args, **options)

    monkeypatch.setattr(AgentClient, "open", noted)
    assert await run_in(local, ["echo", "once"]) == "once\n"
    assert said.count("hello") == 1


async def test_the_stream_of_a_create_that_nobody_uses_is_closed(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.providers.local.provider._KEPT_S", 0.01)
    id = new_id()
    await local.create(id, Spec())
    await asyncio.sleep(0.1)
    assert local._first.take(id) is None
    await local.destroy(id)


async def test_dial_of_a_dead_box_is_unreachable_and_of_none_not_found(local: Local) -> None:
    with pytest.raises(NotFound):
        await local.dial(new_id())
    id = new_id()
    await local.create(id, Spec())
    first = boxes.Box(local._state_dir, id).read_processes()[0]
    assert processes.wait_until_dead([first], 5, kill=True)
    with pytest.raises(AgentUnreachable):
        await local.dial(id)
    assert (await local.discover())[id].state is BoxState.DEAD
    await local.destroy(id)


def test_threads_of_the_provider_are_its_own() -> None:
    before = threading.active_count()
    Local()
    assert threading.active_count() == before


async def test_hundreds_of_clients_of_several_programs_are_all_served(
    local: Local, tmp_path: Path, cache: Path
) -> None:
    id = new_id()
    await local.create(id, Spec())
    try:
        config = {"state_dir": str(tmp_path / "state"), "cache_dir": str(cache)}
        await all_served("local", config, id, programs=3, handles=150)
    finally:
        await local.destroy(id)


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_what_boxes_share_is_for_all_to_read_and_for_nobody_to_change(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        local = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache")))
        assert await run_in(local, "echo $HOME", Spec.of(mounts=[f"{tmp_path / 'cache'}:/srv"])) == "/home/user\n"
    finally:
        os.umask(before)
    await local.aclose()
    shared = [path for path in (tmp_path / "cache").rglob("*") if not path.is_symlink()]
    assert len(shared) > 100
    assert [path for path in shared if path.stat().st_mode & 0o022] == []
    assert [path for path in shared if not path.stat().st_mode & 0o004] == []


@pytest.mark.skipif(not IS_ROOT, reason="only root mounts")
def test_what_an_older_version_left_open_is_closed_by_the_next_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disks, "MOUNTS", tmp_path / "mounts")
    older = tmp_path / "mounts" / new_id()
    older.mkdir(mode=0o711, parents=True)
    disks._close_older.cache_clear()
    made = disks.make_folder(new_id(), 4711)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (older, made)] == [0o700, 0o710]
    assert (made.stat().st_uid, made.stat().st_gid) == (0, 4711)


PRIORITY = """
import os
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), open("/proc/self/oom_score_adj").read().strip())
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root may raise its priority")
async def test_a_box_has_no_higher_priority_than_others_though_its_manager_has(tmp_path: Path, cache: Path) -> None:
    async def boxed() -> str:
        local = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(cache)))
        try:
            return await run_in(local, ["python3", "-c", PRIORITY])
        finally:
            await local.aclose()

    def as_urgent_manager() -> str:
        """In a thread of its own, for a priority is a thread's and its children's."""
        os.setpriority(os.PRIO_PROCESS, 0, -5)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return asyncio.run(boxed())

    adjusted = Path("/proc/self/oom_score_adj")
    before = adjusted.read_text()
    with contextlib.suppress(PermissionError):  # a root without CAP_SYS_RESOURCE
        adjusted.write_text("-500")
    try:
        with ThreadPoolExecutor(1) as thread:
            said = await asyncio.wrap_future(thread.submit(as_urgent_manager))
    finally:
        adjusted.write_text(before)
    assert said.split() == ["0", str(os.SCHED_OTHER), "1000"]


LOWER = """
def score():
    return int(open("/proc/self/oom_score_adj").read())
print(score(), end=" ")
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except PermissionError:
    pass
print(score())
"""


async def test_a_box_is_killed_first_when_the_host_runs_out_of_memory(local: Local) -> None:
    """Where the kernel lets us set a floor, nothing in the box gets below it; else not below that of the manager."""
    sandbox = await AsyncSandbox.create(Spec(), local)
    try:
        first = boxes.Box(local._state_dir, sandbox.id).read_processes()[0]
        assert Path(f"/proc/{first.pid}/oom_score_adj").read_text().strip() == "1000"
        said = (await sandbox.exec(["python3", "-c", LOWER])).stdout.decode().split()
    finally:
        await sandbox.destroy()
    assert said[0] == "1000"
    assert int(said[1]) >= (1000 if may_set_floor() else 0)


async def test_a_descriptor_above_the_limit_of_descriptors_stays_outside(local: Local) -> None:
    gc.collect()  # what other tests have left behind holds descriptors too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(0, fcntl.F_DUPFD, 700)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    id = new_id()
    try:
        await local.create(id, Spec())
        inside = os.listdir(f"/proc/{boxes.Box(local._state_dir, id).read_processes()[0].pid}/fd")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(high)
        await local.destroy(id)
    assert "0" in inside
    assert str(high) not in inside


async def test_too_few_descriptors_are_told_as_an_error_of_ours(local: Local) -> None:
    await run_in(local, "true")  # what is made once is there
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    failed = []
    try:
        for spare in range(40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, limits[1]))
            try:
                await AsyncSandbox.create(Spec(), local)
                break
            except SkerryError as error:
                failed.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for id in await local.discover():
            await local.destroy(id)
    assert len(failed) > 5


async def test_it_is_seen_from_outside_whether_anything_but_the_agent_runs(local: Local) -> None:
    async with AsyncSandbox(provider_object=local) as sandbox:
        assert local.runs_nothing(sandbox.id)
        await sandbox.exec("env -i setsid sleep 1000 > /dev/null 2>&1 &")
        assert not local.runs_nothing(sandbox.id)
        await sandbox.connection.terminate(20)
        assert local.runs_nothing(sandbox.id)
    assert not local.runs_nothing(sandbox.id)
