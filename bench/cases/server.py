"""Calls to `skerry serve`, beside a bare endpoint of the same framework and beside the embedded manager, and many
clients at once."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import msgspec

from skerry import config
from skerry.config import ServerSettings
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.model.records import Owner
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.store import Store
from skerry.surfaces.server.listen import run
from skerry.surfaces.server.server import Server

from .settings import Settings

T = TypeVar("T")
_AT_ONCE = 8
_UP_S = 20.0
_MANY = 1000
_CLIENTS = 200
_BOXES = 8
_LOAD_S = 60.0
_QUICK_LOAD_S = 10.0
_PATIENCE_S = 60.0
_LINK = re.compile(rb"http://(127\.0\.0\.1:\d+)/#token=(\S+)")
_BARE = str(Path(__file__).parents[1] / "bare_server.py")


async def server(settings: Settings) -> list[Figure]:
    """Exec and create over REST, 200 clients at once, and a list of 1,000."""
    with TemporaryDirectory(prefix="skb-", dir="/tmp") as folder:
        with served(folder) as (url, token, pid), httpx.Client(headers=bearer(token), timeout=30) as client:
            figures = [
                *_exec(settings, url, token, client),
                *await _create(settings, url, client, folder),
                *await _load(settings, url, token, pid, client),
            ]
        return [*figures, *await _list(settings, Path(folder))]


def _exec(settings: Settings, url: str, token: str, client: httpx.Client) -> list[Figure]:
    if shutil.which("hey") is None:
        return []
    id = made(client, url)
    ours, bare = [], []
    port = free_port()
    with running([sys.executable, _BARE, str(port)], port):
        for _ in range(settings.rounds(3)):
            path = f"{url}/v1/sandboxes/{id}/exec"
            ours.append(_seconds_each(settings, path, '{"command": ["/bin/true"]}', token))
            bare.append(_seconds_each(settings, f"http://127.0.0.1:{port}/exec", '{"command": ["/bin/true"]}', ""))
    remove(client, url, id)
    figure = ratio("server", "exec over REST, 8 at once", ours, bare, against="bare endpoint that spawns", at_most=1.33)
    return [figure]


def _seconds_each(settings: Settings, url: str, body: str, token: str) -> float:
    """Time for a call, of many at once."""
    header = ["-H", f"Authorization: Bearer {token}"] if token else []
    count = str(_AT_ONCE * settings.rounds(100))
    command = [
        "hey",
        "-n",
        count,
        "-c",
        str(_AT_ONCE),
        "-m",
        "POST",
        "-T",
        "application/json",
        *header,
        "-d",
        body,
        url,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if f"[200]\t{count} responses" not in said:
        raise RuntimeError(said)
    match = re.search(r"Requests/sec:\s*([\d.]+)", said)
    assert match is not None
    return 1 / float(match[1])


async def _create(settings: Settings, url: str, client: httpx.Client, folder: str) -> list[Figure]:
    rest, embedded = [], []
    loaded = config.load({"state_dir": f"{folder}/embedded"})
    async with AsyncSandboxManager(loaded) as manager:
        for round in range(settings.rounds(30) + 1):
            start = time.perf_counter()
            sandbox = await manager.create()
            await sandbox.exec(["/bin/true"])
            embedded.append(time.perf_counter() - start)
            await sandbox.destroy(grace_s=0)
            start = time.perf_counter()
            id = made(client, url)
            execute(client, url, id)
            rest.append(time.perf_counter() - start)
            remove(client, url, id)
            if round == 0:
                rest, embedded = [], []
    more = p50(rest) - p50(embedded)
    told = f"{ms(p50(rest))} / {ms(p50(embedded))}"
    what = "create and first exec over REST, beyond embedded"
    return [Figure(case="server", what=what, measured=told, value=more * 1e3, unit=" ms", at_most=5)]


async def _load(settings: Settings, url: str, token: str, pid: int, client: httpx.Client) -> list[Figure]:
    """Many clients at once, each with a connection of its own, on commands and files of a few sandboxes."""
    ids = [made(client, url) for _ in range(_BOXES)]
    lasts_s = _QUICK_LOAD_S if settings.quick else _LOAD_S
    times: dict[str, list[float]] = {"exec": [], "file": []}
    errors: list[str] = []
    # without the certificates of the host, which each client would load for itself
    options: dict[str, Any] = {
        "verify": False,
        "base_url": url,
        "headers": bearer(token),
        "timeout": _PATIENCE_S,
        "trust_env": False,
    }

    async def one(number: int, end: float) -> None:
        path = f"/v1/sandboxes/{ids[number % _BOXES]}"
        file = f"{path}/files/content?path=/tmp/{number}"
        async with httpx.AsyncClient(**options) as own:
            while time.monotonic() < end:
                start = time.perf_counter()
                try:
                    if number % 2:
                        answer = await own.post(f"{path}/exec", json={"command": ["/bin/true"]})
                        said = answer.status_code == 200 and answer.json()["exit_code"] == 0
                    else:
                        sent = os.urandom(1024)
                        (await own.put(file, content=sent)).raise_for_status()
                        answer = await own.get(file)
                        said = answer.content == sent
                    if not said:
                        errors.append(f"{answer.status_code}: {answer.text[:200]}")
                except httpx.HTTPError as error:
                    errors.append(repr(error))
                times["exec" if number % 2 else "file"].append(time.perf_counter() - start)

    await asyncio.gather(*(one(number, time.monotonic() + 1) for number in range(_CLIENTS)))  # all is loaded then
    for each in (*times.values(), errors):
        each.clear()
    before = _memory(pid)
    await asyncio.gather(*(one(number, time.monotonic() + lasts_s) for number in range(_CLIENTS)))
    grown = (_memory(pid) - before) / 2**20
    for id in ids:
        remove(client, url, id)
    figures = [_spread(f"{_CLIENTS} clients at once, {what}", times[what]) for what in times]
    calls = len(times["exec"]) + 2 * len(times["file"])
    failed = f"{len(errors)} of {calls} calls, {calls / lasts_s:.0f} a second"
    figures.append(
        _figure(f"{_CLIENTS} clients at once, failed", failed, len(errors), "", 0, note="; ".join(errors[:3]))
    )
    figures.append(_figure(f"{_CLIENTS} clients at once, memory", f"{before / 2**20:.0f} MiB", grown, " MiB more", 16))
    return figures


def _spread(what: str, times: list[float]) -> Figure:
    p99 = sorted(times)[int(len(times) * 0.99)]
    return Figure(case="server", what=what, measured=f"{ms(p50(times))} p50", limit=f"{ms(p99)} p99", value=None)


def _memory(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _list(settings: Settings, folder: Path) -> list[Figure]:
    async with _listed(folder) as client:
        figures = []
        for limit, most in ((_MANY, 50), (100, None)):
            times = []
            for _ in range(settings.rounds(80)):
                start = time.perf_counter()
                answer = await client.get(f"/v1/sandboxes?limit={limit}")
                times.append(time.perf_counter() - start)
                assert answer.content.count(b'"doomed"') == limit
            what = f"list {limit:,} of {_MANY:,} sandboxes"
            figures.append(_figure(what, ms(p50(times)), p50(times) * 1e3, " ms", most))
        return figures


@asynccontextmanager
async def _listed(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A server with many sandboxes, no two with the same spec, and a client of it."""
    port = free_port()
    loaded = config.load({"state_dir": f"{folder}/many", "provider": "mock"})
    listens = ServerSettings(listen=(f"127.0.0.1:{port}",), rate=100_000)
    loaded = msgspec.structs.replace(loaded, max_sandboxes=0, server=listens, tool="server")
    store = await Store.open(loaded.database)
    async with AsyncSandboxManager(loaded, store=store, providers={"mock": Mock()}) as manager:
        for number in range(_MANY):
            spec = Spec.of(provider="mock", labels={"number": str(number)}, ports=[3000], lifetime="2h")
            enforced = {limit: {"by": "simulation", "why_not": ""} for limit in ("cpus", "disk", "memory", "pids")}
            await store.reserve(
                new_id(), spec, owner=Owner("bench", 1, 1), boot_id="", state=State.STOPPED, enforced=enforced
            )
        server, ready = Server(manager), asyncio.Event()
        task = asyncio.create_task(run(server, ready))
        try:
            await asyncio.wait_for(ready.wait(), _UP_S)
            token = (await server.access.issue()).text
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, headers=bearer(token), timeout=30, trust_env=False) as client:
                yield client
        finally:
            task.cancel()
            await asyncio.wait([task])
            await server.aclose()
    await store.aclose()


def _figure(what: str, measured: str, value: float, unit: str, at_most: float | None, note: str = "") -> Figure:
    return Figure(case="server", what=what, measured=measured, value=value, unit=unit, at_most=at_most, note=note)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def made(client: httpx.Client, url: str) -> str:
    answer = client.post(f"{url}/v1/sandboxes", json={"lifetime": "10m"})
    answer.raise_for_status()
    id: str = answer.json()["id"]
    return id


def execute(client: httpx.Client, url: str, id: str) -> None:
    client.post(f"{url}/v1/sandboxes/{id}/exec", json={"command": ["/bin/true"]}).raise_for_status()


def remove(client: httpx.Client, url: str, id: str) -> None:
    client.delete(f"{url}/v1/sandboxes/{id}?grace_s=0").raise_for_status()


@contextmanager
def served(folder: str, more: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, int]]:
    """A real server with more variables, a token for it, and its process."""
    port = free_port()
    env = {**os.environ, "SKERRY_STATE_DIR": f"{folder}/state", "SKERRY_SERVER__RATE": "100000", **(more or {})}
    command = [str(Path(sys.executable).parent / "skerry"), "serve", "--listen", f"127.0.0.1:{port}"]
    with running(command, port, env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        match = None
        while match is None:
            match = _LINK.search(process.stderr.readline())
        yield f"http://127.0.0.1:{port}", match[2].decode(), process.pid


@contextmanager
def running(command: list[str], port: int, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, **options) as process:
        try:
            end = time.monotonic() + _UP_S
            while not _listens(port):
                if time.monotonic() > end or process.poll() is not None:
                    raise RuntimeError(f"{command[1]} does not come up")
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def seconds_of(work: Callable[[], T]) -> tuple[T, float]:
    """What some work gives, and how long it took."""
    start = time.perf_counter()
    given = work()
    return given, time.perf_counter() - start
