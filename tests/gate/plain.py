"""`plain FOLDER WORLD NAME=PORT...`: the clients in a `local` box of whoever runs this; what failed, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from skerry.manager.manager import AsyncSandboxManager

from .clients import run_all
from .installation import installed
from .world import TRUST, World


async def main(folder: str, place: str, *ports: str) -> None:
    world = World(Path(place), {name: int(port) for name, _, port in (each.partition("=") for each in ports)})
    with installed(Path(folder), world) as config:
        async with AsyncSandboxManager(config) as manager:
            try:
                sandbox = await manager.create(allow=world.allow, env=TRUST)
                print(json.dumps(await run_all(sandbox, world)))
            finally:
                await manager.destroy_all()


asyncio.run(main(*sys.argv[1:]))
