"""What the registry costs: on a create, in memory, to list, to repair after a restart, and to a command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from skerry.config import Config, load
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, ms, p50
from skerry.model.spec import Spec
from skerry.pool.pool import AsyncSandboxPool
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

_AT_ONCE = 8


async def registry(settings: Settings) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        config = msgspec.structs.replace(load({"state_dir": folder}), max_sandboxes=0)
        return [
            await _overhead(config, settings),
            await _pool(config, settings),
            await _listing(config),
            *await _many(config, 50 if settings.quick else 300),
            await _command_line(config, settings),
        ]


async def _overhead(config: Config, settings: Settings) -> Figure:
    ours, bare = [], []
    async with AsyncSandboxManager(config) as manager:
        provider = manager.provider("local")
        for round in range(settings.rounds(60) + 2):
            start = time.perf_counter()
            direct = await AsyncSandbox.create(Spec(), provider)
            middle = time.perf_counter()
            managed = await manager.create()
            if round > 1:  # the first rounds find out about the host
                bare.append(middle - start)
                ours.append(time.perf_counter() - middle)
            await asyncio.gather(direct.destroy(), managed.destroy())
    more = (p50(ours) - p50(bare)) * 1e3
    return _figure("create through the manager, beyond the provider", f"{more:.2f} ms", more, " ms", 5)


async def _pool(config: Config, settings: Settings) -> Figure:
    times = []
    async with AsyncSandboxManager(config) as manager, AsyncSandboxPool(manager, size=4, max_boots=2) as pool:
        for _ in range(settings.rounds(60)):
            await pool.wait_for_full(30)
            start = time.perf_counter()
            sandbox = await pool.acquire()
            times.append(time.perf_counter() - start)
            await sandbox.destroy()
    return _figure("pool acquire, warm", ms(p50(times)), p50(times) * 1e3, " ms", 2)


async def _listing(config: Config) -> Figure:
    async with AsyncSandboxManager(config) as manager:
        await _fill(manager, 1000, "mock")
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert len(await manager.list()) == 1000
            times.append(time.perf_counter() - start)
        before = _resident()
        handles = [await manager.get(record.id) for record in await manager.list()]
        await asyncio.gather(*(handle.ping() for handle in handles))
        each = (_resident() - before) / 1000 / len(handles)
        await manager.destroy_all()
    figure = _figure("list of 1,000", ms(p50(times)), p50(times) * 1e3, " ms", 30)
    figure.note = f"and {each:.0f} kB for each in use, the mock's own box included"
    return figure


async def _many(config: Config, count: int) -> list[Figure]:
    async with AsyncSandboxManager(config) as manager:
        await _fill(manager, count, "local")
        before = _resident()
        handles = [await manager.get(record.id) for record in await manager.list()]
        await asyncio.gather(*(handle.ping() for handle in handles))
        each = (_resident() - before) / 1000 / count
    start = time.perf_counter()
    async with AsyncSandboxManager(config) as manager:
        verdicts = await manager.reconcile()
        restarted = time.perf_counter() - start
        assert not verdicts
        await manager.destroy_all()
    return [
        _figure("manager memory for each live sandbox, its stream open", f"{each:.0f} kB", each, " kB", 100),
        _figure(f"restart to consistent with {count} live", ms(restarted), restarted, " s", 3),
    ]


async def _command_line(config: Config, settings: Settings) -> Figure:
    program = os.path.join(os.path.dirname(sys.executable), "skerry")
    env = {**os.environ, "SKERRY_STATE_DIR": config.state_dir, "SKERRY_FORKSERVER": "off"}
    imports = "import skerry.cli.exec, skerry.cli.job, skerry.providers.local, skerry.store.sqlite"
    start_only = [sys.executable, "-c", f"{imports}\nskerry.providers.names()"]
    async with AsyncSandboxManager(config) as manager:
        sandbox = await manager.create()
        ours, bare = [], []
        for _ in range(settings.rounds(30)):
            bare.append(_run(start_only, env))
            ours.append(_run([program, "exec", sandbox.id, "--", "true"], env))
        await sandbox.destroy()
    more = (p50(ours) - p50(bare)) * 1e3
    figure = _figure("skerry exec ID -- true by itself, beyond the start", f"{more:.1f} ms", more, " ms", 15)
    figure.limit = f"{ms(p50(bare))} its imports alone"
    return figure


async def _fill(manager: AsyncSandboxManager, count: int, provider: str) -> None:
    numbers = iter(range(count))

    async def create_each() -> None:
        for _ in numbers:
            await manager.create(provider=provider)

    await asyncio.gather(*(create_each() for _ in range(_AT_ONCE)))


def _run(argv: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, env=env, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def _figure(what: str, measured: str, value: float, unit: str, at_most: float) -> Figure:
    return Figure(case="registry", what=what, measured=measured, value=value, unit=unit, at_most=at_most)
