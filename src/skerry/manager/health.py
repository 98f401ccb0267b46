"""Health of an installation: its host, its providers, its gate and its ledger, and what to do where one does not work.

What is found are plain values, for JSON and for people alike.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from skerry import providers
from skerry.config import Config
from skerry.errors import ProviderUnavailable
from skerry.ledger.ledger import folder_of
from skerry.model.records import Record
from skerry.model.spec import Network
from skerry.providers.base import Provider

DEADLINE_S = 20.0
_FRESH_S = 15.0
"""How long a finding about providers is good: to look at them may start programs."""

Find = Callable[[str], Provider | None]
"""A provider object that is there already; None has one made from the configuration."""


def _none(_name: str) -> Provider | None:
    return None


async def examine_all(config: Config, find: Find = _none) -> list[dict[str, Any]]:
    """State of each provider that is installed, and of the default one: that nobody knows it is a finding too."""
    async with asyncio.TaskGroup() as group:
        names = sorted({*providers.names(), config.provider})
        tasks = [group.create_task(examine(config, name, find)) for name in names]
    return [task.result() for task in tasks]


async def examine(config: Config, name: str, find: Find = _none) -> dict[str, Any]:
    """State of one provider. One that breaks is a finding, and no error."""
    found: dict[str, Any] = {"name": name, "available": False, "reason": "", "fix": ""}
    try:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            provider = find(name)
            if provider is None:
                provider = await stack.enter_async_context(aclosing(config.load_provider(name)))
            await provider.check()
            details = await provider.describe()
        found |= {
            "available": True,
            "isolation": provider.isolation.name.lower(),
            "capabilities": sorted(provider.capabilities),
            "details": {field: {"by": how.by, "why_not": how.why_not} for field, how in details.items()},
        }
    except ProviderUnavailable as error:
        found |= {"reason": error.reason, "fix": error.fix}
    except TimeoutError:
        found |= {"reason": f"it did not answer within {DEADLINE_S:g} s"}
    except Exception as error:
        found |= {"reason": str(error) or type(error).__name__}
    return found


class Examiner:
    """Findings about providers for many who ask: they are looked at once in a while, and by one at a time."""

    def __init__(self, config: Config, find: Find = _none) -> None:
        self._config = config
        self._find = find
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._found: list[dict[str, Any]] = []

    async def all(self, *, fresh: bool = False) -> Sequence[dict[str, Any]]:
        """Findings that are at most some seconds old; with `fresh` those of this moment."""
        asked = time.monotonic()
        async with self._lock:
            is_newer = self._until - _FRESH_S >= asked  # somebody looked while we waited
            if not is_newer and (fresh or time.monotonic() >= self._until):
                self._found = await examine_all(self._config, self._find)
                self._until = time.monotonic() + _FRESH_S
            return self._found


def host(config: Config) -> dict[str, Any]:
    """The machine, as far as sandboxes depend on it."""
    cgroup = "v1" if Path("/sys/fs/cgroup/memory").exists() else "none"
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        cgroup = "v2"
    state = Path(config.state_dir)
    nearest = next(folder for folder in (state, *state.parents) if os.path.exists(folder))
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "cgroup": cgroup,
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "state_dir": str(state),
        "state_dir_writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        "disk_free_bytes": shutil.disk_usage(nearest).free,
    }


async def gate(config: Config, records: Callable[[], Awaitable[Iterable[Record]]]) -> dict[str, Any]:
    """State of the gate; who needs one that has never run is not looked for in the registry."""
    from skerry.gate.client import GateClient  # most installations have no rules

    found: dict[str, Any] = {"running": False, "answers": False, "pid": None, "needed_by": 0, "serves": 0}
    found |= {"down": {}, "error": ""}
    client = GateClient(config)
    try:
        found |= {"running": client.is_running(), "error": client.last_error()}
        if client.has_run():
            found["needed_by"] = sum(record.spec.network is Network.RULES for record in await records())
    except OSError as error:  # the state folder is none, or not ours
        return found | {"needed_by": None, "error": str(error)}
    status = await client.status() if found["running"] else None
    if status is not None:
        down = {box.id: box.error for box in status.boxes if not box.up and box.error}
        found |= {"answers": True, "pid": status.pid, "serves": len(status.boxes), "down": down, "error": status.error}
    return found


def ledger(config: Config) -> dict[str, Any]:
    """State of the ledger: whether it is written, how large it is, and what keeps us from reading it."""
    found: dict[str, Any] = {"enabled": config.ledger.enabled, "bytes": 0, "error": ""}
    folder = folder_of(config)
    try:
        return found | {"bytes": sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".jsonl")}
    except (FileNotFoundError, NotADirectoryError):
        return found
    except OSError as error:
        return found | {"error": str(error)}
