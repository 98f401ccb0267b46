from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from escape.abuse import AbuseCases
from escape.attempts import INSIDE, PYTHON, STARTER, meaning, of_the_host, tried
from escape.boxes import Make
from escape.escapes import ON_X86, CatalogueCases, EscapeCases
from escape.strangers import StrangerCases
from escape.takeover import TakeoverCases
from providers.test_local import PACKAGES, PLAIN_UID, as_plain_user, interpreter_for_all

from skerry.model.spec import SpecOptions
from skerry.providers.base import Provider
from skerry.providers.local import Local


class TestLocal(EscapeCases, AbuseCases, TakeoverCases, StrangerCases):
    """Boxes that a zygote forks."""

    column = "local, root" if os.geteuid() == 0 else "local, user"
    with_disk: ClassVar[SpecOptions] = {"disk": "64M"}

    @pytest.fixture
    def provider(self, warm: Local) -> Local:
        return warm

    @ON_X86
    async def test_the_probe_would_see_an_open_door(self, make: Make, local: Local, tmp_path: Path) -> None:
        """A probe that is blind passes everything: without the filter it must get in at many places, by each ABI that
        this kernel has."""
        allow_everything = (0x06).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
        local._host.__dict__["seccomp_program"] = allow_everything
        with of_the_host(tmp_path) as facts:
            ends = await tried(make, facts, PYTHON, limits_memory=False, classes="ABG")
        found = {id for id, end in ends.items() if meaning(id, end) == "open"}
        assert {"A08", "A46", "A55", "B17", "G13", "G17"} <= found, sorted(found)
        assert len(found) >= 25, sorted(found)
        if "B01" in found:  # a kernel with calls of 32 bits
            assert {"B04", "B05", "B06"} <= found


class TestLocalOfBubblewrap(EscapeCases, TakeoverCases, StrangerCases):
    """Boxes that bubblewrap makes, where there is no zygote."""

    column = "local, root" if os.geteuid() == 0 else "local, user"

    @pytest.fixture
    def provider(self, local: Local, monkeypatch: pytest.MonkeyPatch) -> Local:
        monkeypatch.setattr(local, "_zygotes", None)
        return local


class TestLocalAsUser(CatalogueCases):
    """The boxes of a plain user, with root to see that the host is as it was."""

    column = "local, user"

    @pytest.fixture
    def provider(self, local: Local) -> Local:
        return local

    @pytest.fixture
    def home(self) -> Iterator[Path]:
        if os.geteuid() != 0:
            pytest.skip("not root: the boxes above are already those of a plain user")
        home = Path("/tmp") / f"skerry-plain-escape-{os.getpid()}"
        home.mkdir(mode=0o700)
        os.chown(home, PLAIN_UID, PLAIN_UID)
        yield home
        shutil.rmtree(home)

    @pytest.fixture(autouse=True)
    def _run_there(self, home: Path) -> None:
        self.home = home

    async def ends(self, make: Make, provider: Provider, facts: Sequence[str]) -> dict[str, str]:
        return await self._tried("none", facts)

    async def network_ends(self, make: Make, facts: Sequence[str]) -> dict[str, str]:
        return await self._tried("rules", facts)

    async def _tried(self, network: str, facts: Sequence[str]) -> dict[str, str]:
        python = interpreter_for_all()
        if python is None:
            pytest.skip("no Python of this version that a plain user may start, or a checkout that only root may read")
        packages = os.pathsep.join([PACKAGES, str(INSIDE.parents[1])])
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": packages, "TMPDIR": str(self.home)}
        argv = [*as_plain_user(), python, "-B", "-m", "escape.plain", str(self.home), network, *facts]
        run = await asyncio.to_thread(subprocess.run, argv, env=env, cwd=self.home, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        ends: dict[str, str] = json.loads(run.stdout)
        return ends


def test_the_probe_refuses_to_run_outside_a_box() -> None:
    for env in ({}, {"SKERRY_PROBE": "inside"}):
        starter = STARTER.replace("/home/user", str(INSIDE.parent))
        argv = [sys.executable, "-c", starter, "A", "", "/none", "1", "none", "1"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.returncode != 0
        assert "not the inside" in done.stderr
