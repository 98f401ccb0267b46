"""The package's limits, with the least of all spawners: a C program, where there is a compiler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from skerry.measure import limits
from skerry.measure.limits import Spawner

_SOURCE = Path(__file__).parent / "spawner.c"


@cache
def _spawner() -> Sequence[str]:
    compiler = shutil.which("cc")
    if compiler is None:
        return limits.IN_PYTHON
    binary = Path(mkdtemp(prefix="skerry-bench-"), "spawner")
    subprocess.run([compiler, "-O2", "-o", str(binary), str(_SOURCE)], check=True)
    return [str(binary)]


def clean_up() -> None:
    if _spawner.cache_info().currsize and len(_spawner()) == 1:
        shutil.rmtree(Path(_spawner()[0]).parent)


def bare_box() -> Spawner:
    box = limits.bare_box(_spawner())
    if box is None:
        raise SystemExit("bench: bwrap is missing; install the package bubblewrap")
    return box


def bare_process() -> Spawner:
    return limits.bare_process(_spawner())
