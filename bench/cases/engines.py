"""The other engines that speak Docker's API: gVisor as Docker's runtime, and Podman. Figures, no targets."""

from __future__ import annotations

import shutil

from raw_engine import NotStartable

from skerry.measure.figures import Figure, not_run, quicker, ratio

from .engine_work import bench, creates, execs
from .settings import Settings

_IMAGE = "skerry-test/busybox"


async def gvisor(settings: Settings) -> list[Figure]:
    if shutil.which("runsc") is None:
        return [not_run("gvisor", "all", "no runsc here")]
    return await _figures("gvisor", "docker", settings, runtime="runsc")


async def podman(settings: Settings) -> list[Figure]:
    return await _figures("podman", "podman", settings)


async def _figures(case: str, engine: str, settings: Settings, runtime: str = "") -> list[Figure]:
    try:
        async with bench(engine, "busybox", runtime=runtime) as both:
            made = await creates(both, _IMAGE, settings.rounds(16))
            ran = await execs(both, _IMAGE, settings.rounds(16))
    except NotStartable as error:
        return [not_run(case, "all", str(error))]
    return [
        ratio(case, "create to first ping", made.ours, made.raw, against="API create + start"),
        quicker(case, "exec /bin/true", ran.ours, ran.raw, against="API exec"),
    ]
