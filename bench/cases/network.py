"""Connections through the gate, beside direct ones to the same servers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from skerry import config
from skerry.host import background
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, p50, ratio
from skerry.measure.memory import private_memory, processes_of
from skerry.sandbox.sandbox import AsyncSandbox
from tests.gate.world import World, running_world

from .settings import Settings

_SIZE = 100_000_000
_AT_ONCE = 500
_HOLD_S = 60.0
_TIMES = """
import json, socket, sys, time
host, port, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
times = []
for _ in range(rounds):
    start = time.perf_counter()
    with socket.create_connection((host, port), 20) as link:
        link.sendall(b"x\\n")
        assert link.recv(2)
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""
_DOWN = """
import socket, sys, time
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
start = time.perf_counter()
with socket.create_connection((host, port), 20) as link:
    fields = f"Host: {host}:{port}\\r\\nConnection: close\\r\\n"
    link.sendall(f"GET /zeros?bytes={size} HTTP/1.1\\r\\n{fields}\\r\\n".encode())
    buffer, count = bytearray(1 << 18), 0
    while number := link.recv_into(buffer):
        count += number
assert count > size
print(time.perf_counter() - start)
"""
_HOLD = """
import asyncio, sys, time
host, port, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
errors = 0

async def one(number):
    global errors
    try:
        reader, writer = await asyncio.open_connection(host, port)
        print("open", flush=True) if number == count - 1 else None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            writer.write(b"x" * 999 + b"\\n")
            await reader.readexactly(1000)
            await asyncio.sleep(1)
        writer.close()
    except Exception as error:
        errors += 1
        print(repr(error), file=sys.stderr)

async def main():
    await asyncio.gather(*(one(number) for number in range(count)))

asyncio.run(main())
print("errors", errors, flush=True)
"""


async def network(settings: Settings) -> list[Figure]:
    with running_world() as world, _installation(world) as installation:
        async with AsyncSandboxManager(installation) as manager:
            creating = await _create(manager, world, settings)
            rules = [world.rule("raw.test", "echo"), world.rule("web.test", "http")]
            sandbox = await manager.create(allow=rules)
            try:
                return [
                    await _connect(sandbox, world, settings),
                    await _down(sandbox, world, settings),
                    *await _many(sandbox, world, installation.state_dir, settings),
                    creating,
                ]
            finally:
                await manager.destroy(sandbox.id)


@contextmanager
def _installation(world: World) -> Iterator[config.Config]:
    """One of its own, which knows the names of the world."""
    with TemporaryDirectory(prefix="skerry-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        hosts = ", ".join(f'"{name}" = "{address}"' for name, address in world.hosts.items())
        Path(folder, "config.toml").write_text(f"[network]\nhosts = {{{hosts}}}\n")
        mine = {
            "SKERRY_CONFIG": f"{folder}/config.toml",
            "SKERRY_STATE_DIR": f"{folder}/state",
        }
        before = {name: os.environ.get(name) for name in mine}
        os.environ.update(mine)
        try:
            yield config.load()
        finally:
            background.end(Path(folder, "state/gate/note"), "the gate")
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


async def _connect(sandbox: AsyncSandbox, world: World, settings: Settings) -> Figure:
    ours: list[float] = []
    direct: list[float] = []
    port = str(world.ports["echo"])
    for _ in range(settings.rounds(8)):
        direct += json.loads(await _on_host(_TIMES, "127.0.0.1", port, "20"))
        ours += json.loads(await _in_box(sandbox, _TIMES, "raw.test", port, "20"))
    return _more("a connection through the gate, to the first byte", ours, direct, "directly", 3)


async def _down(sandbox: AsyncSandbox, world: World, settings: Settings) -> Figure:
    ours, direct = [], []
    arguments = (str(world.ports["http"]), str(_SIZE))
    for _ in range(settings.rounds(16)):
        direct.append(float(await _on_host(_DOWN, "127.0.0.1", *arguments)))
        ours.append(float(await _in_box(sandbox, _DOWN, "web.test", *arguments)))
    rate, bare = _SIZE / p50(ours) / 1e6, _SIZE / p50(direct) / 1e6
    return Figure(
        case="network",
        what=f"{_SIZE // 10**6} MB down",
        measured=f"{rate:.0f} MB/s",
        limit=f"{bare:.0f} MB/s directly",
        value=rate,
        unit=" MB/s",
        at_least=250,
    )


async def _many(sandbox: AsyncSandbox, world: World, state_dir: str, settings: Settings) -> list[Figure]:
    hold_s = _HOLD_S / 6 if settings.quick else _HOLD_S
    arguments = ("raw.test", str(world.ports["echo"]), str(_AT_ONCE), str(hold_s))
    process = await sandbox.start(["python3", "-c", _HOLD, *arguments])
    said, before = b"", 0
    async for _, data in process:
        said += data
        if b"open" in said and not before:
            await asyncio.sleep(hold_s / 6)
            before = _memory(sandbox.id, state_dir)
            await asyncio.sleep(hold_s / 2)
            growth = _memory(sandbox.id, state_dir) - before
    errors = int(said.split()[-1])
    what = f"{_AT_ONCE} connections at once for {hold_s:.0f} s"
    grown = Figure(
        case="network",
        what="growth of gate and agent meanwhile",
        measured=f"{growth / 1e6:.1f} MB",
        limit=f"{before / 1e6:.0f} MB in all",
        value=growth / 1e6,
        unit=" MB",
        at_most=16,
    )
    return [Figure(case="network", what=what, measured=f"{errors} errors", value=errors, at_most=0), grown]


def _memory(id: str, state_dir: str) -> int:
    gate = background.holder(Path(state_dir, "gate/note"))
    assert gate is not None
    return sum(private_memory(pid) for pid in (gate.pid, min(processes_of(id))))


async def _create(manager: AsyncSandboxManager, world: World, settings: Settings) -> Figure:
    """After one with rules, which starts the gate."""
    allow = [world.rule("web.test", "http")]
    await manager.destroy((await manager.create(allow=allow)).id)
    ours, plain = [], []
    for _ in range(settings.rounds(40)):
        for times, rules in ((plain, []), (ours, allow)):
            start = time.perf_counter()
            sandbox = await manager.create(allow=rules)
            times.append(time.perf_counter() - start)
            await manager.destroy(sandbox.id)
    return _more("create with rules", ours, plain, "without", 3)


def _more(what: str, ours: Sequence[float], limit: Sequence[float], against: str, at_most: float) -> Figure:
    """Two times, taken in turn, as the difference of their medians."""
    value = (p50(ours) - p50(limit)) * 1e3
    figure = ratio("network", what, ours, limit, against=against)
    return msgspec.structs.replace(figure, value=value, unit=" ms more", at_most=at_most)


async def _in_box(sandbox: AsyncSandbox, code: str, *arguments: str) -> str:
    done = await sandbox.exec(["python3", "-c", code, *arguments], timeout_s=120)
    if not done.ok:
        raise RuntimeError(done.stderr.decode())
    return done.text


async def _on_host(code: str, *arguments: str) -> str:
    child = await asyncio.create_subprocess_exec(
        "python3", "-c", code, *arguments, stdout=asyncio.subprocess.PIPE, env={"PATH": os.defpath}
    )
    output, _ = await child.communicate()
    return output.decode()
