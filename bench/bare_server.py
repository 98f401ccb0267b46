"""A bare endpoint of the server's framework that runs `true` and says how it ended: the limit for an exec over REST."""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def execute(request: Request) -> JSONResponse:
    body = await request.json()
    process = await asyncio.create_subprocess_exec(*body["command"], stdout=-1, stderr=-1)
    stdout, stderr = await process.communicate()
    return JSONResponse({"exit_code": process.returncode, "stdout": stdout.decode(), "stderr": stderr.decode()})


if __name__ == "__main__":
    app = Starlette(routes=[Route("/exec", execute, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="error")
