from __future__ import annotations

import subprocess
import sys

import pytest
from escape.abuse import AbuseCases
from escape.boxes import Make
from escape.escapes import ON_X86, PROBE, EscapeCases, probe

from skerry.providers.local import Local


class TestLocal(EscapeCases, AbuseCases):
    @pytest.fixture
    def provider(self, local: Local) -> Local:
        return local

    @ON_X86
    async def test_the_probe_would_see_an_open_door(self, make: Make, local: Local) -> None:
        """A probe that is blind passes everything: without the filter it must get in somewhere."""
        allow_everything = (0x06).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
        local._host.__dict__["seccomp_program"] = allow_everything
        found = self.got_in(await probe(await make({}), "kernel"))
        assert {"A5 keyctl", "unshare user"} & set(found)


def test_the_probe_refuses_to_run_outside_a_box() -> None:
    for env in ({}, {"SKERRY_PROBE": "inside"}):
        done = subprocess.run([sys.executable, str(PROBE), "kernel"], env=env, capture_output=True, text=True)
        assert done.returncode != 0
        assert "not the inside" in done.stderr
