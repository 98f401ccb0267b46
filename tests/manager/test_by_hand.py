"""Whatever others do to boxes by hand, in whatever order: who watches comes to the same end as who looks once."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from providers.by_hand import FOLLOWER, GLANCES, NOBODY, Act, ByHandTests, Verdict, each_act, each_watch, watched_by

from skerry.errors import NotFound, WrongState
from skerry.model.spec import SandboxId
from skerry.providers.base import BoxState
from skerry.providers.mock import Host, Mock

from .world import HostClock, config_of, opened_manager


def hands_on(mock: Mock) -> dict[str, Act]:
    async def remove(id: SandboxId) -> None:
        mock.faults.lost_box(id)

    async def restart(id: SandboxId) -> None:
        if mock.host.box(id).state is BoxState.PAUSED:
            await mock.resume(id)
        await mock.stop(id)
        await mock.start(id)

    return {"remove": remove, "kill": mock.stop, "stop": mock.stop, "pause": mock.pause, "restart": restart}


class TestMock(ByHandTests):
    @each_act
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(self, mock: Mock, tmp_path: Path, act: str, who: str) -> None:
        await self.judge(mock, tmp_path, who, act, hands_on(mock))


ACTS = st.lists(st.tuples(st.sampled_from(["remove", "stop", "pause", "restart"]), st.booleans()), max_size=6)


@given(acts=ACTS, who=st.sampled_from([FOLLOWER, GLANCES]))
def test_a_sequence_of_acts_ends_the_same_watched_or_not(acts: list[tuple[str, bool]], who: str) -> None:
    """After some of them whoever watches has the time to see it, after others the next one comes at once."""

    async def end(who: str) -> Verdict:
        mock = Mock(host=Host())
        hands = hands_on(mock)
        with tempfile.TemporaryDirectory() as folder:
            async with opened_manager(config_of(Path(folder)), mock, HostClock(), reconcile=False) as manager:
                sandbox = await manager.create()
                async with watched_by(who, manager, mock, sandbox.id):
                    for act, is_seen in acts:
                        try:
                            await hands[act](sandbox.id)
                        except (NotFound, WrongState):
                            continue  # nobody can do that to it now
                        if is_seen:
                            await asyncio.sleep(0)
                            await manager.store.last_event()
                await manager.reconcile()
                record = await manager.record(sandbox.id)
                await manager.destroy(sandbox.id)
                return record.state, record.cause

    assert asyncio.run(end(who)) == asyncio.run(end(NOBODY))


pytestmark = pytest.mark.timeout(120)
