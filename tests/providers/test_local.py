"""The conformance suite on real bubblewrap boxes, as whoever runs the tests, and once more as a plain user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from providers.lifetimes import LifetimeTests

import skerry
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.local import Local
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance import ProviderConformance

PLAIN_UID = 61_234


class TestLocal(LifetimeTests, ProviderConformance):
    @pytest.fixture
    def make_provider(self, tmp_path: Path) -> Callable[[], Provider]:
        self.state = tmp_path / "state"
        return lambda: Local(Local.Config(state_dir=str(self.state)))

    async def on_host(self) -> set[str]:
        """Folders, processes, cgroups and mounts that bear the name of a box. No box can hide from this: its first
        process has the id among its arguments, and all others are in its cgroups or its namespace."""
        ids = self._ids | {path.name for path in self.state.glob("*-*")}
        type(self)._ids = ids
        found = {f"folder {path}" for path in self.state.glob("*-*")}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found |= {f"process {entry.name} of {id}" for id in ids.intersection(words)}
        mounts = Path("/proc/self/mounts").read_text()
        found |= {f"mount of {id}" for id in ids if id in mounts}
        # Not by rglob: the groups of others come and go meanwhile.
        return found | {
            f"{folder}/{name}"
            for folder, names, _ in os.walk("/sys/fs/cgroup")
            for name in names
            if any(id in name for id in ids)
        }

    _ids: ClassVar[set[str]] = set()
    """Every box that was ever seen, so that what is left of one is seen without its folder."""

    async def test_the_witness_sees_each_kind_of_thing(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        kinds = {entry.split()[0] for entry in await self.on_host()}
        assert {"folder", "process"} <= kinds

    def refused(self, provider: Provider) -> list[Spec]:
        return [Spec.of(image="debian"), Spec.of(network="bridge")]


PACKAGES = os.pathsep.join([str(Path(skerry.__file__).parent.parent), sysconfig.get_path("purelib")])


def interpreter_for_all() -> str | None:
    """A Python of our version that a plain user may start, and that finds us: both may lie in a home folder."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": PACKAGES}
    wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, shutil.which(wanted, path="/usr/bin:/usr/local/bin")):
        attempt = [*as_plain_user(), str(candidate), "-c", "import pytest, skerry.sandbox"]
        if candidate and subprocess.run(attempt, env=env, cwd="/", capture_output=True).returncode == 0:
            return candidate
    return None


def as_plain_user() -> list[str]:
    return ["setpriv", f"--reuid={PLAIN_UID}", f"--regid={PLAIN_UID}", "--clear-groups"]


BOX_WITH_KEYS = """
import asyncio, ctypes, os, sys
from skerry.providers.local import Local
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.model.spec import Spec

async def main():
    local = Local(Local.Config(state_dir=sys.argv[1] + "/state", cache_dir=sys.argv[1] + "/cache"))
    box = await AsyncSandbox.create(Spec(), local)
    try:
        print(open("/proc/keys").read(), "and", (await box.exec("cat /proc/keys /proc/key-users")).stdout.decode())
    finally:
        await box.destroy()

add_key = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
ctypes.CDLL(None).syscall(add_key, b"user", b"a-bank-account", b"secret", 6, -4)  # the keyring of the user
asyncio.run(main())
"""


SCORES = """
import asyncio, sys
from skerry.providers.local import Local
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.model.spec import Spec

async def main():
    local = Local(Local.Config(state_dir=sys.argv[1] + "/state", cache_dir=sys.argv[1] + "/cache"))
    box = await AsyncSandbox.create(Spec(), local)
    try:
        print((await box.exec("cat /proc/1/oom_score_adj /proc/self/oom_score_adj")).stdout.decode())
    finally:
        await box.destroy()

asyncio.run(main())
"""


def run_as_plain_user(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*as_plain_user(), str(interpreter_for_all()), "-B", "-c", script, str(home)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": PACKAGES},
        cwd="/",
        capture_output=True,
        text=True,
    )


def test_a_plain_users_box_is_killed_first_when_memory_runs_out(plain_home: Path) -> None:
    run = run_as_plain_user(SCORES, plain_home)
    assert run.stdout.split() == ["1000", "1000"], run.stderr


def test_a_plain_users_keys_are_not_seen_in_a_box(plain_home: Path) -> None:
    run = run_as_plain_user(BOX_WITH_KEYS, plain_home)
    outside, _, inside = run.stdout.partition("and")
    assert "a-bank-account" in outside, run.stderr
    assert inside.strip() == ""


@pytest.fixture
def plain_home() -> Iterator[Path]:
    """A folder of the plain user's, for whom all that is needed is there."""
    if os.geteuid() != 0 or interpreter_for_all() is None:
        pytest.skip("only root can be another user, with a Python of this version that a plain user may start")
    with tempfile.TemporaryDirectory(prefix="skerry-plain-", dir="/tmp") as home:
        os.chown(home, PLAIN_UID, PLAIN_UID)
        yield Path(home)


@pytest.mark.timeout(300)
def test_the_whole_suite_passes_as_a_plain_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: the suite above already ran as a plain user")
    python = interpreter_for_all()
    if python is None:
        pytest.skip("no Python of this version that a plain user may start, or a checkout that only root may read")
    home = Path("/tmp") / f"skerry-plain-{os.getpid()}"
    home.mkdir(mode=0o700)
    os.chown(home, PLAIN_UID, PLAIN_UID)
    try:
        run = subprocess.run(
            [*as_plain_user(), python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
             "--rootdir", str(Path(__file__).parents[2]), "--basetemp", str(home / "t"), f"{__file__}::TestLocal"],
            env={"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": PACKAGES, "TMPDIR": str(home)},
            cwd=home, capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(run.stdout[-5000:], run.stderr[-2000:])
        assert run.returncode == 0
    finally:
        shutil.rmtree(home)
