"""Services of a fleet: each member's begins after its setup, and has an address of its own."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from manager.world import config_of

from skerry.errors import InvalidFleet
from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Port

from .world import fetch, is_refused, notes

FILE = """
name: shop
provider: local
phases:
  web:
    count: 2
    files: {page.txt: "hello"}
    setup: mv page.txt index.html
    command: ["sh", "-c", "test -e index.html || exit 0; exec python3 -m http.server 3002"]
    restart: "no"
    ports: [PORTS]
"""


def pair() -> int:
    """The first of two ports that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


async def test_members_serve_one_after_the_other_from_the_port_that_is_given(folder: Path) -> None:
    first = pair()
    async with AsyncSandboxManager(config_of(folder, provider="local")) as manager:
        fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE.replace("PORTS", f"'{first}:3002'")))
        await fleet.up()
        status = await fleet.status()
        addresses = [member.addresses for member in status.values()]
        assert addresses == [{3002: f"127.0.0.1:{first}"}, {3002: f"127.0.0.1:{first + 1}"}]
        for address in addresses:
            assert await asyncio.to_thread(fetch, address[3002]) == b"hello"  # the setup came before the command
        assert (await fleet.plan()).is_empty
        await fleet.down()
    assert is_refused(f"127.0.0.1:{first}")
    assert notes(folder) == []


async def test_a_port_that_is_taken_fails_the_phase_and_leaves_nothing(folder: Path) -> None:
    async with AsyncSandboxManager(config_of(folder, provider="local")) as manager:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE.replace("PORTS", f"'{port}:3002'")))
            report = await fleet.up()
        assert not report.ok
        assert f"port {port} of this host is in use" in str(report)
        assert await manager.list() == []
    assert notes(folder) == []


def test_a_file_names_command_restart_and_ports() -> None:
    (phase,) = load_fleet("fleet.yaml", FILE.replace("PORTS", "3002, '8080:80'")).phases
    assert phase.spec.command == ("sh", "-c", "test -e index.html || exit 0; exec python3 -m http.server 3002")
    assert phase.member_spec("shop", 2).ports == (Port(port=3002), Port(port=80, local=8081))
    line = load_fleet("fleet.yaml", "name: a\nphases: {b: {command: exec server, ports: 3002}}").phases[0].spec
    assert (line.command, line.ports) == ("exec server", (Port(port=3002),))


@pytest.mark.parametrize("ports", ["'8080:80', '8081:81'", "'65535:80'", "'0.0.0.0:80:80'", "x"])
def test_ports_that_members_cannot_have_are_told_with_their_line(ports: str) -> None:
    with pytest.raises(InvalidFleet, match=r"fleet\.yaml:\d+:\d+: phase 'web': ports: "):
        load_fleet("fleet.yaml", FILE.replace("PORTS", ports))
