"""Ways to take more than was given, or to stay for ever."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from skerry.errors import SkerryError
from skerry.model.spec import Spec, SpecOptions
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

from . import host
from .boxes import END_S, Boxes, Make

FORK_BOMBS = {
    "processes": """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count, flush=True)
""",
    "zombies": """
import os
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
""",
    "threads": """
import os, threading
count, never = 0, threading.Event()
try:
    while count < 1000:
        threading.Thread(target=never.wait, daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count, flush=True)
os._exit(0)
""",
}

MEMORY_BOMBS = {
    "heap": "x = []\nwhile len(x) < 2000: x.append(bytearray(b'x' * 2**20))\n",
    "files without a name": "import os\nfd = os.memfd_create('x')\nfor _ in range(2000): os.write(fd, b'x' * 2**20)\n",
    "inodes": "import os\nfor n in range(400_000): os.close(os.open(f'/dev/shm/{n}', os.O_CREAT))\n",
}


class AbuseCases(Boxes):
    """Ways to take more than was given, or to stay for ever."""

    async def _is_limited(self, provider: Provider, what: str) -> None:
        if not (await provider.enforcement(Spec.of(**self.options)))[what].by:
            pytest.skip(f"this host does not let us limit {what}")

    @pytest.mark.parametrize("bomb", list(FORK_BOMBS))
    async def test_a_fork_bomb_stops_at_the_limit(self, make: Make, bomb: str) -> None:
        before = host.threads()
        sandbox = await make({"pids": 40})
        try:
            done = await sandbox.run_code("python", FORK_BOMBS[bomb], timeout_s=10)
            if not self.is_virtual:
                assert 20 <= int(done.stdout) < 40
        except SkerryError:
            assert self.is_virtual  # a kernel of its own may fall over its limit
        assert max((host.threads() - before).values(), default=0) < 300

    @pytest.mark.parametrize("bomb", list(MEMORY_BOMBS))
    async def test_a_memory_bomb_ends_inside_its_limit(self, make: Make, provider: Provider, bomb: str) -> None:
        await self._is_limited(provider, "memory")
        sandbox = await make({"memory": "128M" if self.is_virtual else "64M"})
        try:
            done = await sandbox.run_code("python", MEMORY_BOMBS[bomb], timeout_s=25)
            assert done.exit_code != 0
            if done.timed_out:  # at its limit it may crawl, as the kernel takes its programs' pages again and again
                assert (await sandbox.exec(["true"], timeout_s=10)).ok
        except SkerryError:
            pass  # the whole box was killed: the limit held too

    @pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/home/user"])
    async def test_what_a_box_writes_is_limited(self, make: Make, place: str) -> None:
        sandbox = await make({"disk": "32M"})
        done = await sandbox.exec(f"dd if=/dev/zero of={place}/big bs=1M count=600 2>&1", timeout_s=30)
        assert b"No space left" in done.stdout or b"quota exceeded" in done.stdout

    async def test_descriptors_and_cores_are_limited(self, box: AsyncSandbox) -> None:
        code = """
import os, resource
opened = []
try:
    while len(opened) < 100_000: opened.append(os.open("/dev/null", 0))
except OSError as error:
    print(error.errno)
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
        done = await box.run_code("python", code)
        assert done.stdout == b"24\n(0, 0)\n"

    async def test_signals_that_wait_are_limited(self, box: AsyncSandbox) -> None:
        """They are counted for the uid: a box that may queue as many as it likes leaves none for who shares that."""
        code = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
for _ in range(5000): os.kill(os.getpid(), signal.SIGRTMIN)
print([line for line in open("/proc/self/status") if line.startswith("SigQ")][0].split()[1])
"""
        done = await box.run_code("python", code, timeout_s=30)
        assert self.is_virtual or 0 < int(done.stdout.split(b"/")[0]) <= 1024

    async def test_cpu_time_is_held_to_the_quota(self, make: Make, provider: Provider) -> None:
        await self._is_limited(provider, "cpus")
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
        sandbox = await make({"cpus": 0.25})
        before = await self.cpu_s(sandbox)
        done = await sandbox.run_code("python", code, timeout_s=20)
        used = float(done.stdout) if before is None else (await self.cpu_s(sandbox) or 0) - before
        assert used < max(1.5, done.duration_s) * 0.25 * 1.6

    async def cpu_s(self, sandbox: AsyncSandbox) -> float | None:
        """Seconds of the host's processors that the box used, where its own account is not to be trusted."""
        return None

    @pytest.mark.parametrize("options", [{}, {"disk": "64M"}], ids=["memory", "disk"])
    async def test_a_box_cannot_make_itself_undeletable(self, make: Make, options: SpecOptions) -> None:
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
        done = await (await make(options)).run_code("python", code, timeout_s=20)
        assert done.exit_code == 0, done.stderr

    async def test_processes_that_ignore_signals_and_flee_their_session_die_with_the_box(self, make: Make) -> None:
        marker = f"stays-for-ever-{os.getpid()}"
        code = f"""
import os, signal, sys, time
for _ in range(200):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 32):
            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
        os.execv("/bin/sh", ["sh", "-c", "read line < /tmp/never; : {marker}"])
"""
        sandbox = await make({"pids": 300})
        try:
            await sandbox.exec("mkfifo /tmp/never")
            await sandbox.run_code("python", code, timeout_s=30)
            if not self.is_virtual:
                await _seen(marker, 200)
        except SkerryError:
            assert self.is_virtual
        async with asyncio.timeout(END_S):
            await sandbox.destroy()
        assert host.bearing(marker) == 0


async def _seen(marker: str, count: int) -> None:
    deadline, found = time.monotonic() + END_S, 0
    while found < count and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        found = host.bearing(marker)
    assert found == count
