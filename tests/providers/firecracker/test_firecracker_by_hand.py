"""Acts by hand on machines of Firecracker, of which there are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
from providers.by_hand import ByHandTests, each_watch, hands_on_machines

from skerry.providers.firecracker import Firecracker


class TestFirecracker(ByHandTests):
    @pytest.mark.parametrize("act", ["remove", "kill"])
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(
        self, provider: Firecracker, tmp_path: Path, act: str, who: str
    ) -> None:
        await self.judge(provider, tmp_path, who, act, hands_on_machines(provider), data=False)
