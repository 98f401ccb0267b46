"""A large file into the box and out of it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from skerry.measure.figures import Figure, p50, ratio
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

_SIZE = 100_000_000
_NAME = "bench-file"


async def files(settings: Settings) -> list[Figure]:
    data = os.urandom(1_000_000) * (_SIZE // 1_000_000)
    writes, reads, direct_writes, direct_reads = [], [], [], []
    async with AsyncSandbox(provider="local") as sandbox:
        kind = (await sandbox.exec(["stat", "-f", "-c", "%T", "."])).text.strip()
        with tempfile.TemporaryDirectory(dir="/dev/shm" if kind == "tmpfs" else None) as folder:
            direct = Path(folder, _NAME)
            for _ in range(settings.rounds(24)):
                direct.unlink(missing_ok=True)
                await sandbox.files.remove(_NAME, missing_ok=True)
                direct_writes.append(_timed(lambda: direct.write_bytes(data)))
                start = time.perf_counter()
                await sandbox.files.write(_NAME, data)
                writes.append(time.perf_counter() - start)
                direct_reads.append(_timed(direct.read_bytes))
                start = time.perf_counter()
                back = await sandbox.files.read(_NAME)
                reads.append(time.perf_counter() - start)
            assert back == data
    figures = [
        ratio("files", "100 MB in", writes, direct_writes, against=f"write ({kind})", at_most=1.6),
        ratio("files", "100 MB out", reads, direct_reads, against=f"read ({kind})", at_most=1.6),
    ]
    for figure, times in zip(figures, (writes, reads), strict=True):
        figure.measured += f" ({_SIZE / 1e6 / p50(times):.0f} MB/s)"
    return figures


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
