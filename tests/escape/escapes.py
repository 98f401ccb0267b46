"""Ways out of a box, which every provider has to have closed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import SkerryError
from skerry.sandbox import AsyncSandbox

from . import host
from .boxes import USERS, Boxes, Make, as_user

PROBE = Path(__file__).with_name("probe.py")
ON_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe knows only the call numbers of x86_64")


async def probe(sandbox: AsyncSandbox, what: str, *args: str) -> dict[str, str]:
    """How each attempt of `probe.py` ended."""
    await sandbox.files.write("probe.py", PROBE.read_bytes())
    argv = ["python3", "-B", "probe.py", what, *args]
    done = await sandbox.exec(argv, env={"SKERRY_PROBE": "inside"}, timeout_s=30)
    assert done.exit_code == 0, done.stderr.decode()
    results: dict[str, str] = json.loads(done.stdout)
    return results


class EscapeCases(Boxes):
    """Ways out: the kernel, mounts, files, other processes."""

    @ON_X86
    @USERS
    async def test_the_kernel_answers_no_call_that_reaches_beyond_the_box(self, make: Make, user: str | None) -> None:
        before = host.state()
        results = await probe(await make(as_user(user)), "kernel")
        assert self.got_in(results) == []
        assert results["A22 younger calls"] == "ENOSYS"
        assert host.state() == before

    @ON_X86
    @USERS
    async def test_nothing_can_be_mounted_remounted_or_unmounted(self, make: Make, user: str | None) -> None:
        before = host.state()
        assert self.got_in(await probe(await make(as_user(user)), "mounts")) == []
        assert host.state() == before

    @USERS
    async def test_no_file_device_or_setting_of_the_host_is_within_reach(
        self, make: Make, user: str | None, tmp_path: Path
    ) -> None:
        secret = tmp_path / f"of-the-host-{os.getpid()}"
        secret.write_text("x")
        before = host.state()
        results = await probe(await make(as_user(user)), "files", str(secret))
        assert self.got_in(results) == []
        assert not [name for name in results if name.startswith("C7")]
        assert results["C4 find a file of the host"] == "ENOENT"
        assert host.state() == before

    @pytest.fixture
    def victim(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(["sleep", "60"])
        yield process
        process.kill()
        process.wait()

    @ON_X86
    @USERS
    async def test_processes_and_services_of_the_host_are_out_of_reach(
        self, make: Make, user: str | None, victim: subprocess.Popen[bytes]
    ) -> None:
        name = f"skerry-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
            for listener, address in ((abstract, f"\0{name}"), (tcp, ("0.0.0.0", 0))):
                listener.bind(address)
                listener.listen()
                listener.setblocking(False)
            port = tcp.getsockname()[1]
            results = await probe(await make(as_user(user)), "others", str(victim.pid), name, str(port))
            for listener in (abstract, tcp):
                with pytest.raises(BlockingIOError):
                    listener.accept()
        assert self.got_in(results) == []
        assert victim.poll() is None

    async def test_killing_everything_in_the_box_leaves_its_agent_and_the_host_alive(self, box: AsyncSandbox) -> None:
        try:
            await box.exec(["python3", "-c", "import os; os.kill(-1, 9)"], timeout_s=10)
            await box.exec(["python3", "-c", "import os; os.kill(1, 9)"], timeout_s=10)
            assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"
        except SkerryError:
            assert self.is_virtual  # a kernel of its own may let its first process be killed

    async def test_one_box_sees_nothing_of_another_and_cannot_change_what_they_share(self, make: Make) -> None:
        first, second = await make({}), await make({})
        for path in ("/tmp/secret", "/dev/shm/secret", "secret"):
            await first.files.write(path, b"x")
        await first.exec("echo x >> /etc/passwd; echo x >> /.skerry/agent/start.py")
        seen = await second.exec("ls -A /tmp /dev/shm ~; grep -c ^x$ /etc/passwd /.skerry/agent/start.py")
        assert b"secret" not in seen.stdout
        assert [line[-2:] for line in seen.stdout.splitlines()[-2:]] == [b":0", b":0"]

    async def test_nothing_of_the_managers_environment_is_in_the_box(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PASSWORD_OF_THE_MANAGER", "qwertz-12345")
        done = await (await make({})).exec("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env")
        assert b"PATH" in done.stdout
        assert b"qwertz" not in done.stdout

    async def test_a_terminal_in_the_box_cannot_be_typed_into_by_ioctl(self, box: AsyncSandbox) -> None:
        code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
        terminal = await box.pty(["python3", "-c", code])
        said = b"".join([chunk async for _, chunk in terminal])
        assert b"Error" in said
