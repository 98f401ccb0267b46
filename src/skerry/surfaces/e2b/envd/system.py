"""Calls about the sandbox as a whole."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from skerry.errors import SkerryError
from skerry.surfaces.e2b import answers
from skerry.surfaces.e2b.envd.context import envd_of
from skerry.surfaces.e2b.envd.files import refusal


def routes() -> list[BaseRoute]:
    return [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/envs", envs, methods=["GET"]),
    ]


async def health(_request: Request) -> Response:
    """Tell that the sandbox runs: whoever routes requests told already if it does not."""
    return Response(status_code=204)


async def metrics(request: Request) -> Response:
    """Tell what the sandbox uses now."""
    sandbox = envd_of(request).sandbox
    try:
        found = await sandbox.metrics()
    except SkerryError as error:
        return refusal(request, error)
    return answers.answer(
        {
            "ts": int(time.time()),
            "cpu_count": int(sandbox.spec.cpus or 1),
            "cpu_used_pct": round(found.cpu_percent, 2),
            "mem_used": found.memory_bytes,
            "mem_total": sandbox.spec.memory or 0,
            "disk_used": found.disk.used,
            "disk_total": found.disk.total,
        }
    )


async def envs(request: Request) -> Response:
    """Tell the environment of the sandbox's processes, as far as its maker chose it."""
    envd = envd_of(request)
    return answers.answer({**envd.sandbox.spec.env, **envd.envs})
