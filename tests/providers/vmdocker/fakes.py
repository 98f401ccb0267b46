"""Machines without a kernel of their own: the Docker of each is the tests' own daemon, and dies for it alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engines.api import Refused, ask, ask_json

from skerry.errors import AgentUnreachable, CreateFailed
from skerry.providers.base import Enforcement
from skerry.providers.vmdocker.engine import SOCKET
from skerry.providers.vmdocker.machines import ProjectMachines


class FakeMachines(ProjectMachines):
    """Any number of objects may stand for the same machines, as in several processes."""

    def __init__(self, address: str) -> None:
        self._socket = Path(address.removeprefix("unix://"))
        self.starts: list[str] = []
        self.networks: list[bool] = []
        """Whether each start was one with a network card."""
        self.fails = False
        self.no_network: str | None = None

    async def check(self) -> None:
        return

    async def describe(self) -> Mapping[str, Enforcement]:
        return {"isolation": Enforcement(by="nothing: it is a fake")}

    async def why_no_network(self) -> str | None:
        return self.no_network

    async def start(self, folder: Path, name: str, *, network: bool) -> None:
        self.starts.append(name)
        self.networks.append(network)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "disk").touch()
        (folder / "name").write_text(name)
        await asyncio.sleep(0)  # where others come in between
        (folder / "running").touch()
        if self.fails:
            raise CreateFailed("Docker did not come up", log=self.last_words(folder))
        (folder / SOCKET).symlink_to(self._socket)

    def is_running(self, folder: Path) -> bool:
        return (folder / "running").exists()

    async def tell(self, folder: Path, *, lifetime_s: float | None, idle_s: float | None) -> None:
        if not self.is_running(folder):
            raise AgentUnreachable("it is off")
        if (folder / "hung").exists():
            raise AgentUnreachable("nothing answers")
        (folder / "end").write_text(json.dumps([lifetime_s, idle_s]))

    async def wait(self, folder: Path, timeout_s: float) -> bool:
        return not self.is_running(folder)

    async def kill(self, folder: Path) -> None:
        """The processes of its boxes go with it, and their containers stay on its disk."""
        for name in ("running", SOCKET, "end", "hung"):
            (folder / name).unlink(missing_ok=True)
        if not (folder / "name").exists():
            return
        for id in self._containers(f"skerry.project={(folder / 'name').read_text()}"):
            with suppress(Refused):
                ask(self._address, "POST", f"/containers/{id}/kill")

    def wipe(self) -> None:
        """What lies on the disks of machines goes with them."""
        for id in self._containers("skerry=vmdocker", all="1"):
            with suppress(Refused):
                ask(self._address, "DELETE", f"/containers/{id}", {"force": "1", "v": "1"})
        filters = json.dumps({"label": ["skerry=vmdocker", "skerry.project"]})
        for volume in ask_json(self._address, "GET", "/volumes", {"filters": filters})["Volumes"] or []:
            ask(self._address, "DELETE", f"/volumes/{volume['Name']}")

    @property
    def _address(self) -> str:
        return f"unix://{self._socket}"

    def _containers(self, label: str, **query: str) -> list[str]:
        found = ask_json(self._address, "GET", "/containers/json", {"filters": json.dumps({"label": [label]}), **query})
        return [each["Id"] for each in found]

    def last_words(self, folder: Path) -> str:
        return "the last words of the console"

    def told(self, folder: Path) -> list[float | None]:
        """After how many seconds it will end, and after how many without anybody."""
        found: list[float | None] = json.loads((folder / "end").read_text())
        return found
