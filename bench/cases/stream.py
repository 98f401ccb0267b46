"""Output as it comes: how fast, and in how much memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

from skerry.measure.figures import Figure, p50
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

_STALL_S = 0.5


async def stream(settings: Settings) -> list[Figure]:
    size = 256 << 20
    command = ["/usr/bin/head", "-c", str(size), "/dev/zero"]
    times, bare = [], []
    async with AsyncSandbox(provider="local") as sandbox:
        before = _reset_peak()
        for _ in range(settings.rounds(16)):
            bare.append(_through_a_pipe(command))
            times.append(await _through_the_agent(sandbox, command, size))
        growth = _peak() - before
        stalled = await _growth_while_stalled(sandbox, command)
    rate, bare_rate = size / p50(times) / 1e6, size / p50(bare) / 1e6
    return [
        Figure(
            case="stream",
            what=f"{size >> 20} MiB of output",
            measured=f"{rate:.0f} MB/s",
            limit=f"{bare_rate:.0f} MB/s through a pipe",
            value=rate,
            unit=" MB/s",
            at_least=500,
        ),
        _memory("peak memory growth while streaming", growth),
        _memory(f"the same, nobody reading for {_STALL_S} s", stalled),
    ]


def _memory(what: str, growth: int) -> Figure:
    value = growth / 1e6
    return Figure(case="stream", what=what, measured=f"{value:.1f} MB", value=value, unit=" MB", at_most=32)


async def _through_the_agent(sandbox: AsyncSandbox, command: list[str], size: int) -> float:
    start = time.perf_counter()
    count = 0
    async for _, chunk in await sandbox.start(command):
        count += len(chunk)
    assert count == size
    return time.perf_counter() - start


async def _growth_while_stalled(sandbox: AsyncSandbox, command: list[str]) -> int:
    before = _reset_peak()
    process = await sandbox.start(command)
    await asyncio.sleep(_STALL_S)
    growth = _peak() - before
    await process.kill()
    return growth


def _through_a_pipe(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        buffer = bytearray(1 << 18)
        while os.readv(process.stdout.fileno(), [buffer]):
            pass
    return time.perf_counter() - start


def _reset_peak() -> int:
    """Bytes resident now; from here on `_peak` counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
