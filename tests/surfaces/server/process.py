"""A server as a process of its own, which a test may kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from loopback import free_port

_PATIENCE_S = 30.0


class ServeProcess:
    """`skerry serve` with a folder of its own, reached on its unix socket as an admin."""

    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.config = folder / "config.toml"
        self.write({"listen": [f"127.0.0.1:{self.port}"], "e2b": False, **settings})
        self._env = {**os.environ, "SKERRY_CONFIG": str(self.config), **(env or {})}
        self._env.setdefault("SKERRY_STATE_DIR", str(folder))
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, settings: Mapping[str, Any]) -> None:
        """Settings of the server, in its file."""
        lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
        self.config.write_text("\n".join(["[server]", *lines]) + "\n")

    @property
    def socket(self) -> str:
        return str(Path(self._env["SKERRY_STATE_DIR"]) / "server.sock")

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = process = self._spawn()
        end = time.monotonic() + _PATIENCE_S
        async with self.client() as client:
            while True:
                assert process.poll() is None, self.log()
                assert time.monotonic() < end, self.log()
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    await asyncio.sleep(0.02)

    def _spawn(self) -> subprocess.Popen[bytes]:
        argv = [str(Path(sys.executable).with_name("skerry")), "serve", "--no-link"]
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.socket)
        return httpx.AsyncClient(base_url="http://skerry", timeout=30, transport=transport)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, _PATIENCE_S)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            await self.ended()


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if not isinstance(value, str) else f'"{value}"'
