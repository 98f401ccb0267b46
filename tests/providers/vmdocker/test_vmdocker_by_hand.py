"""Acts by hand on containers in a project's machine, with the Docker in there."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.daemons import Daemon
from providers.by_hand import ByHandTests, each_act, each_watch
from providers.dockerapi.test_engine_by_hand import hands_on
from providers.vmdocker.conftest import IMAGE

from skerry.providers.vmdocker import VmDocker

pytestmark = pytest.mark.timeout(120)


class TestVmDocker(ByHandTests):
    @each_act
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(
        self, vmdocker: VmDocker, docker_daemon: Daemon, tmp_path: Path, act: str, who: str
    ) -> None:
        await self.judge(vmdocker, tmp_path, who, act, hands_on(docker_daemon), image=IMAGE, project="by-hand")
