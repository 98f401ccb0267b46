"""The command line's own start."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from skerry.measure.figures import Figure, ms, p50

from .settings import Settings


async def command_line(settings: Settings) -> list[Figure]:
    program = os.path.join(os.path.dirname(sys.executable), "skerry")
    ours, bare = [], []
    for _ in range(settings.rounds(40)):
        bare.append(_run([sys.executable, "-c", "pass"]))
        ours.append(_run([program, "version"]))
    return [
        Figure(
            case="cli",
            what="skerry version",
            measured=ms(p50(ours)),
            limit=f"{ms(p50(bare))} python -c pass",
            value=p50(ours) * 1e3,
            unit=" ms",
            at_most=round(2 * p50(bare) * 1e3 + 60, 1),
        )
    ]


def _run(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
