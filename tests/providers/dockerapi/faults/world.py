"""One installation on a daemon that may be killed, and what the host itself says of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import leftovers
from engines.api import Refused, ask, ask_json
from engines.daemons import Daemon, Dockerd
from manager.world import ENDED, config_of

from skerry.config import Config
from skerry.errors import WrongState
from skerry.host import disks
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Record
from skerry.model.states import State
from skerry.providers.dockerapi import containers
from skerry.sandbox.sandbox import AsyncSandbox

_STATES = {State.READY: "running", State.PAUSED: "paused", State.STOPPED: "exited"}
_PATIENCE_S = 15.0
WORK, DATA = "/home/user/kept", "/.data/kept"


class World:
    def __init__(self, daemon: Daemon, image: str, cache: Path, folder: Path) -> None:
        self.daemon = daemon
        self.image = image
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="sk-fault-", dir="/tmp"))  # a socket's path is short
        self._cache = cache
        self._written: set[str] = set()

    @property
    def socket(self) -> Path:
        return Path(self.daemon.address.removeprefix("unix://"))

    def config(self, address: str | None = None, **settings: Any) -> Config:
        """Of a program; all of them share one registry, whichever way they reach the daemon."""
        mine = {"host": address or self.daemon.address, "cache_dir": str(self._cache), "disk": "16M", **settings}
        return config_of(self.folder, provider="docker", providers={"docker": mine})

    def manager(self, address: str | None = None, **settings: Any) -> AsyncSandboxManager:
        return AsyncSandboxManager(self.config(address, **settings), reconcile=False)

    async def ask(self, method: str, path: str, query: dict[str, str] | None = None, **options: Any) -> Any:
        return await asyncio.to_thread(ask_json, self.daemon.address, method, path, query, **options)

    async def revive(self) -> None:
        if self.daemon._process is None:
            await asyncio.to_thread(self.daemon.start)

    def restart_host(self) -> None:
        """What a restart leaves: no process, nothing mounted, and nothing in the folders that lie in memory."""
        self.daemon.kill()
        for id in self.folders():
            unmount(id)
            shutil.rmtree(disks.MOUNTS / id)
        leftovers.clear(self.daemon.folder)
        if isinstance(self.daemon, Dockerd) and self.daemon._containerd is not None:
            self.daemon._containerd.wait(_PATIENCE_S)
            self.daemon._containerd = None
        for name in ("c/state", "x"):
            shutil.rmtree(self.daemon.folder / name)
        self.daemon.start()

    async def make(self, manager: AsyncSandboxManager, **options: Any) -> AsyncSandbox:
        """A sandbox with something to lose."""
        sandbox = await manager.create(image=self.image, **options)
        for path in (WORK, DATA):
            await sandbox.files.write(path, sandbox.id)
        self._written.add(sandbox.id)
        return sandbox

    async def reconciled(self) -> dict[str, Record]:
        """What another program makes of it, compared with the host: the records of all that ever were."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(containers, "ABANDONED_S", -1)  # whoever made one is dead by now
            return await self._reconciled()

    async def _reconciled(self) -> dict[str, Record]:
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._reconcile_once()
            except (AssertionError, WrongState):  # the daemon may still be at what the dead have asked of it
                if time.monotonic() > end:
                    raise

    async def _reconcile_once(self) -> dict[str, Record]:
        async with self.manager() as other:
            await other.reconcile()
            records = {record.id: record for record in await other.list(ENDED)}
            await self._compare(records)
            again = await other.reconcile()
            assert again == [], f"a second reconcile had still to do: {again}"
            for record in records.values():
                if record.state is State.READY:
                    await self._check_files(await other.get(record.id))
        return dict(records)

    async def _compare(self, records: dict[Any, Record]) -> None:
        there = {id: record for id, record in records.items() if record.state in _STATES}
        containers = await self.containers()
        assert containers == {f"skerry-{id}": _STATES[record.state] for id, record in there.items()}
        lost = {id for id, record in records.items() if record.state is State.LOST}
        assert self.folders() - lost == there.keys()
        for id, record in records.items():
            assert len(agents(id)) == (record.state in (State.READY, State.PAUSED)), (id, record)
            if record.state in (State.READY, State.PAUSED):
                assert mounts(id) == 1, (id, record)
            elif record.state not in _STATES and record.state is not State.LOST:
                assert not (disks.MOUNTS / id).exists(), (id, record)
        assert not list(self._cache.glob(".snapshot-*"))
        assert await self.data_of() == {id for id, record in records.items() if _keeps_data(record)}

    async def _check_files(self, sandbox: AsyncSandbox) -> None:
        """What was written before is there."""
        if sandbox.id in self._written:
            for path in (WORK, DATA):
                assert await sandbox.files.read(path) == sandbox.id.encode()

    async def containers(self) -> dict[str, str]:
        listed = await self.ask("GET", "/containers/json", {"all": "1"})
        return {name.removeprefix("/"): each["State"] for each in listed for name in each["Names"]}

    async def images(self) -> set[str]:
        """Names; of what has none, the id."""
        listed = await self.ask("GET", "/images/json")
        names = {each["Id"]: set(each.get("RepoTags") or []) - {"<none>:<none>"} for each in listed}
        return {name for id, found in names.items() for name in found or {id}}

    def folders(self) -> set[str]:
        return {path.name for path in (self.folder / "docker").glob("*-*-*-*-*")}

    async def remove_runtime(self, *, but_the_mark: bool = False) -> None:
        for name in await self.volumes():
            if name.startswith("skerry-runtime-") and not (but_the_mark and name.endswith("-whole")):
                await self.ask("DELETE", f"/volumes/{name}")

    async def volumes(self) -> set[str]:
        return {volume["Name"] for volume in (await self.ask("GET", "/volumes"))["Volumes"] or []}

    async def data_of(self) -> set[str]:
        """The ids of the sandboxes whose data is there."""
        found = (await self.ask("GET", "/volumes"))["Volumes"] or []
        labels = [volume["Labels"] or {} for volume in found]
        return {each["skerry.sandbox"] for each in labels if each.get("skerry.volume") == "data"}

    async def aclose(self) -> None:
        """Nothing of a test is there for the next one, whatever came of it."""
        await self.revive()
        for each in await self.ask("GET", "/containers/json", {"all": "1"}):
            with suppress(Refused):
                await asyncio.to_thread(_remove, self.daemon.address, each["Id"])
        for volume in (await self.ask("GET", "/volumes"))["Volumes"] or []:
            if (volume["Labels"] or {}).get("skerry.volume") != "runtime":
                with suppress(Refused):
                    await self.ask("DELETE", f"/volumes/{volume['Name']}", {"force": "1"})
        for image in await self.images() - {f"{self.image}:latest"}:
            with suppress(Refused):
                await self.ask("DELETE", f"/images/{image}", {"force": "1"})
        for id in self.folders():
            await asyncio.to_thread(unmount, id)
            shutil.rmtree(disks.MOUNTS / id, ignore_errors=True)
        shutil.rmtree(self.sockets)


def _remove(address: str, container: str) -> None:
    with suppress(Refused):
        ask(address, "POST", f"/containers/{container}/unpause")
    ask(address, "DELETE", f"/containers/{container}", {"force": "1", "v": "1"})


def _keeps_data(record: Record) -> bool:
    """Nobody could ask for what was never handed out."""
    return record.is_live or not (record.volumes or record.cause is Cause.CREATION_FAILED)


def agents(id: str) -> list[int]:
    """The processes of this host that were started as the agent of a box."""
    return processes("start.py", id)


def processes(program: str, argument: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if argument in words and any(Path(word).name.startswith(program) for word in words):
                found.append(int(entry.name))
    return found


def unmount(id: str) -> None:
    while mounts(id):
        subprocess.run(["umount", "--lazy", str(disks.MOUNTS / id / "home")], check=True, timeout=10)


def mounts(id: str) -> int:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sum(line.split()[1].startswith(f"{disks.MOUNTS}/{id}/") for line in lines)
