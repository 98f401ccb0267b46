"""A fleet of real boxes: three phases from a file, used, scaled, killed and ended, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manager.victim import OF_BUBBLEWRAP
from manager.world import until
from state_folders import boxes

import skerry
from skerry.fleet.events import PhaseState
from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.manager.handles import Handles
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import PHASE_LABEL, Record

FILE = """
name: crew
provider: local
defaults: {memory: 256M}
phases:
  - name: store
    files: {data/seed.txt: "the seed"}
    setup:
      - cp data/seed.txt data/ready.txt
      - [sh, -c, "test -s data/ready.txt"]
  - name: workers
    count: 3
    wait_for: [store]
    env: {GREETING: hello}
    setup: ['echo "$GREETING $SKERRY_INDEX of $SKERRY_COUNT in $SKERRY_PHASE of $SKERRY_FLEET" > who']
  - name: web
    count: 2
    wait_for: [workers]
"""


@pytest.fixture
async def manager(
    folder: Path, own_registry: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncSandboxManager]:
    monkeypatch.setenv("SKERRY_STATE_DIR", str(folder))
    async with AsyncSandboxManager() as manager:
        yield manager
        await manager.destroy_all()


async def test_three_phases_are_set_up_used_scaled_and_ended(manager: AsyncSandboxManager, folder: Path) -> None:
    fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
    report = await fleet.up()
    assert report.ok, report
    statuses = await fleet.status()
    assert len(statuses) == 6
    assert all(status.agent is not None and status.agent.memory_mb > 0 for status in statuses.values())
    said = await fleet.exec("workers", ["cat", "who"])
    assert [each.result.text for each in said.values() if each.result] == [
        f"hello {n} of 3 in workers of crew\n" for n in (1, 2, 3)
    ]
    assert (await fleet.exec_on_agent("agent-store-001", "cat data/ready.txt")).text == "the seed"
    assert (await fleet.scale(workers=4)).ok
    peers = await fleet.exec_on_agent("agent-workers-001", "echo $SKERRY_PEERS")
    assert peers.text.strip().split(",") == [f"agent-workers-00{n}" for n in (1, 2, 3, 4)]
    assert (await fleet.scale(workers=1)).ok
    assert len(boxes(folder)) == 4
    assert len(await fleet.down()) == 4
    assert boxes(folder) == []


async def test_a_box_that_is_killed_by_hand_is_made_anew(manager: AsyncSandboxManager, folder: Path) -> None:
    fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
    await fleet.up()
    before = {name: status.id for name, status in (await fleet.status()).items()}
    await manager.provider("local").destroy(before["agent-web-002"])
    assert (await fleet.status())["agent-web-002"].error == "agent unreachable"
    assert (await fleet.up()).ok
    after = {name: status.id for name, status in (await fleet.status()).items()}
    assert {name for name in after if after[name] != before[name]} == {"agent-web-002"}
    assert set(after.values()) == set(boxes(folder))


async def test_a_failed_setup_leaves_no_box_of_its_phase(manager: AsyncSandboxManager, folder: Path) -> None:
    fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE.replace("> who", "> who; test $SKERRY_INDEX != 2")))
    report = await fleet.up()
    assert report.phases["workers"].state is PhaseState.FAILED
    assert "setup command 1 of 1 ended with 1" in report.phases["workers"].errors["agent-workers-002"]
    assert report.phases["web"].state is PhaseState.SKIPPED
    assert list(await fleet.status()) == ["agent-store-001"]
    assert len(boxes(folder)) == 1


async def started(folder: Path, *plan: str, text: str = FILE) -> asyncio.subprocess.Process:
    """Another program that starts the fleet."""
    file = folder / "fleet.yaml"
    file.write_text(text)
    argv = [sys.executable, "-m", "fleet.victim", str(file), *plan]
    pipe, env = subprocess.PIPE, dict(os.environ)
    if plan and plan[0] in OF_BUBBLEWRAP:
        env["SKERRY_PROVIDERS__LOCAL__ZYGOTE"] = "off"
    return await asyncio.create_subprocess_exec(*argv, cwd=Path(__file__).parents[1], env=env, stdout=pipe, stderr=pipe)


KILLS = [
    "store 1 before", "workers 1 before", "workers 3 before", "web 2 before",
    "store.reserve 3 after", "store.boot_slot 2 before", "store.change 2 after", "store.change 4 before",
    "store.change 6 after", "provider.create 2 before", "provider.create 4 after", "box.spawn 5 after",
    "box.meta 3 before", "box.hello 2 before",
]  # fmt: skip


@pytest.mark.parametrize("kill", KILLS)
async def test_up_after_a_kill_in_the_middle_of_up_comes_to_the_same_end(
    manager: AsyncSandboxManager, folder: Path, kill: str
) -> None:
    process = await started(folder, *kill.split())
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == -signal.SIGKILL, said.decode()
    fleet = AsyncFleet(manager, load_fleet(folder / "fleet.yaml"))
    report = await fleet.up()
    assert report.ok, report
    statuses = await fleet.status()
    assert len(statuses) == 6
    assert all(status.agent is not None for status in statuses.values())
    assert {status.id for status in statuses.values()} == set(boxes(folder))
    said_all = await fleet.exec("workers", ["cat", "who"])
    assert all(each.ok for each in said_all.values())


async def test_programs_that_start_one_fleet_at_once_make_each_member_once(
    manager: AsyncSandboxManager, folder: Path
) -> None:
    programs = [await started(folder, "none", "1", "before") for _ in range(3)]
    said = [await asyncio.wait_for(program.communicate(), 50) for program in programs]
    assert [out.decode() for out, _ in said] == ["ready ready ready\n"] * 3, said
    statuses = await (await AsyncFleet.open(manager, "crew")).status()
    assert {status.id for status in statuses.values()} == set(boxes(folder))
    assert len(statuses) == 6
    created = [event for event in await manager.store.events() if event.kind == "created"]
    assert len(created) == 6


@pytest.mark.parametrize("seen", [1, 2, 4])
async def test_a_fleet_that_another_program_starts_can_be_ended_at_any_time(
    manager: AsyncSandboxManager, folder: Path, monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    terminate, asked = Handles.terminate, list[str]()

    async def noted(self: Handles, record: Record, grace_s: float | None) -> None:
        asked.append(record.spec.labels[PHASE_LABEL])
        await terminate(self, record, grace_s)

    monkeypatch.setattr(Handles, "terminate", noted)
    endless = FILE + "    setup: [[sleep, infinity]]\n"  # so that it is still at it, however slow we are
    program = await started(folder, "none", "1", "before", text=endless)
    fleet = await AsyncFleet.open(manager, "crew")

    async def has_begun() -> bool:
        return len(await fleet.status()) >= seen

    await until(has_begun)
    await fleet.down()
    out, errors = await asyncio.wait_for(program.communicate(), 50)
    assert "stopped" in out.decode(), errors.decode()
    assert "web" not in asked  # its maker would take the end of the setup for a failure
    assert await fleet.status() == {}
    assert boxes(folder) == []


def test_the_sync_twin_does_the_same(folder: Path, own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_STATE_DIR", str(folder))
    with skerry.SandboxManager() as manager:
        fleet = skerry.Fleet(manager, skerry.load_fleet("fleet.yaml", FILE))
        try:
            assert fleet.up().ok
            assert fleet.spec is not None
            assert fleet.member("agent-store-001").files.read_text("data/ready.txt") == "the seed"
            opened = skerry.Fleet.open(manager, fleet.name)
            assert all(outcome.ok for outcome in opened.exec_on_all(["true"]).values())
        finally:
            assert len(fleet.down()) == 6
    assert boxes(folder) == []
