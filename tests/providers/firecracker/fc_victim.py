"""`python fc_victim.py FOLDER ID POINT`: makes a box, or starts it if it is there, and is killed at POINT: right after
it has asked Firecracker for that, before it has noted the processes that it launched, or once it has."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from providers.firecracker.fc_world import provider_on

from skerry.host import uids
from skerry.model.spec import SandboxId, Spec
from skerry.vm import launch
from skerry.vm.firecracker.api import Api
from skerry.vm.folder import VmFolder

NOTE, LAUNCH = "note", "launch"
POINTS = (NOTE, LAUNCH, "PUT /boot-source", "PUT /actions", "PATCH /vm", "PUT /snapshot/create", "PUT /snapshot/load")


def _die_at(point: str) -> None:
    ask, start, note = Api._ask, launch.start, VmFolder.write_processes

    async def asked(self: Api, method: str, path: str, *rest: Any) -> Any:
        answer = await ask(self, method, path, *rest)
        if f"{method} {path}" == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def started(*arguments: Any) -> Any:
        vm = start(*arguments)
        if point == LAUNCH:
            os.kill(os.getpid(), signal.SIGKILL)
        return vm

    def noted(*arguments: Any) -> None:
        if point == NOTE:
            os.kill(os.getpid(), signal.SIGKILL)
        note(*arguments)

    VmFolder.write_processes = noted  # type: ignore[method-assign, assignment]
    Api._ask = asked  # type: ignore[method-assign]
    launch.start = started


async def _main(folder: str, id: str, point: str) -> None:
    provider = provider_on(Path(folder), jailed=uids.are_available())
    await provider.check()
    is_there = SandboxId(id) in await provider.discover()
    _die_at(point)
    make = provider.start if is_there else provider.create
    await make(SandboxId(id), Spec(provider="firecracker", data=False))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
