"""`on_a_mac.py SETTINGS ROOT`: the life of a project's machine, in a process that is to find nothing of Linux's on its
host. It writes what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from skerry.config import load
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.states import State

IMAGE = "skerry-test/on-a-mac"
END_S = 120.0
PYTHON = ["/.skerry/python/lib/ld.so", "--library-path", "/.skerry/python/lib", "/.skerry/python/bin/python3", "-IS"]


@asynccontextmanager
async def _told(folder: Path) -> AsyncIterator[None]:
    """Write what the machine and its vfkit last said if anything fails."""
    try:
        yield
    except BaseException:
        for log in sorted(folder.glob("*/vm/*.log*")):
            print(f"--- {log.name}", log.read_text(errors="replace")[-4000:], sep="\n", file=sys.stderr)
        raise


async def live(settings: dict[str, Any], root: Path) -> dict[str, Any]:
    folder = Path(settings["state_dir"])
    config = load({"provider": "vmdocker", "state_dir": str(folder / "registry")})
    config = msgspec.structs.replace(config, providers={"vmdocker": settings})
    seen: dict[str, Any] = {}
    async with AsyncSandboxManager(config) as manager, _told(folder):
        provider: Any = manager.provider("vmdocker")
        await manager.import_image(root, IMAGE)
        sandbox = await manager.create(image=IMAGE, project="mac", data=True)
        seen["hypervisor"] = sandbox.enforced["hypervisor"].by
        seen["kernel"] = (await sandbox.exec(["uname", "-r"])).text.strip()
        version = [*PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]
        seen["python"] = (await sandbox.exec(version)).text.strip()
        await sandbox.files.write("/.data/kept", "x")
        await manager.stop(sandbox.id)
        vm = provider._projects.get("mac").vm
        await provider._machines.kill(vm)
        await manager.reconcile()
        seen["state"] = (await manager.record(sandbox.id)).state
        await manager.start(sandbox.id)
        seen["kept"] = await sandbox.files.read_text("/.data/kept")
        await manager.destroy(sandbox.id, volumes=True)
        assert (await manager.record(sandbox.id)).state is State.DESTROYED
        seen["went"] = await provider._machines.wait(vm, END_S)
        await manager.reconcile()
        seen["left"] = [str(path) for path in folder.glob("*/vm")]
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(live(json.loads(sys.argv[1]), Path(sys.argv[2])))))
