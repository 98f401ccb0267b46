"""Acts by hand on machines of QEMU."""

from __future__ import annotations

from pathlib import Path

import pytest
from providers.by_hand import ByHandTests, each_watch, hands_on_machines

from skerry.providers.qemu import Qemu

pytestmark = pytest.mark.timeout(240)


class TestQemu(ByHandTests):
    @pytest.mark.parametrize("act", ["remove", "kill"])
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(self, qemu: Qemu, tmp_path: Path, act: str, who: str) -> None:
        await self.judge(qemu, tmp_path, who, act, hands_on_machines(qemu))
