"""Acts by hand on boxes of bubblewrap: killed from outside, or their folder removed under them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from providers.by_hand import Act, ByHandTests, each_watch

from skerry.host import cgroup, processes
from skerry.model.spec import SandboxId
from skerry.providers.local import Local
from skerry.providers.local.boxes import Box


def hands_on(provider: Local) -> dict[str, Act]:
    async def kill(id: SandboxId) -> None:
        first = Box(provider._state_dir, id).read_processes()[0]
        assert await asyncio.to_thread(processes.wait_until_dead, [first], 10, kill=True)

    async def remove(id: SandboxId) -> None:
        """One name after another, as `rm -r` does, with time to look in between."""
        box = Box(provider._state_dir, id)
        meta, running = box.read_meta(), box.read_processes()
        assert meta is not None
        for path in sorted(box.path.iterdir(), reverse=True):
            path.unlink()
            await provider.discover()
        shutil.rmtree(box.path)
        assert await asyncio.to_thread(processes.wait_until_dead, running, 10, kill=True)
        await asyncio.to_thread(cgroup.remove, [Path(group) for group in meta.groups], 10)

    return {"kill": kill, "remove": remove}


class TestLocal(ByHandTests):
    @pytest.mark.parametrize("act", ["remove", "kill"])
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(self, local: Local, tmp_path: Path, act: str, who: str) -> None:
        await self.judge(local, tmp_path, who, act, hands_on(local))
