"""Docker: our boxes beside containers that are made and used by plain requests to the same daemon."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
from raw_engine import NotStartable, client_environment

from skerry.config import load
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, not_run, quicker, ratio
from skerry.sandbox.sandbox import AsyncSandbox

from .engine_work import WARM_UP, Bench, Sides, bench, creates, execs, timed
from .settings import Settings

_AT_ONCE = 20
_SIZE = 100_000_000
_NAME = "bench-file"
_BUSYBOX, _DEBIAN = "skerry-test/busybox", "skerry-test/debian"


async def docker(settings: Settings) -> list[Figure]:
    try:
        async with bench("docker", "busybox", "debian") as both:
            return [
                await _create(both, _BUSYBOX, settings),
                await _create(both, _DEBIAN, settings),
                await _execute(both, settings),
                await _many(both, settings),
                *await _files(both, settings),
                await _command_line(both, settings),
            ]
    except NotStartable as error:
        return [not_run("docker", "all", str(error))]


async def _create(both: Bench, image: str, settings: Settings) -> Figure:
    ours, raw = await creates(both, image, settings.rounds(32))
    what = f"create to first ping, {image.partition('/')[2]}"
    return ratio("docker", what, ours, raw, against="API create + start", at_most=1.15)


async def _execute(both: Bench, settings: Settings) -> Figure:
    ours, raw = await execs(both, _DEBIAN, settings.rounds(40))
    return quicker("docker", "exec /bin/true", ours, raw, against="API exec", at_least=25)


async def _many(both: Bench, settings: Settings) -> Figure:
    """Ours have answered an echo, too."""
    sides = Sides([], [])
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in range(settings.rounds(4) + 1):
            took, containers = timed(lambda: list(threads.map(both.engine.run, [_BUSYBOX] * _AT_ONCE)))
            sides.raw.append(took)
            list(threads.map(both.engine.remove, containers))
            start = time.perf_counter()
            sandboxes = await asyncio.gather(*(_create_and_echo(both) for _ in range(_AT_ONCE)))
            sides.ours.append(time.perf_counter() - start)
            await asyncio.gather(*(sandbox.destroy(volumes=True) for sandbox in sandboxes))
    what = f"{_AT_ONCE} at once, ready and echoed"
    return ratio("docker", what, sides.ours[1:], sides.raw[1:], against="API create + start")


async def _create_and_echo(both: Bench) -> AsyncSandbox:
    sandbox = await AsyncSandbox.create(both.spec(_BUSYBOX), both.provider)
    try:
        assert (await sandbox.exec(["echo", "hello"])).text == "hello\n"
    except BaseException:
        await sandbox.destroy(volumes=True)
        raise
    return sandbox


async def _files(both: Bench, settings: Settings) -> list[Figure]:
    """Packing and unpacking the engine's archives is not counted."""
    data = os.urandom(1_000_000) * (_SIZE // 1_000_000)
    tar = _tar(data)
    writes, reads = Sides([], []), Sides([], [])
    async with both.pair(_DEBIAN) as (sandbox, container):
        for _ in range(settings.rounds(12) + WARM_UP):
            writes.raw.append(timed(lambda: both.engine.put(container, "/tmp", tar))[0])
            reads.raw.append(timed(lambda: both.engine.get(container, f"/tmp/{_NAME}"))[0])
            start = time.perf_counter()
            await sandbox.files.write(_NAME, data)
            middle = time.perf_counter()
            back = await sandbox.files.read(_NAME)
            reads.ours.append(time.perf_counter() - middle)
            writes.ours.append(middle - start)
            assert back == data
            await sandbox.files.remove(_NAME)
    return [
        quicker("docker", f"100 MB {way}", sides.ours[WARM_UP:], sides.raw[WARM_UP:], against=f"API archive {verb}")
        for way, verb, sides in (("in", "PUT", writes), ("out", "GET", reads))
    ]


def _tar(data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo(_NAME)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


async def _command_line(both: Bench, settings: Settings) -> Figure:
    what, client = "skerry exec ID -- true, from a shell", shutil.which("docker")
    if client is None:
        return not_run("docker", what, "no docker client here")
    program = os.path.join(os.path.dirname(sys.executable), "skerry")
    sides = Sides([], [])
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        env = {**client_environment(both.engine), "SKERRY_STATE_DIR": folder}
        config = load({"state_dir": folder})
        config = msgspec.structs.replace(config, providers={"docker": {"host": both.engine.address}})
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(provider="docker", image=_DEBIAN)
            container = both.engine.run(_DEBIAN)
            try:
                for _ in range(settings.rounds(24) + WARM_UP):
                    sides.raw.append(_run([client, "exec", container, "true"], env))
                    sides.ours.append(_run([program, "exec", sandbox.id, "--", "true"], env))
            finally:
                both.engine.remove(container)
                await sandbox.destroy(volumes=True)
    return ratio("docker", what, sides.ours[WARM_UP:], sides.raw[WARM_UP:], against="docker exec", at_most=1.0)


def _run(argv: list[str], env: dict[str, str]) -> float:
    return timed(lambda: subprocess.run(argv, check=True, env=env, stdout=subprocess.DEVNULL))[0]
