"""Kills real managers with kill -9 and looks, from outside, at what a fresh one makes of what they left.

    python -m tests.manager.soak --rounds 10000

Each round a few programs share one registry and the `local` provider, and each is killed at a named point or a random
moment; so is the zygote that forks their boxes. Then a fresh process reconciles, and the host is the witness: nothing
leaked, lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from skerry.config import Config
from skerry.errors import SkerryError
from skerry.manager.manager import AsyncSandboxManager

from .victim import OF_BUBBLEWRAP, POINTS, Plan, Victim, arm
from .world import ENDED, config_of

_MOST_KEPT = 12
_LONGEST_LIFE_S = 0.25
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PR_SET_CHILD_SUBREAPER = 36
_PLACE = b"-" * 36


class Found(Exception):
    """Something leaked, was lost or doubled."""


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        folder.chmod(0o711)  # else bubblewrap, as the user of a box, would need a mount to find the cache
        cache = {"cache_dir": str(folder / "cache")}
        state = folder / "state"
        self._config: Config = config_of(state, provider="local", providers={"local": cache})
        without = {"local": {**cache, "zygote": "off"}}
        self._without_zygote: Config = config_of(state, provider="local", providers=without)
        self._random = random.Random(seed)
        self._kept: set[str] = set()
        self._seen: set[str] = set()
        self._whole: set[str] = set()
        self.kills = 0
        self.verdicts: dict[str, int] = {}

    def begin(self) -> None:
        """Become the parent of what the dead leave, and see what a whole box looks like from outside."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        id = _in_child(self._reference)
        self._seen.add(id)
        self._whole = {kind for kind, _ in self.on_host()}
        _in_child(self._clear)
        if self.on_host():
            raise Found(f"left by a plain create and destroy: {self.on_host()}")

    def round(self, number: int, plans: list[Plan | None]) -> None:
        journal = self._folder / f"journal-{number}"
        victims = [
            self._start(Victim(self._config_for(plan), journal, seed=10 * number + index), plan)
            for index, plan in enumerate(plans)
        ]
        killer = self._start_killer()
        for pid, plan in zip(victims, plans, strict=True):
            if plan is None:
                time.sleep(self._random.uniform(0, _LONGEST_LIFE_S))  # any moment is as good as another
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.kills += 1
        os.waitpid(killer, 0)
        notes = [line.split(" ", 1) for line in _lines(journal)]
        journal.unlink(missing_ok=True)
        self._judge(notes, _in_child(lambda: self._reconcile(number)))
        _reap()

    def _start(self, victim: Victim, plan: Plan | None) -> int:
        pid = os.fork()
        if pid == 0:
            if plan is not None:
                arm(plan)
            victim.run()
        return pid

    def _config_for(self, plan: Plan | None) -> Config:
        return self._without_zygote if plan is not None and plan.point in OF_BUBBLEWRAP else self._config

    def _start_killer(self) -> int:
        """A process that kills each zygote there is a few times, at any moment; a create then goes on without one."""
        waits_s = [self._random.uniform(0, _LONGEST_LIFE_S) for _ in range(self._random.randint(0, 2))]
        pid = os.fork()
        if pid == 0:
            for wait_s in waits_s:
                time.sleep(wait_s)
                for zygote in self._zygotes():
                    with suppress(ProcessLookupError):
                        os.kill(zygote, signal.SIGKILL)
            os._exit(0)
        return pid

    def _zygotes(self) -> list[int]:
        return [pid for pid, depth in self._nameless() if depth == 1]

    def _nameless(self) -> list[tuple[int, int]]:
        """Pid of each zygote and of each fork that has no name yet, and in how many namespaces of processes it is."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                is_ours = f"{self._folder}/cache" in (entry / "mountinfo").read_text()
                if is_ours and _PLACE in words and b"bwrap" not in words[0]:
                    found.append((int(entry.name), _depth(entry)))
        return found

    def end_zygotes(self) -> None:
        for pid in self._zygotes():
            os.kill(pid, signal.SIGKILL)

    # what the fresh process does

    async def _reference(self) -> str:
        async with AsyncSandboxManager(self._config) as manager:
            return (await manager.create()).id

    async def _clear(self) -> None:
        async with AsyncSandboxManager(self._config) as manager:
            for outcome in await manager.destroy_all():
                if outcome.error is not None:
                    raise outcome.error

    def start_anew(self) -> None:
        """After a bad round: what it left must not spoil those that follow."""
        _in_child(self._clear)
        self._kept = set()

    async def _reconcile(self, number: int) -> dict[str, Any]:
        async with AsyncSandboxManager(self._config, reconcile=number % 2 == 0) as manager:
            first, second = await manager.reconcile(), await manager.reconcile()
            records = await manager.list(ENDED)
            silent = {}
            for record in records:
                if record.is_live:
                    try:
                        await (await manager.get(record.id)).ping()
                    except SkerryError as error:
                        silent[record.id] = repr(error)
            left = [str(path) for path in Path(self._config.state_dir).glob(".registry*")]
            report = {
                "states": {record.id: record.state for record in records},
                "causeless": [record.id for record in records if not record.is_live and record.cause is None],
                "silent": silent,
                "verdicts": [verdict.action for verdict in first],
                "unsettled": [f"{verdict.id} {verdict.action}: {verdict.why}" for verdict in second],
                "left": left,
            }
            if sum(record.is_live for record in records) > _MOST_KEPT:
                await self._thin_out(manager)
            return report

    async def _thin_out(self, manager: AsyncSandboxManager) -> None:
        await manager.destroy_all()
        await manager.prune(older_s=0)

    # the witness

    def on_host(self) -> set[tuple[str, str]]:
        """Kind and id of everything on the host that bears the name of a box of this run."""
        boxes = Path(self._config.state_dir, "local")
        folders = {path.name for path in boxes.glob("*-*-*-*-*")}
        self._seen |= folders
        found = {("folder", id) for id in folders}
        found |= {("process", id) for words in _command_lines() for id in self._seen.intersection(words)}
        found |= {("mount", id) for id in _UUID.findall(Path("/proc/self/mounts").read_text())}
        for path, names, _ in os.walk("/sys/fs/cgroup"):
            for name in names:
                found |= {(f"group of {path}", id) for id in _UUID.findall(name)}
        return {(kind, id) for kind, id in found if id in self._seen}

    def _judge(self, notes: list[list[str]], report: dict[str, Any]) -> None:
        states: dict[str, str] = report["states"]
        live = {id for id, state in states.items() if state != "destroyed"}
        self._seen |= states.keys()
        noted = {
            word: {rest for kind, rest in notes if kind == word} for word in ("made", "borrowed", "ending", "ended")
        }
        for action in report["verdicts"]:
            self.verdicts[action] = self.verdicts.get(action, 0) + 1
        problems = [f"a victim failed: {rest}" for kind, rest in notes if kind == "failed"]
        problems += [f"lost: {id} is {states.get(id)}" for id in noted["made"] - noted["ending"] if id not in live]
        problems += [f"not ended: {id}" for id in (noted["ended"] | noted["borrowed"]) & live]
        problems += [f"does not answer: {id} {states[id]} {error}" for id, error in report["silent"].items()]
        problems += [f"not ready: {id} is {states[id]}" for id in live if states[id] != "ready"]
        problems += [f"no cause: {id}" for id in report["causeless"]]
        problems += [f"not settled: {text}" for text in report["unsettled"]]
        problems += [f"left in the state folder: {path}" for path in report["left"]]
        problems += [f"previously live, now unknown: {id}" for id in self._kept_before(live, noted)]
        expected = set() if len(live) > _MOST_KEPT else live
        problems += self._differences(expected)
        problems += [f"a fork without a name: {pid}" for pid, depth in self._nameless() if depth > 1]
        if problems:
            raise Found("\n".join(problems))
        self._kept = expected
        if not expected:
            self._seen.clear()

    def _kept_before(self, live: set[str], noted: dict[str, set[str]]) -> set[str]:
        """What was there before the round and nobody of it ended."""
        return self._kept - live - noted["ending"]

    def _differences(self, expected: set[str]) -> Iterator[str]:
        held: dict[str, set[str]] = {}
        for kind, id in self.on_host():
            held.setdefault(id, set()).add(kind)
        for id in held.keys() - expected:
            yield f"leaked: {sorted(held[id])} of {id}"
        for id in expected:
            if held.get(id, set()) != self._whole:
                yield f"not whole: {id} has {sorted(held.get(id, set()))}, not {sorted(self._whole)}"


def _in_child(work: Callable[[], Any]) -> Any:
    """The result of an async function that runs in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with open(writing, "w") as out:
            try:
                json.dump({"result": asyncio.run(work())}, out)
            except BaseException as error:
                json.dump({"error": repr(error)}, out)
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    answered = json.loads(text or '{"error": "it died"}')
    if "error" in answered:
        raise Found(f"the fresh process failed: {answered['error']}")
    return answered["result"]


def _command_lines() -> Iterator[list[str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue


def _depth(process: Path) -> int:
    status = (process / "status").read_text()
    return len(status.partition("NSpid:")[2].partition("\n")[0].split())


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _reap() -> None:
    """What the dead left behind is our child now."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def named_plans() -> list[Plan]:
    """Each point once before and once after, and the ones that come up often a few times more."""
    often = {"store.change": 4, "store.statement": 8, "store.transaction": 10, "store.get": 3}
    return [
        Plan(point, occurrence, after)
        for point in POINTS
        for occurrence in range(1, often.get(point, 3) + 1)
        for after in (False, True)
    ]


def any_plan(chance: random.Random) -> Plan | None:
    if chance.random() < 0.5:
        return None
    return Plan(chance.choice(list(POINTS)), chance.randint(1, 6), chance.random() < 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--programs", type=int, default=3, help="how many are killed in a round, at most")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="skerry-soak-"))
    soak = Soak(folder, arguments.seed)
    began = time.monotonic()
    named = named_plans()
    failed = 0
    try:
        soak.begin()
        for number in range(arguments.rounds):
            plans: list[Plan | None] = [named[number]] if number < len(named) else []
            plans = plans or [any_plan(chance) for _ in range(chance.randint(1, arguments.programs))]
            try:
                soak.round(number, plans)
            except Found as found:
                failed += 1
                soak.start_anew()
                print(f"round {number}, seed {arguments.seed}, killed at {plans}:\n{found}", flush=True)
                if failed >= 10:
                    break
    finally:
        soak.start_anew()
        soak.end_zygotes()
        shutil.rmtree(folder)
    took = time.monotonic() - began
    print(f"{arguments.rounds} rounds, {soak.kills} kills, {failed} bad, {took:.0f} s; repaired: {soak.verdicts}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
