"""Libraries that make sandboxes or containers of Docker, on the same work, each in a process of its own."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from install_peers import ENVIRONMENTS, PACKAGES, python_of
from peer_client import DATA, NAME
from raw_engine import NotStartable, RawEngine, client_environment

from skerry.measure.figures import Figure, ms, not_run, p50
from skerry.sandbox.sandbox import AsyncSandbox

from .engine_work import Bench, bench
from .settings import Settings

_IMAGE = "skerry-test/debian"
_WITH_SWEREX = "skerry-bench/swe-rex"
_CLIENT = ENVIRONMENTS.parent / "peer_client.py"
_STEPS = ("create", "echo", "write", "read", "destroy")
_ECHOES = 10

Step = Callable[[str], float]
"""Does one of the steps, and tells its seconds."""


class PeerFailed(Exception):
    """It does not do the work here."""


async def docker_peers(settings: Settings) -> list[Figure]:
    try:
        async with bench("docker", "debian") as both:
            return await _measure(both, settings)
    except NotStartable as error:
        return [not_run("docker-peers", "all", str(error))]


async def _measure(both: Bench, settings: Settings) -> list[Figure]:
    missing: dict[str, str] = {}
    times: dict[str, dict[str, list[float]]] = {"skerry": {step: [] for step in _STEPS}}
    with ExitStack() as opened:
        peers: dict[str, Step] = {}
        for peer in PACKAGES:
            if python_of(peer).exists():
                peers[peer] = opened.enter_context(_peer(peer, both.engine))
                times[peer] = {step: [] for step in _STEPS}
            else:
                missing[peer] = "not installed; bench/install_peers.py does that"
        for round in range(settings.rounds(8) + 1):
            names = list(times)
            for name in names[round % len(names) :] + names[: round % len(names)]:
                try:
                    life = _life(peers[name]) if name in peers else await _our_life(both)
                except PeerFailed as error:
                    missing[name] = str(error)
                    del times[name]
                    continue
                for step, seconds in life if round else ():  # the first round imports and fills caches
                    times[name][step].append(seconds)
    return [*(_figure(name, steps) for name, steps in times.items()), *_not_run(missing)]


def _figure(name: str, times: dict[str, list[float]]) -> Figure:
    cycle = sum(p50(times[step]) for step in ("create", "echo", "destroy"))
    measured = ", ".join(f"{step} {ms(p50(times[step]))}" for step in _STEPS)
    what = f"{name}: create, echo, destroy"
    return Figure(case="docker-peers", what=what, measured=measured, value=cycle * 1e3, unit=" ms")


def _not_run(reasons: dict[str, str]) -> list[Figure]:
    return [not_run("docker-peers", peer, reason) for peer, reason in reasons.items()]


def _life(step: Step) -> list[tuple[str, float]]:
    steps = ("create", *["echo"] * _ECHOES, "write", "read", "destroy")
    return [(each, step(each)) for each in steps]


async def _our_life(both: Bench) -> list[tuple[str, float]]:
    marks = [("", time.perf_counter())]

    def mark(step: str) -> None:
        marks.append((step, time.perf_counter()))

    sandbox = await AsyncSandbox.create(both.spec(_IMAGE), both.provider)
    try:
        mark("create")
        for _ in range(_ECHOES):
            assert (await sandbox.exec(["echo", "hello"])).text == "hello\n"
            mark("echo")
        await sandbox.files.write(NAME, DATA)
        mark("write")
        assert await sandbox.files.read(NAME) == DATA
        mark("read")
    finally:
        await sandbox.destroy(volumes=True)
    mark("destroy")
    return [(step, end - start) for (_, start), (step, end) in pairwise(marks)]


@contextmanager
def _peer(name: str, engine: RawEngine) -> Iterator[Step]:
    image = _IMAGE
    if name == "SWE-ReX":
        image = _WITH_SWEREX
        _make_image_with_swerex(engine)
    pipe = subprocess.PIPE
    argv = [str(python_of(name)), str(_CLIENT), name, image]
    env = client_environment(engine)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=said, text=True, env=env) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer() -> str:
            if not (line := stdout.readline()):
                said.seek(0)
                raise PeerFailed(f"{name} ended with code {process.wait()}: {said.read().strip().splitlines()[-1:]}")
            return line

        def step(verb: str) -> float:
            print(verb, file=stdin, flush=True)
            return float(answer())

        answer()
        yield step
        stdin.close()


def _make_image_with_swerex(engine: RawEngine) -> None:
    """It would install itself with pip at every start otherwise."""
    (packages,) = python_of("SWE-ReX").parents[1].glob("lib/python3.11/site-packages")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add(packages, "lib/python3.11/dist-packages")
        script = b"#!/usr/bin/python3\nfrom swerex.server import main\nmain()\n"
        entry = tarfile.TarInfo("bin/swerex-remote")
        entry.size, entry.mode = len(script), 0o755
        tar.addfile(entry, io.BytesIO(script))
    container = engine.run(_IMAGE)
    try:
        engine.put(container, "/usr/local", made.getvalue())
        engine.commit(container, _WITH_SWEREX)
    finally:
        engine.remove(container)
