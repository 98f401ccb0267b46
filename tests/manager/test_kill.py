"""kill -9 of real managers at named points and random moments, judged by the host itself; see `soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 200


@pytest.mark.timeout(400)
def test_managers_that_are_killed_leak_lose_and_double_nothing() -> None:
    command = [sys.executable, "-m", "tests.manager.soak", "--rounds", str(ROUNDS)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=380, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert f"{ROUNDS} rounds" in run.stdout
