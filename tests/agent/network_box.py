"""An agent in a network namespace of its own, as providers make it for boxes with rules: first process, no capability,
loopback and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from skerry.agent.bundle import GUEST
from skerry.agent.network import AgentNetwork
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest

RESOLVER = "nameserver 127.0.0.1\noptions timeout:5 attempts:1\n"
PREPARE = """
import os, sys
from skerry.agent.guest import setup
setup.raise_loopback()
with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as file:
    file.write(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""


def why_none() -> str | None:
    """Why there can be no such box on this host; None where there can."""
    missing = [tool for tool in ("unshare", "bwrap") if shutil.which(tool) is None]
    return f"there is no {' and no '.join(missing)}" if missing else None


class NetworkBox(Guest):
    """A box of an unprivileged user; one whose `first_port` is 1024 was not made for rules. With `wish_s` its agent
    is as impatient as that."""

    def __init__(
        self,
        python: str = sys.executable,
        *,
        first_port: int = 0,
        descriptors: int = 1024,
        wish_s: float | None = None,
        **config: Any,
    ) -> None:
        super().__init__(python, rlimits={"nofile": descriptors}, **config)
        self._first_port = first_port
        self._wish_s = wish_s

    def __enter__(self) -> Self:
        if self._wish_s is not None:
            self.program = self.home / "agent"
            shutil.copytree(GUEST, self.program)
            source = self.program / "network.py"
            source.write_text(source.read_text().replace("_WISH_S = 30\n", f"_WISH_S = {self._wish_s}\n"))
        resolver = self.home / "resolv.conf"
        resolver.write_text(RESOLVER)
        box = ("bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--die-with-parent", "--uid", "1000",
               "--gid", "1000", "--ro-bind", "/", "/", "--bind", str(self.home), str(self.home), "--dev", "/dev",
               "--proc", "/proc", "--ro-bind", str(resolver), os.path.realpath("/etc/resolv.conf"), "--")  # fmt: skip
        prepare = (sys.executable, "-c", PREPARE, str(self._first_port))
        self.around = ("unshare", "--user", "--map-root-user", "--net", "--", *prepare, *box)
        return super().__enter__()

    @asynccontextmanager
    async def network(self) -> AsyncIterator[AgentNetwork]:
        """The box's network, on a stream of its own."""
        client = await self.client()
        try:
            yield await AgentNetwork.open(client)
        finally:
            client.close()


async def run(sandbox: AsyncSandbox, code: str, *args: str) -> str:
    """What a Python program in the box prints."""
    result = await sandbox.exec([sys.executable, "-I", "-c", code, *args], timeout_s=30)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().strip()
