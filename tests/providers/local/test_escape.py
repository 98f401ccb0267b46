"""Escape and abuse from inside real boxes, judged by their effect on the host."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.errors import SkerryError
from skerry.providers.local import Local
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec, new_id

PROBE = Path(__file__).with_name("probe.py")
ON_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe knows only the call numbers of x86_64")
USERS = pytest.mark.parametrize("user", ["user", "root"])


def host() -> dict[str, str]:
    """What no box may change."""
    watched = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe",
               "/proc/sys/kernel/panic", "/proc/sys/kernel/tainted", "/proc/sys/net/ipv4/ip_forward",
               "/proc/sys/user/max_user_namespaces", "/etc/passwd", "/etc/hosts", "/usr/bin/env"]  # fmt: skip
    state = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in watched if os.path.exists(path)}
    lines = Path("/proc/self/mounts").read_text().splitlines()
    state["mounts"] = "\n".join(line for line in lines if not line.split()[1].startswith(("/run/", "/tmp/")))
    state["made"] = str(
        [path for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/home/x", "/var/x") if os.path.exists(path)]
    )
    state["clock"] = str(abs(time.time() - time.monotonic() - _CLOCK) < 5)
    return state


_CLOCK = time.time() - time.monotonic()


@pytest.fixture
async def box(local: Local, request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    spec = getattr(request, "param", None) or Spec()
    sandbox = await AsyncSandbox.create(spec, local)
    yield sandbox
    await sandbox.destroy()


async def probe(local: Local, user: str, what: str, *args: str) -> dict[str, str]:
    sandbox = await AsyncSandbox.create(Spec(user=user), local)
    try:
        await sandbox.files.write("probe.py", PROBE.read_bytes())
        argv = ["python3", "-B", "probe.py", what, *args]
        done = await sandbox.exec(argv, env={"SKERRY_PROBE": "inside"}, timeout_s=30)
    finally:
        await sandbox.destroy()
    assert done.exit_code == 0, done.stderr.decode()
    results: dict[str, str] = json.loads(done.stdout)
    return results


def got_in(results: dict[str, str]) -> list[str]:
    assert results
    return sorted(name for name, end in results.items() if "got in" in end)


def test_the_probe_refuses_to_run_outside_a_box() -> None:
    for env in ({}, {"SKERRY_PROBE": "inside"}):
        done = subprocess.run([sys.executable, str(PROBE), "kernel"], env=env, capture_output=True, text=True)
        assert done.returncode != 0
        assert "not the inside" in done.stderr


@ON_X86
@USERS
async def test_the_kernel_answers_no_call_that_reaches_beyond_the_box(local: Local, user: str) -> None:
    before = host()
    results = await probe(local, user, "kernel")
    assert got_in(results) == []
    assert results["A22 younger calls"] == "ENOSYS"
    assert host() == before


@ON_X86
@USERS
async def test_nothing_can_be_mounted_remounted_or_unmounted(local: Local, user: str) -> None:
    before = host()
    assert got_in(await probe(local, user, "mounts")) == []
    assert host() == before


@USERS
async def test_no_file_device_or_setting_of_the_host_is_within_reach(local: Local, user: str) -> None:
    before = host()
    assert got_in(await probe(local, user, "files")) == []
    assert host() == before


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@ON_X86
@USERS
async def test_processes_and_services_of_the_host_are_out_of_reach(
    local: Local, user: str, victim: subprocess.Popen[bytes]
) -> None:
    name = f"skerry-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        abstract.bind(f"\0{name}")
        abstract.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        results = await probe(local, user, "others", str(victim.pid), name, str(tcp.getsockname()[1]))
    assert got_in(results) == []
    assert victim.poll() is None


async def test_killing_everything_in_the_box_leaves_its_agent_and_the_host_alive(box: AsyncSandbox) -> None:
    await box.exec(["python3", "-c", "import os; os.kill(-1, 9)"], timeout_s=10)
    await box.exec(["python3", "-c", "import os; os.kill(1, 9)"], timeout_s=10)
    assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"


async def test_one_box_sees_nothing_of_another_and_cannot_change_what_they_share(local: Local) -> None:
    first, second = await AsyncSandbox.create(Spec(), local), await AsyncSandbox.create(Spec(), local)
    try:
        await first.files.write("/tmp/secret", b"x")
        await first.files.write("/dev/shm/secret", b"x")
        await first.files.write("secret", b"x")
        await first.exec("echo x >> /etc/passwd; echo x >> /.skerry/agent/start.py")
        seen = await second.exec("ls -A /tmp /dev/shm ~; ps -e | wc -l; grep -c ^x$ /etc/passwd")
    finally:
        await first.destroy()
        await second.destroy()
    assert b"secret" not in seen.stdout
    assert seen.stdout.split()[-1] == b"0"


async def test_a_terminal_in_the_box_cannot_be_typed_into_by_ioctl(box: AsyncSandbox) -> None:
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
    terminal = await box.pty(["python3", "-c", code])
    said = b"".join([chunk async for _, chunk in terminal])
    assert b"PermissionError" in said


async def test_a_fork_bomb_stops_at_the_limit_and_the_box_is_gone_at_once(local: Local) -> None:
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    print(count, flush=True)
"""
    sandbox = await AsyncSandbox.create(Spec(pids=40), local)
    try:
        done = await sandbox.run_code("python", code, timeout_s=10)
    finally:
        start = time.monotonic()
        await sandbox.destroy()
    assert 20 <= int(done.stdout) < 40
    assert time.monotonic() - start < 2


async def test_a_memory_bomb_ends_inside_its_limit(local: Local) -> None:
    if not (await local.enforcement(Spec()))["memory"].by:
        pytest.skip("this host does not let us limit memory")
    sandbox = await AsyncSandbox.create(Spec.of(memory="64M"), local)
    try:
        code = "x = []\nwhile True: x.append(bytearray(b'x' * 2**20))\n"
        done = await sandbox.run_code("python", code, timeout_s=20)
        assert done.signal == 9
    except SkerryError:
        pass  # the whole box was killed: the limit held too
    finally:
        await sandbox.destroy()


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/home/user"])
async def test_what_a_box_writes_into_memory_is_limited(local: Local, place: str) -> None:
    sandbox = await AsyncSandbox.create(Spec.of(disk="32M"), local)
    try:
        done = await sandbox.exec(f"dd if=/dev/zero of={place}/big bs=1M count=600 2>&1", timeout_s=30)
    finally:
        await sandbox.destroy()
    assert b"No space left" in done.stdout


async def test_descriptors_and_cores_are_limited(box: AsyncSandbox) -> None:
    code = """
import os, resource
opened = []
try:
    while True: opened.append(os.open("/dev/null", 0))
except OSError as error:
    print(len(opened) < 1024, error.errno)
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    done = await box.run_code("python", code)
    assert done.stdout == b"True 24\n(0, 0)\n"


async def test_cpu_time_is_held_to_the_quota(local: Local) -> None:
    if not (await local.enforcement(Spec()))["cpus"].by:
        pytest.skip("this host does not let us limit the cpu")
    sandbox = await AsyncSandbox.create(Spec(cpus=0.25), local)
    code = """
import os, time
end = time.monotonic() + 1.5
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() < end: pass
        os._exit(0)
    pids.append(pid)
for pid in pids: os.waitpid(pid, 0)
print(sum(os.times()[2:4]))
"""
    try:
        done = await sandbox.run_code("python", code, timeout_s=20)
    finally:
        await sandbox.destroy()
    assert float(done.stdout) < 1.5 * 0.25 * 1.6


@pytest.mark.parametrize("box", [Spec(), Spec.of(disk="64M")], indirect=True, ids=["memory", "disk"])
async def test_a_box_cannot_make_itself_undeletable(box: AsyncSandbox, local: Local) -> None:
    code = r"""
import os
os.mkdir("deep"); os.chdir("deep")
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
os.chdir("/home/user")
for name in (b"new\nline", b"\xff\xfe", b"\x1b[31m", b"n" * 255, b"-rf"):
    open(name, "w").close()
os.mkfifo("fifo"); os.symlink("/etc/shadow", "link"); os.truncate(os.open("sparse", os.O_CREAT | os.O_WRONLY), 1 << 34)
os.mkdir("closed"); open("closed/x", "w").close(); os.chmod("closed", 0)
"""
    done = await box.run_code("python", code, timeout_s=20)
    assert done.exit_code == 0, done.stderr
    start = time.monotonic()
    await box.destroy()
    assert time.monotonic() - start < 2
    assert await local.discover() == {}


async def test_processes_that_ignore_signals_and_flee_their_session_die_with_the_box(local: Local) -> None:
    marker = new_id()
    code = f"""
import os, signal, sys, time
for _ in range(50):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 32):
            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
        os.execv(sys.executable, ["python3", "-c", "import time; time.sleep(60)", "{marker}"])
time.sleep(0.5)
"""
    sandbox = await AsyncSandbox.create(Spec(), local)
    try:
        await sandbox.start(["python3", "-c", code], background=True)
        await asyncio.sleep(1)
        before = _bearing(marker)
    finally:
        await sandbox.destroy()
    assert before >= 50
    assert _bearing(marker) == 0


def _bearing(marker: str) -> int:
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            count += marker.encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return count


@ON_X86
async def test_the_probe_would_see_an_open_door(local: Local) -> None:
    """A probe that is blind passes everything: without the filter it must get in somewhere."""
    allow_everything = (0x06).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
    local._host.__dict__["seccomp_program"] = allow_everything
    found = got_in(await probe(local, "user", "kernel"))
    assert {"A5 keyctl", "unshare user"} & set(found)
