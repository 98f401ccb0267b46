"""Acts by hand on containers of Incus, with its own tools."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from engines.incusd import Incusd
from providers.by_hand import Act, ByHandTests, each_act, each_watch

from skerry.model.spec import SandboxId
from skerry.providers.incus import Incus

pytestmark = pytest.mark.timeout(120)


def hands_on(daemon: Incusd) -> dict[str, Act]:
    """As `incus delete -f`, `incus stop` and so on do it."""

    async def put(action: str, force: bool, id: SandboxId) -> None:
        body = {"action": action, "force": force, "timeout": 20}
        await asyncio.to_thread(daemon.ask, "PUT", f"/1.0/instances/skerry-{id}/state", body)

    async def remove(id: SandboxId) -> None:
        await put("stop", True, id)
        await asyncio.to_thread(daemon.ask, "DELETE", f"/1.0/instances/skerry-{id}")

    return {
        "remove": remove,
        "kill": partial(put, "stop", True),
        "stop": partial(put, "stop", False),
        "pause": partial(put, "freeze", False),
        "restart": partial(put, "restart", True),
    }


class TestIncus(ByHandTests):
    @each_act
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(
        self, incus: Incus, incus_daemon: Incusd, incus_image: str, tmp_path: Path, act: str, who: str
    ) -> None:
        await self.judge(incus, tmp_path, who, act, hands_on(incus_daemon), image=incus_image)
