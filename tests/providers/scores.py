"""Scores by which the kernel chooses whom to kill when memory runs out, in boxes and in a process of our own."""

from __future__ import annotations

import subprocess
import sys

from skerry.sandbox.sandbox import AsyncSandbox

_LOWER = "cat /proc/self/oom_score_adj; echo 999 > /proc/self/oom_score_adj"
_RAISE_THEN_LOWER = """
import os
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
os.setresuid(65534, 65534, 65534)
os.execv("/bin/sh", ["sh", "-c", "echo 999 > /proc/self/oom_score_adj"])
"""


def are_held() -> bool:
    """Whether what root writes is a floor: only for a root with CAP_SYS_RESOURCE, which not every machine gives."""
    done = subprocess.run([sys.executable, "-c", _RAISE_THEN_LOWER], timeout=20, capture_output=True)
    return done.returncode != 0


async def check_first_to_be_killed(sandbox: AsyncSandbox, user: str | None = None) -> None:
    """A process of the box has the highest score, and lowers it only where nothing holds it on this machine."""
    seen = await sandbox.exec(_LOWER, user=user)
    assert (seen.text, seen.ok) == ("1000\n", not are_held())
