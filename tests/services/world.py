"""Addresses of sandboxes and their forwarders, as the host shows them."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skerry.host import processes
from skerry.host.processes import Process

PATIENCE_S = 30.0
MODULE = "skerry.manager.forwarder"


def forwarders(id: str) -> list[Process]:
    """Processes that serve the addresses of a sandbox."""
    return list(processes.find_by_arguments((MODULE, id), 2))


async def eventually(is_so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)


def fetch(address: str, path: str = "/") -> bytes:
    """What an HTTP server says at an address, in the end; it may still be starting."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
                data: bytes = answer.read()
                return data
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def is_refused(address: str) -> bool:
    """Whether nobody listens at an address."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def notes(state_dir: Path) -> list[str]:
    """Names of the sandboxes whose forwarders left a note in a state folder."""
    with suppress(FileNotFoundError):
        return sorted(path.name for path in (state_dir / "forwarders").iterdir())
    return []
