"""A project's machine with Docker in it: ready as a clone, beside one that boots."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from skerry.measure.figures import Figure, not_run, ratio
from skerry.net.http import HttpClient
from skerry.providers.vmdocker import VmDocker
from skerry.vm import launch
from skerry.vm.folder import VmFolder

from .machines import NotThere, machines
from .settings import Settings

_READY_S = 600.0


async def vmdocker(settings: Settings) -> list[Figure]:
    try:
        async with (
            machines("vmdocker", "docker", template=False, ready_timeout_s=_READY_S) as (booting, _),
            machines("vmdocker", "docker", ready_timeout_s=_READY_S) as (cloning, _),
        ):
            assert isinstance(booting, VmDocker)
            assert isinstance(cloning, VmDocker)
            await _ready(cloning, "first")
            cold, clones = [], []
            for number in range(3 if settings.quick else 6):
                cold.append(await _ready(booting, f"project-{number}"))
                clones.append(await _ready(cloning, f"project-{number}"))
    except NotThere as error:
        return [not_run("vmdocker", "all", str(error))]
    return [ratio("vmdocker", "Docker ready in a new project", clones, cold, against="our boot", at_most=0.1)]


async def _ready(provider: VmDocker, project: str) -> float:
    """Seconds until the Docker of a project that had no machine answers us."""
    start = time.perf_counter()
    address = await provider.docker_host(project, start=True)
    try:
        answer = await HttpClient(address).request("GET", "/_ping")
        assert answer.body == b"OK", answer
        return time.perf_counter() - start
    finally:
        await asyncio.to_thread(launch.kill, VmFolder(Path(address.removeprefix("unix://")).parent))
