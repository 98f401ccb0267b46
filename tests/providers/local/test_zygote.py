"""Boxes that a zygote has forked: as those that bubblewrap makes, apart from each other, and made whatever becomes of
the zygote."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from escape.host import control_groups
from providers.local.forks import first_of, is_forked, zygotes_of
from providers.local.test_launch import seen_on_host
from providers.test_local import PACKAGES, as_plain_user, interpreter_for_all

from skerry.errors import CreateFailed
from skerry.host import cgroup, processes, scope
from skerry.host.processes import Process
from skerry.manager.create import create_or_nothing
from skerry.model.spec import Mount, Network, Spec, SpecOptions, new_id
from skerry.providers.local import Local, LocalConfig, boxes, creation, zygote
from skerry.providers.local.host import Host
from skerry.providers.local.zygote import Zygotes
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import make

IS_ROOT = os.geteuid() == 0
NEEDS_ROOT = pytest.mark.skipif(not IS_ROOT, reason="an agent shows itself to root alone")


async def until(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def plain(local: Local, spec: Spec) -> AsyncIterator[AsyncSandbox]:
    used, local._zygotes = local._zygotes, None
    try:
        sandbox = await make(spec, local)
    finally:
        local._zygotes = used
    assert not is_forked(local, sandbox.id)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


@contextlib.asynccontextmanager
async def forked(local: Local, spec: Spec) -> AsyncIterator[AsyncSandbox]:
    sandbox = await make(spec, local)
    try:
        assert is_forked(local, sandbox.id)
        yield sandbox
    finally:
        await sandbox.destroy()


# the same walls

SEEN = """
import os, re, resource, signal, stat
def lines(path):
    with open(path) as file:
        return file.read().splitlines()
def modes(path):
    found = {}
    for name in sorted(os.listdir(path)):
        status = os.lstat(path + "/" + name)
        found[name] = [oct(status.st_mode), status.st_rdev]
    return found
KEPT = "Umask Uid Gid Groups SigQ SigBlk SigIgn CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Threads"
KEPT = (KEPT + " Seccomp_filters NSpid Cpus_allowed Mems_allowed").split()
status = dict(line.split(":", 1) for line in lines("/proc/self/status"))
seen = {name: status[name].split() for name in KEPT if name in status and name not in ("NSpid", "SigQ")}
for name in ("uid_map", "gid_map", "setgroups", "oom_score_adj", "loginuid"):
    if os.path.exists("/proc/self/" + name):
        seen[name] = [line.split() for line in lines("/proc/self/" + name)]
seen["limits"] = [line for line in lines("/proc/self/limits")]
seen["environment"] = sorted(os.environ)
seen["descriptors"] = sorted(os.listdir("/proc/self/fd"))
seen["hostname"] = os.uname().nodename
seen["priority"] = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
seen["session"] = [os.getsid(1), os.getpgid(1), os.getppid() > 0]
seen["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
seen["dev"] = modes("/dev")
seen["pts"] = modes("/dev/pts")
seen["root"] = {name: mode for name, mode in modes("/").items()}
seen["devices"] = sorted(line.split(":")[0] for line in lines("/proc/net/dev") if ":" in line)
seen["mounts"] = {}
for line in lines("/proc/self/mountinfo"):
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(), after.split(" ")
    sizes = re.findall("size=[0-9]+k|ptmxmode=[0-9]+|mode=[0-9]+", options)
    seen["mounts"][fields[4]] = [kind, fields[5], fields[6:], sizes]
for path in ("/etc", "/home/user", "/tmp", "/usr", "/proc/sys/kernel", "/dev", "/.skerry"):
    seen["writable " + path] = os.access(path, os.W_OK)
for path in ("/proc/cmdline", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/1/environ", "/proc/1/mem"):
    try:
        open(path).close()
        seen["open " + path] = True
    except OSError as error:
        seen["open " + path] = error.errno
print(repr(seen))
"""
EXPECTED_APART = {
    "/dev",
    "/proc/sys",
}
"""Mounts that are not the same: ours are closed to more."""


@pytest.mark.parametrize("options", [{}, {"user": "root"}, {"network": "rules"}], ids=["user", "root", "rules"])
async def test_a_forked_box_looks_from_inside_as_one_of_bubblewrap(warm: Local, options: SpecOptions) -> None:
    spec = Spec.of(**options)
    async with plain(warm, spec) as one, forked(warm, spec) as other:
        reference, found = [ast.literal_eval((await each.exec(["python3", "-c", SEEN])).text) for each in (one, other)]
    ours, theirs = found.pop("mounts"), reference.pop("mounts")
    assert found == reference
    assert ours.keys() == theirs.keys()
    for path in ours.keys() - EXPECTED_APART:
        assert ours[path] == theirs[path], path
    for path in EXPECTED_APART & ours.keys():
        assert set(theirs[path][1].split(",")) <= set(ours[path][1].split(",")), path


@NEEDS_ROOT
async def test_a_forked_agent_looks_from_outside_as_one_of_bubblewrap(warm: Local) -> None:
    async with plain(warm, Spec()) as one, forked(warm, Spec()) as other:
        await asyncio.gather(one.ping(), other.ping())
        reference, found = [seen_from_outside(first_of(warm, each.id)) for each in (one, other)]
        groups = [
            Path(f"/proc/{first_of(warm, each.id)}/cgroup").read_text().replace(each.id, "ID") for each in (one, other)
        ]
    assert found == reference
    assert groups[0] == groups[1]


def seen_from_outside(pid: int) -> dict[str, Any]:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    names = "Umask Groups SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Threads"
    seen: dict[str, Any] = {
        name: status[name].split()[1:] if name == "NSpid" else status[name] for name in names.split()
    }
    seen["ids"] = [len(set(status[name].split())) for name in ("Uid", "Gid")]
    seen["limits"] = (process / "limits").read_text()
    seen["environ"] = (process / "environ").read_bytes()
    seen["oom"] = (process / "oom_score_adj").read_text()
    seen["exe"] = os.path.basename(os.readlink(process / "exe"))
    seen["cwd"] = os.readlink(process / "cwd")
    seen["root"] = os.readlink(process / "root")
    # no number of a descriptor or an inode
    seen["fds"] = sorted(re.sub("[0-9]+", "N", os.readlink(path)) for path in (process / "fd").iterdir())
    ours = [os.stat(f"/proc/self/ns/{name}").st_ino for name in sorted(os.listdir("/proc/self/ns"))]
    its = [os.stat(process / "ns" / name).st_ino for name in sorted(os.listdir("/proc/self/ns"))]
    seen["namespaces of its own"] = [one != other for one, other in zip(its, ours, strict=True)]
    return seen


# nothing of one in another


@NEEDS_ROOT
async def test_two_forks_share_no_random_bytes_and_no_open_file(warm: Local) -> None:
    async with forked(warm, Spec()) as one, forked(warm, Spec()) as other:
        pids = [first_of(warm, each.id) for each in (one, other)]
        random = [random_of_start(pid) for pid in pids]
        assert random[0] != random[1]
        assert random_of_start(zygotes_of_pids(pids)) not in random
        for code in (
            "import random; print(random.getrandbits(256))",
            "print(hash('skerry'))",
            "import uuid; print(uuid.uuid4())",
        ):
            said = [(await each.exec(["python3", "-c", code])).text for each in (one, other)]
            assert said[0] != said[1]
        opened = [{os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()} for pid in pids]
        assert {name for name in opened[0] & opened[1] if re.search("[0-9]", name)} == set()


def random_of_start(pid: int) -> bytes:
    """The random bytes that the kernel has given to a program as it started, and that a C library uses."""
    auxiliary = Path(f"/proc/{pid}/auxv").read_bytes()
    words = [int.from_bytes(auxiliary[at : at + 8], sys.byteorder) for at in range(0, len(auxiliary), 8)]
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(dict(zip(words[::2], words[1::2], strict=True))[25])
        return memory.read(16)


def zygotes_of_pids(pids: list[int]) -> int:
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]) for pid in pids}
    assert len(parents) == 1
    return parents.pop()


def memory_of(pid: int) -> bytes:
    found = []
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    found.append(memory.read(end - start))
    return b"".join(found)


@NEEDS_ROOT
async def test_nothing_of_a_box_stays_in_the_zygote_or_gets_into_the_next(warm: Local) -> None:
    secret = "".join(["open", "sesame", "of", "one", "box"])
    async with forked(warm, Spec(env={"SECRET": secret})) as one:
        id, pid = one.id, first_of(warm, one.id)
        assert secret.encode() in memory_of(pid)
        parent = zygotes_of_pids([pid])
    async with forked(warm, Spec()) as other:
        for memory in (memory_of(parent), memory_of(first_of(warm, other.id))):
            assert len(memory) > 1 << 20
            assert secret.encode() not in memory
            assert id.encode() not in memory


def test_a_rehearsal_leaves_nothing_open_that_a_fork_would_close_as_its_own() -> None:
    program = """
import gc, os
from skerry.agent.guest import zygote
gc.disable()
before = os.listdir("/proc/self/fd")
zygote.rehearse()
assert os.listdir("/proc/self/fd") == before
"""
    subprocess.run([sys.executable, "-c", program], timeout=20, check=True)


@NEEDS_ROOT
async def test_a_zygote_can_become_another_user_and_nothing_more(warm: Local, cache: Path) -> None:
    async with forked(warm, Spec()) as sandbox:
        pid = zygotes_of_pids([first_of(warm, sandbox.id)])
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    become = 1 << 6 | 1 << 7
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {become}
    assert {int(status[name], 16) for name in ("CapInh", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Threads"].strip() == "1"
    assert sorted(os.listdir(f"/proc/{pid}/root")) != sorted(os.listdir("/"))
    writable = [
        line.split(" ")[4]
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        if line.split(" ")[5].startswith("rw") and " - devtmpfs " not in line
    ]
    assert [path for path in writable if not path.startswith("/proc")] == []
    for name in ("net", "ipc", "uts", "mnt"):
        assert os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    assert Path(f"/proc/{pid}/environ").read_bytes() in (b"", b"PWD=/\0")


# whatever becomes of the zygote


@pytest.mark.parametrize("moment", ["before", "asked", "begun", "whole"])
async def test_a_box_is_made_though_the_zygote_is_killed(
    warm: Local, cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def kill() -> None:
        for pid in zygotes_of(cache):
            process = Process.of(pid)
            if process is not None:
                processes.wait_until_dead([process], 5, kill=True)

    send, fork = Zygotes._send, Zygotes.fork

    def killing_send(self: Zygotes, name: str, request: bytes, fds: list[int]) -> None:
        if moment == "asked":
            for pid in zygotes_of(cache):
                os.kill(pid, signal.SIGSTOP)
        send(self, name, request, fds)
        kill()

    def killing_fork(self: Zygotes, *args: Any) -> Any:
        made = fork(self, *args)
        kill()
        return made

    if moment == "before":
        kill()
    elif moment == "asked":
        monkeypatch.setattr(Zygotes, "_send", killing_send)
    elif moment == "begun":
        monkeypatch.setattr(Zygotes, "fork", killing_fork)
    async with AsyncSandbox(provider_object=warm) as sandbox:
        if moment == "whole":
            kill()
        assert (await sandbox.exec(["echo", "here"])).stdout == b"here\n"
        assert is_forked(warm, sandbox.id) == (moment in ("begun", "whole"))
        assert len(boxes.Box(warm._state_dir, sandbox.id).read_processes()) == (
            2 if moment in ("before", "asked") else 1
        )
        id = sandbox.id
    await until(lambda: not seen_on_host(id))
    assert control_groups(id) == []


async def test_a_box_is_made_though_its_fork_is_killed(warm: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Zygotes.fork

    def killing(self: Zygotes, *args: Any) -> Any:
        made = fork(self, *args)
        assert made is not None
        os.kill(made.process.pid, signal.SIGKILL)
        return made

    monkeypatch.setattr(Zygotes, "fork", killing)
    async with AsyncSandbox(provider_object=warm) as sandbox:
        assert not is_forked(warm, sandbox.id)
        assert (await sandbox.exec(["echo", "here"])).stdout == b"here\n"
        id = sandbox.id
    await until(lambda: not seen_on_host(id))
    assert control_groups(id) == []


async def test_a_box_is_made_though_the_groups_of_its_fork_are_taken_away(
    warm: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = cgroup.Hierarchies.make
    made: list[str] = []

    def once_in_vain(self: cgroup.Hierarchies, name: str, limits: cgroup.GroupLimits, *only: int) -> None:
        make(self, name, limits, *only)
        if only == (2,):
            return
        made.append(name)
        if len(made) == 1:
            cgroup.remove(self.groups(name, limits), 5)

    if not scope.holder().hierarchies.parents:
        pytest.skip("no control group can be made here")
    monkeypatch.setattr(cgroup.Hierarchies, "make", once_in_vain)
    async with AsyncSandbox(provider_object=warm) as sandbox:
        assert not is_forked(warm, sandbox.id)
        await sandbox.ping()
    async with forked(warm, Spec()) as sandbox:
        await sandbox.ping()


async def test_a_fork_that_cannot_raise_a_wall_says_why_and_the_box_is_made(
    warm: Local, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(creation.profile, "folders", lambda sizes: [("nowhere/at/all", 0o700, 1 << 20)])
    caplog.set_level("DEBUG", "skerry.providers")
    async with AsyncSandbox(provider_object=warm) as sandbox:
        assert not is_forked(warm, sandbox.id)
        await sandbox.ping()
    assert "nowhere/at/all cannot be mounted" in caplog.text
    async with AsyncSandbox(provider_object=warm) as sandbox:  # it is not tried again at once
        assert not is_forked(warm, sandbox.id)


async def test_a_fork_whose_manager_has_died_ends_by_itself(
    warm: Local, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "_ANSWER_S", 0.2)
    monkeypatch.setattr(creation.Creation, "_start_plainly", lambda *_: (_ for _ in ()).throw(CreateFailed("dead")))
    stopped = zygotes_of(cache)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    id = new_id()
    try:
        with pytest.raises(CreateFailed, match="dead"):
            await create_or_nothing(warm, id, Spec())
        assert control_groups(id) == []
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await until(lambda: all(not processes.children(pid) for pid in stopped))
    assert seen_on_host(id) == []
    assert control_groups(id) == []


@pytest.mark.usefixtures("warm")  # by which there is something in the folder that others share
async def test_a_zygote_that_nobody_uses_ends(tmp_path: Path, cache: Path) -> None:
    local = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache")))
    (tmp_path / "cache").mkdir()
    for path in cache.glob("*-*"):
        (tmp_path / "cache" / path.name).symlink_to(path)
    local._zygotes = Zygotes(local._host, tmp_path / "zygotes", local._remember_child, idle_s=0.5)
    before = set(zygotes_of(cache))
    async with AsyncSandbox(provider_object=local) as sandbox:
        await sandbox.ping()
        await until(lambda: set(zygotes_of(cache)) - before)
        await until(lambda: not set(zygotes_of(cache)) - before)
    async with AsyncSandbox(provider_object=local) as sandbox:  # and is started again
        await until(lambda: set(zygotes_of(cache)) - before)
    await until(lambda: not set(zygotes_of(cache)) - before)
    await local.aclose()


@pytest.mark.parametrize("what", ["mount", "root", "network", "disk", "setting"])
async def test_what_a_zygote_does_not_do_is_made_in_the_plain_way(warm: Local, tmp_path: Path, what: str) -> None:
    specs = {
        "mount": Spec(mounts=(Mount(source=str(tmp_path), target="/home/user/data"),)),
        "root": Spec(root="/"),
        "network": Spec(network=Network.HOST),
        "disk": Spec.of(disk="16M"),
        "setting": Spec(),
    }
    if what == "disk" and not IS_ROOT:
        pytest.skip("a disk image needs root")
    if what == "setting":
        warm = Local(LocalConfig(state_dir=str(warm._state_dir), cache_dir=str(warm._host.cache), zygote="off"))
    sandbox = await AsyncSandbox.create(specs[what], warm)
    try:
        assert not is_forked(warm, sandbox.id)
    finally:
        await sandbox.destroy()


async def test_a_stranger_is_not_served(warm: Local, cache: Path) -> None:
    folder = cache / "zygotes"
    assert folder.stat().st_mode & 0o077 == 0
    if IS_ROOT:
        python = interpreter_for_all()
        if python is None:
            pytest.skip("no Python that a plain user may start")
        folder.chmod(0o777)
        for path in folder.glob("*.sock"):
            path.chmod(0o666)
        try:
            code = "import glob, socket, sys\nfor path in glob.glob(sys.argv[1]): socket.socket(1, 2).sendto(b'', path)"
            argv = [*as_plain_user(), python, "-c", code, f"{folder}/*.sock"]
            before = zygotes_of(cache)
            await asyncio.to_thread(subprocess.run, argv, env={"PYTHONPATH": PACKAGES}, timeout=20, check=True)
            async with forked(warm, Spec()):
                assert zygotes_of(cache) == before
        finally:
            folder.chmod(0o700)


async def test_many_boxes_at_once_are_forked_and_all_answer(warm: Local) -> None:
    sandboxes = await asyncio.gather(*(AsyncSandbox.create(Spec(), warm) for _ in range(30)))
    try:
        assert [each.id for each in sandboxes if not is_forked(warm, each.id)] == []
        said = await asyncio.gather(*(each.exec("set -- /proc/[0-9]*; echo $HOSTNAME $#") for each in sandboxes))
        assert len({each.stdout for each in said}) == 1
    finally:
        await asyncio.gather(*(each.destroy() for each in sandboxes))


def test_groups_are_entered_by_who_is_alone_without_waiting_for_others(tmp_path: Path) -> None:
    limits = cgroup.GroupLimits(memory=64 << 20, pids=16, cpus=None)
    hierarchies = cgroup.Hierarchies({"memory": cgroup.Parent(tmp_path, 1), "pids": cgroup.Parent(tmp_path, 1)}, {})
    (tmp_path / "box").mkdir()
    (tmp_path / "box/tasks").touch()
    with hierarchies.tasks("box", limits) as tasks, hierarchies.folder("box", limits) as folder:
        assert folder is None
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in tasks] == [str(tmp_path / "box/tasks")]


@NEEDS_ROOT
async def test_a_box_is_forked_into_a_control_group_of_version_2(warm: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    if root is None:
        pytest.skip("cgroup v2 is not mounted")
    group = root / f"skerry-test-{os.getpid()}"
    group.mkdir()

    @contextlib.contextmanager
    def another(self: cgroup.Hierarchies, *args: Any) -> Iterator[int]:
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
        yield fd
        os.close(fd)

    monkeypatch.setattr(cgroup.Hierarchies, "folder", another)
    try:
        async with forked(warm, Spec()) as sandbox:
            first = Path(f"/proc/{first_of(warm, sandbox.id)}")
            assert f"0::/{group.name}\n" in (first / "cgroup").read_text()
            status = (first / "status").read_text()
            assert re.search(r"NSpid:\s+\d+\s+1\n", status)
            uid = int(re.search(r"Uid:\s+(\d+)", status)[1])  # type: ignore[index]
            assert uid > 0x70000000
            assert (await sandbox.exec("id -u; touch x /tmp/x && echo ok")).text == "1000\nok\n"
    finally:
        await until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_what_ended_zygotes_have_left_is_removed_by_the_next(tmp_path: Path, cache: Path) -> None:
    host = Host(cache)
    folder = tmp_path / "zygotes"
    folder.mkdir(mode=0o700)
    for name in ("0123456789abcdef.sock", "0123456789abcdef.lock"):
        (folder / name).touch()
    children: list[int] = []
    zygotes = Zygotes(host, folder, children.append)
    zygotes.start()
    try:
        assert sorted(path.name for path in folder.iterdir()) == [
            f"{zygotes._name()}{end}" for end in (".lock", ".sock")
        ]
        zygotes.start()
        assert len(children) == 1
    finally:
        zygotes.end()
        for child in children:
            os.waitpid(child, 0)
