"""Zygotes and their forks, seen from outside, without asking who uses them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from skerry.model.spec import Spec
from skerry.providers.local import Local, boxes
from skerry.sandbox.sandbox import AsyncSandbox

PLACE = b"-" * 36
_TRIES = 100
_PAUSE_S = 0.05


def zygotes_of(cache: Path) -> list[int]:
    """Pids of those that serve with the root that is in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"bwrap" not in words[0] and PLACE in words and str(cache) in (entry / "mountinfo").read_text():
                found.append(int(entry.name))
    return found


def first_of(local: Local, id: str) -> int:
    return boxes.Box(local._state_dir, id).read_processes()[0].pid


def is_forked(local: Local, id: str) -> bool:
    return Path(f"/proc/{first_of(local, id)}/cmdline").read_bytes().endswith(b"\0zygote\0")


async def warm_up(local: Local) -> None:
    """Make boxes until one is forked."""
    for _ in range(_TRIES):
        sandbox = await AsyncSandbox.create(Spec(), local)
        try:
            if is_forked(local, sandbox.id):
                return
        finally:
            await sandbox.destroy()
        await asyncio.sleep(_PAUSE_S)
    raise AssertionError("there is no zygote")
