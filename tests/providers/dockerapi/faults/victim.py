"""Programs that die at a chosen step of one call to the manager. One process is set up once, and its forks die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import msgspec
from manager import victim

from skerry.config import Config
from skerry.host import disks
from skerry.manager.manager import AsyncSandboxManager
from skerry.net.http import HttpClient
from skerry.store import Store

_TESTS = Path(__file__).parents[3]
_PATIENCE_S = 60.0
victim.POINTS.update(
    {"request": (HttpClient, "stream"), "tool": (disks, "run"), "registry": (Store, "change")},
)


class Order(msgspec.Struct):
    """What to do, and where to die: at the call number `occurrence` of a point."""

    config: Config
    verb: str
    arguments: dict[str, Any]
    point: str
    occurrence: int
    after: bool = False


class Victims:
    """Whoever kills them, from the test's side."""

    def __enter__(self) -> Self:
        path = os.pathsep.join([*sys.path, str(_TESTS), str(Path(__file__).parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.victim"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process.wait(_PATIENCE_S)

    async def kill(self, order: Order) -> bool:
        """Whether it died before its work was done. One that failed otherwise is told."""
        answer = await asyncio.wait_for(asyncio.to_thread(self._order, order), _PATIENCE_S)
        assert answer in ("killed", "done"), answer
        return answer == "killed"

    def _order(self, order: Order) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        return process.stdout.readline().decode().strip()


async def _live(order: Order) -> None:
    async with AsyncSandboxManager(order.config, reconcile=False) as manager:
        victim.arm(victim.Plan(order.point, order.occurrence, order.after))
        call: Any = getattr(manager, order.verb)
        await call(**order.arguments)


def _die(order: Order) -> str:
    """In a fork: nothing of it is left for the next."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(_live(order))
            os.write(writing, b"done")
        except BaseException as error:
            os.write(writing, repr(error)[:2000].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "killed" if code == -signal.SIGKILL else said


def main() -> None:
    for line in sys.stdin.buffer:
        print(_die(msgspec.json.decode(line, type=Order)), flush=True)


if __name__ == "__main__":
    main()
