"""Twenty processes on one registry, two installations on one host, and owners that are told apart."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Owner
from skerry.store import Store

from . import racers
from .world import ENDED, Folders, config_of

COUNT = 20
ROOT = Path(__file__).parents[2]


def race(scenario: str, folder: Path, count: int = COUNT) -> list[Any]:
    command = [sys.executable, "-m", "tests.manager.racers", scenario, str(folder), str(count)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    answers = json.loads(run.stdout)
    assert [answer["error"] for answer in answers if "error" in answer] == []
    return [answer["result"] for answer in answers]


def most_at_once(folder: Path, log: str) -> int:
    return max(itertools.accumulate(int(line) for line in (folder / log).read_text().split()))


async def test_twenty_processes_do_not_pass_the_limit(tmp_path: Path) -> None:
    results = race("pass_the_limit", tmp_path)
    store = await Store.open(str(tmp_path / "registry.db"))
    events = await store.events(limit=100_000)
    live = itertools.accumulate({"created": 1, "destroyed": -1}.get(event.kind, 0) for event in events)
    assert max(live) == racers.LIMIT
    assert sum(result["refused"] for result in results) > 0
    records = await store.list(ENDED)
    assert {record.id for record in records if record.is_live} == {id for result in results for id in result["mine"]}
    assert set(os.listdir(tmp_path / "boxes")) == {record.id for record in records if record.is_live}
    assert len({record.id for record in records}) == len(records)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    await store.aclose()


async def test_twenty_processes_do_not_promise_more_memory_than_there_may_be(tmp_path: Path) -> None:
    results = race("pass_the_promise", tmp_path)
    made = {id for result in results for id in result["made"]}
    assert len(made) == racers.SHARES
    assert sum(result["refused"] for result in results) == 4 * COUNT - racers.SHARES
    assert set(os.listdir(tmp_path / "boxes")) == made


async def test_one_key_in_twenty_processes_is_one_sandbox(tmp_path: Path) -> None:
    results = race("ask_by_one_key", tmp_path)
    assert {id for ids in results for id in ids} == set(os.listdir(tmp_path / "boxes"))
    assert len(os.listdir(tmp_path / "boxes")) == 1


async def test_twenty_processes_destroy_the_same_ones_quietly_and_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, provider="folders")
    boxes = Folders(tmp_path / "boxes")
    async with AsyncSandboxManager(config, providers={"folders": boxes}) as manager:
        for _ in range(8):
            await manager.create()
        assert race("destroy_the_same", tmp_path) == [[]] * COUNT
        assert await manager.count() == 0
        kinds = [event.kind async for event in manager.events()]
        assert kinds.count("destroyed") == kinds.count("doomed") == 8
    assert not boxes.boxes()


async def test_twenty_processes_boot_no_more_than_allowed_at_once(tmp_path: Path) -> None:
    results = race("boot_at_once", tmp_path)
    assert len(os.listdir(tmp_path / "boxes")) == sum(map(len, results)) == 2 * COUNT
    assert most_at_once(tmp_path, "boots") <= racers.BOOTS


async def test_twenty_processes_that_reconcile_leave_each_other_s_sandboxes_alone(tmp_path: Path) -> None:
    kept = race("do_anything", tmp_path)
    assert set(os.listdir(tmp_path / "boxes")) == set(kept)
    store = await Store.open(str(tmp_path / "registry.db"))
    assert {record.id: record.state for record in await store.list()} == dict.fromkeys(kept, "ready")
    await store.aclose()


async def test_two_installations_with_real_boxes_leave_each_other_alone(tmp_path: Path) -> None:
    a = AsyncSandboxManager(config_of(tmp_path / "a", provider="local"))
    b = AsyncSandboxManager(config_of(tmp_path / "b", provider="local"))
    async with a, b:
        try:
            await a.create()
            two = await b.create()
            assert await a.reconcile() == []
            assert await b.reconcile() == []
            await a.destroy_all()
            assert (await two.exec(["true"])).ok
            assert a.store.instance != b.store.instance
        finally:
            await a.destroy_all()
            await b.destroy_all()


# who lives


def test_a_process_is_told_from_the_one_that_had_its_pid_before() -> None:
    me = identity.this_process()
    assert identity.is_alive(me) is True
    assert identity.is_alive(Owner(me.host, me.pid, me.started - 1)) is False
    assert identity.is_alive(Owner(me.host, 2**22 + 7, 1)) is False


def test_a_process_of_an_earlier_boot_is_dead_and_one_elsewhere_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    me = identity.this_process()
    machine = me.host.partition("/")[0]
    assert identity.is_alive(Owner(f"{machine}/another-boot", me.pid, me.started)) is False
    assert identity.is_alive(Owner("another-machine/another-boot", me.pid, me.started)) is None


def test_a_process_that_ended_and_was_not_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(identity.host(), child.pid, identity._start_time(child.pid) or 0)
    assert identity.is_alive(owner) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_alive(owner) is False
    child.communicate()


def test_a_process_in_another_container_of_this_host_is_not_taken_for_dead() -> None:
    """Two containers that share a state folder: same boot, but each sees only its own pids."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a pid namespace of its own needs root and unshare")
    me = identity.this_process()
    code = (
        f"from skerry.manager import identity; print(identity.is_alive(identity.Owner{(me.host, me.pid, me.started)}))"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.strip() == "None"
