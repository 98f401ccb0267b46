"""Status tells the truth: what was done to a box by hand is seen by who asks, without a reconcile."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from skerry.errors import AgentUnreachable, ProviderUnavailable, SandboxGone, WrongState
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxStatus
from skerry.providers.mock import Mock


@pytest.mark.parametrize(
    ("by_hand", "state", "advice"), [("stop", State.STOPPED, "start it"), ("pause", State.PAUSED, "unpause it")]
)
async def test_a_call_to_one_that_was_stopped_by_hand_says_so_and_the_registry_too(
    manager: AsyncSandboxManager, mock: Mock, by_hand: str, state: State, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.sandbox.connection._GREETING_S", 0.05)
    sandbox = await manager.create()
    await getattr(mock, by_hand)(sandbox.id)
    with pytest.raises(WrongState, match=f"{state}: {advice}"):
        await sandbox.exec(["true"])
    assert sandbox.state is state
    assert (await manager.record(sandbox.id)).state is state
    with pytest.raises(WrongState, match=advice):
        await sandbox.exec(["true"])
    await {"stop": mock.start, "pause": mock.resume}[by_hand](sandbox.id)
    assert (await sandbox.exec(["true"])).ok
    assert (await manager.record(sandbox.id)).state is State.READY


async def test_a_call_to_one_that_was_removed_by_hand_says_that_it_is_gone_and_it_is_lost(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    sandbox = await manager.create()
    mock.faults.lost_box(sandbox.id)
    with pytest.raises(SandboxGone):
        await sandbox.ping()
    assert (sandbox.state, (await manager.record(sandbox.id)).cause) == (State.LOST, Cause.BOX_DIED)
    with pytest.raises(SandboxGone, match="it is lost"):
        await sandbox.ping()


async def test_a_call_to_one_whose_agent_is_gone_removes_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    dead, deaf = await manager.create(), await manager.create()
    mock.faults.dead_box(dead.id)
    mock.faults.dead_agent(deaf.id)
    for sandbox in (dead, deaf):
        with pytest.raises(AgentUnreachable):
            await sandbox.ping()
        assert sandbox.state is State.READY
    assert {dead.id, deaf.id} <= mock.host.boxes.keys()


async def test_a_provider_that_does_not_answer_changes_nothing_about_the_error(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await manager.create()
    await mock.stop(sandbox.id)

    async def fail() -> Mapping[SandboxId, BoxStatus]:
        raise ProviderUnavailable("mock", "it is off", fix="switch it on")

    with monkeypatch.context() as patch:
        patch.setattr(mock, "discover", fail)
        with pytest.raises(AgentUnreachable):
            await sandbox.ping()
        assert await manager.refresh() == ["mock"]
        assert (await manager.explain(sandbox.id)).state is State.READY
    assert await manager.refresh() == []
    assert (await manager.record(sandbox.id)).state is State.STOPPED


async def test_refresh_and_explain_ask_the_host(manager: AsyncSandboxManager, mock: Mock) -> None:
    stopped, dead, lost = await manager.create(), await manager.create(), await manager.create()
    await mock.stop(stopped.id)
    mock.faults.dead_box(dead.id)
    assert (await manager.explain(stopped.id)).state is State.STOPPED
    mock.faults.lost_box(lost.id)
    await manager.refresh()
    assert {record.id: record.state for record in await manager.list()} == {
        stopped.id: State.STOPPED,
        lost.id: State.LOST,
    }
    assert (await manager.record(dead.id)).cause is Cause.BOX_DIED


async def test_a_row_of_an_older_version_with_the_state_error_is_read_as_lost(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    await manager.store._database.transact(
        lambda tx: tx.execute("UPDATE sandboxes SET state = 'error' WHERE id = ?", sandbox.id)
    )
    await manager.store._database.transact(
        lambda tx: tx.execute("UPDATE events SET state = 'error', kind = 'error' WHERE sandbox = ?", sandbox.id)
    )
    assert (await manager.record(sandbox.id)).state is State.LOST
    assert {event.state async for event in manager.events()} == {State.LOST}
    assert msgspec.json.decode(b'"error"', type=State) is State.LOST
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).state is State.READY
