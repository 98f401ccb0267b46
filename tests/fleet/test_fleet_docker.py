"""A fleet of real containers: three phases from a file, seen, commanded, scaled, changed, hurt and ended."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from manager.world import config_of

from skerry.fleet.broadcast import MemberOutcome
from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.fleet.plan import Kind
from skerry.manager.manager import AsyncSandboxManager

FILE = """
name: crew
provider: docker
image: IMAGE
defaults: {memory: 128M}
phases:
  - name: store
    labels: {tier: back}
    files: {seed.txt: "the seed"}
    setup: [cp seed.txt ready.txt]
    healthcheck: {command: test -s ready.txt, interval: 100ms}
  - name: workers
    count: 2
    wait_for: [store]
    labels: {tier: back}
    setup: ['echo "$SKERRY_INDEX of $SKERRY_COUNT" > who']
  - name: web
    wait_for: [workers]
    network: bridge
"""
STORE, WEB = "agent-store-001", "agent-web-001"
WORKERS = ["agent-workers-001", "agent-workers-002"]


class Crew:
    """The fleet of a file that may change, and the daemon that its members are in."""

    def __init__(self, manager: AsyncSandboxManager, daemon: Daemon, file: str) -> None:
        self._manager = manager
        self._daemon = daemon
        self.file = file

    @property
    def fleet(self) -> AsyncFleet:
        return AsyncFleet(self._manager, load_fleet("fleet.yaml", self.file))

    async def ids(self) -> dict[str, str]:
        return {name: status.id for name, status in (await self.fleet.status()).items()}

    def containers(self) -> list[str]:
        """The sandboxes of which there is a container, running or not."""
        query = {"all": "1", "filters": json.dumps({"label": ["skerry.sandbox"]})}
        found = ask_json(self._daemon.address, "GET", "/containers/json", query)
        return sorted(each["Labels"]["skerry.sandbox"] for each in found)

    def inspect(self, id: str) -> Any:
        return ask_json(self._daemon.address, "GET", f"/containers/skerry-{id}/json")

    def kill(self, id: str) -> None:
        ask(self._daemon.address, "POST", f"/containers/skerry-{id}/kill")


@pytest.fixture
async def crew(
    docker_daemon: Daemon, docker_images: dict[str, str], own_registry: None, tmp_path: Path
) -> AsyncIterator[Crew]:
    providers = {"docker": {"host": docker_daemon.address, "cache_dir": str(tmp_path / "cache")}}
    async with AsyncSandboxManager(config_of(tmp_path / "state", provider="docker", providers=providers)) as manager:
        crew = Crew(manager, docker_daemon, FILE.replace("IMAGE", docker_images["busybox"]))
        yield crew
        await manager.destroy_all()
        for volume in await manager.volumes():  # the members' data
            await manager.remove_volume(volume.name)
    assert crew.containers() == []


def said(outcomes: dict[str, MemberOutcome]) -> dict[str, str]:
    return {name: outcome.result.text for name, outcome in outcomes.items() if outcome.result is not None}


async def test_three_phases_are_seen_and_commanded_as_one_and_leave_nothing(crew: Crew) -> None:
    fleet = crew.fleet
    report = await fleet.up()
    assert report.ok, report
    statuses = await fleet.status()
    assert list(statuses) == [STORE, WEB, *WORKERS]
    assert all(status.agent is not None and status.agent.memory_mb > 0 for status in statuses.values())
    (network,) = crew.inspect(statuses[WEB].id)["NetworkSettings"]["Networks"].values()
    assert {name: status.ip for name, status in statuses.items() if status.ip} == {WEB: network["IPAddress"]}
    assert said(await fleet.exec("workers", ["cat", "who"])) == dict(
        zip(WORKERS, ["1 of 2\n", "2 of 2\n"], strict=True)
    )
    assert list(said(await fleet.exec("tier=back", ["true"]))) == [STORE, *WORKERS]
    codes = await fleet.exec_on_all("test -e ready.txt")
    assert {name: outcome.ok for name, outcome in codes.items()} == {name: name == STORE for name in statuses}
    assert sorted(await fleet.down()) == [STORE, WEB, *WORKERS]
    assert await fleet.status() == {}
    assert crew.containers() == []


async def test_scaling_and_a_changed_file_touch_only_the_difference(crew: Crew) -> None:
    fleet = crew.fleet
    await fleet.up()
    first = await crew.ids()
    assert (await fleet.scale(workers=3)).ok
    assert (await crew.ids()).keys() - first.keys() == {"agent-workers-003"}
    assert (await fleet.scale(workers=1)).ok
    assert await crew.ids() == {name: id for name, id in first.items() if name != WORKERS[1]}
    crew.file = crew.file.replace("the seed", "another seed")
    planned = {change.name: change.kind for change in (await crew.fleet.plan()).changes}
    assert planned == {STORE: Kind.REPLACE, WORKERS[0]: Kind.KEEP, WORKERS[1]: Kind.CREATE, WEB: Kind.KEEP}
    assert (await crew.fleet.up()).ok
    then = await crew.ids()
    assert {name for name, id in then.items() if first[name] != id} == {STORE, WORKERS[1]}
    assert said(await fleet.exec(STORE, ["cat", "ready.txt"])) == {STORE: "another seed"}
    assert crew.containers() == sorted(then.values())


async def test_a_container_that_is_killed_by_hand_is_told_and_repaired(crew: Crew) -> None:
    fleet = crew.fleet
    await fleet.up()
    before = await crew.ids()
    crew.kill(before[WORKERS[0]])
    hurt = (await fleet.status())[WORKERS[0]]
    assert hurt.agent is None
    assert hurt.error
    outcome = (await fleet.exec_on_all(["true"]))[WORKERS[0]]
    assert outcome.error is not None
    assert (await fleet.up()).ok
    assert all(status.agent is not None for status in (await fleet.status()).values())
    after = await crew.ids()
    assert {name for name in after if after[name] != before[name]} <= {WORKERS[0]}
    assert all(outcome.ok for outcome in (await fleet.exec_on_all(["true"])).values())
    assert crew.containers() == sorted(after.values())


async def test_a_member_whose_successor_fails_is_as_it_was_with_its_data(crew: Crew) -> None:
    await crew.fleet.up()
    before = await crew.ids()
    assert all(outcome.ok for outcome in (await crew.fleet.exec("workers", "echo kept > /.data/f")).values())
    right, crew.file = crew.file, crew.file.replace("> who'", "> who; test $SKERRY_INDEX != 2'")
    report = await crew.fleet.up()
    assert not report.ok
    assert "agent-workers-002" in report.phases["workers"].errors
    assert await crew.ids() == before
    assert crew.containers() == sorted(before.values())
    crew.file = right
    assert said(await crew.fleet.exec("workers", "cat /.data/f who")) == {
        name: f"kept\n{index} of 2\n" for index, name in enumerate(WORKERS, start=1)
    }
    assert (await crew.fleet.plan()).is_empty
