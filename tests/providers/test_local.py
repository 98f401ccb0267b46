"""The conformance suite on real bubblewrap boxes, as whoever runs the tests, and once more as a plain user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import skerry
from skerry.providers.base import Provider
from skerry.providers.local import Local
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec
from skerry.testing.conformance import ProviderConformance

PLAIN_UID = 61_234


class TestLocal(ProviderConformance):
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
        return [Spec.of(image="debian"), Spec.of(network="bridge"), Spec.of(user="daemon")]


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
