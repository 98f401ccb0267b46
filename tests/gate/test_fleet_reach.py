"""Members of a fleet reach each other through the gate: boxes of this host, a container, a machine."""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engines.daemons import Daemon
from manager.world import config_of, until
from providers.qemu.host import START_S, left_of

from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.manager.manager import AsyncSandboxManager

from .installation import lines
from .own_gate import end_gates, eventually, gates, kill_gate

pytestmark = pytest.mark.timeout(240)

SERVER = """
        import http.server, os, threading, socketserver
        class Says(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.sendall((os.environ["SKERRY_PHASE"] + os.environ["SKERRY_INDEX"]).encode())
        raw = socketserver.ThreadingTCPServer(("127.0.0.1", 7000), Says)
        threading.Thread(target=raw.serve_forever).start()
        http.server.ThreadingHTTPServer(("127.0.0.1", 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
ASK = """
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
    print(link.recv(100).decode().strip() or "nothing")
except OSError as error:
    print(type(error).__name__)
"""
FILE = f"""
name: site
provider: local
phases:
  db:
    internal: true
    files:
      server.py: |{SERVER}
    command: [python3, server.py]
    healthcheck: [python3, -c, "import socket; socket.create_connection(('127.0.0.1', 8080))"]
  web:
    count: 2
    wait_for: db
    reach: [db:7000, db:8080, "store=db:7000", web:7000]
    files: {{ask.py: {json.dumps(ASK)}}}
    setup: python3 ask.py db 7000 > told
"""
COMPOSE = """
name: stack
services:
  db:
    container_name: the-db
    expose: [7000]
    networks: {back: {aliases: [store]}}
    healthcheck:
      test: [CMD, python3, -c, "import socket; socket.create_connection(('127.0.0.1', 8080))"]
      interval: 1s
    x-skerry: {files: {server.py: {from: server.py}}, command: [python3, server.py]}
  web:
    networks: [back, front]
    links: [db:mine]
    x-skerry: &asks {files: {ask.py: {from: ask.py}}}
  apart:
    networks: [front]
    x-skerry: *asks
networks: {back: {internal: true}, front: }
"""
MIXED = f"""
name: mixed
phases:
  box:
    provider: local
    reach: [container:7001, machine:7002]
    files:
      ask.py: {json.dumps(ASK)}
      server.py: |
        import socketserver
        class Says(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.sendall(b"box\\n")
        socketserver.ThreadingTCPServer(("127.0.0.1", 7000), Says).serve_forever()
    command: [python3, server.py]
    healthcheck: [python3, -c, "import socket; socket.create_connection(('127.0.0.1', 7000))"]
  container:
    reach: [box:7000, machine:7002]
    provider: docker
    image: IMAGE
    data: false
    command: nc -ll -p 7001 -e echo container
    healthcheck: nc 127.0.0.1 7001
  machine:
    provider: qemu
    timeout: 200s
    reach: [box:7000, container:7001]
    data: false
    command: nc -ll -p 7002 -e echo machine
    healthcheck: nc 127.0.0.1 7002
"""
PORTS = {"box": 7000, "container": 7001, "machine": 7002}
"""Each its own: one that listens on all addresses of its box has the port there, by whatever name it is meant."""


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Sockets of machines have short paths."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-reach-", dir="/tmp"))
    yield folder
    left = left_of(folder)
    shutil.rmtree(folder)
    assert left == set()


@pytest.fixture
async def manager(state_dir: Path, own_registry: None) -> AsyncIterator[AsyncSandboxManager]:
    async with AsyncSandboxManager(config_of(state_dir, provider="local")) as manager:
        yield manager
        await manager.destroy_all()
    end_gates(state_dir)


async def ask(fleet: AsyncFleet, name: str, port: int = 7000, member: str = "agent-web-001") -> str:
    """What a program in a member hears on a port, or the error that it gets."""
    return (await fleet.exec_on_agent(member, ["python3", "ask.py", name, str(port)])).text.strip()


async def test_a_member_reaches_what_its_phase_names_and_nothing_else(
    manager: AsyncSandboxManager, state_dir: Path
) -> None:
    fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
    report = await fleet.up()
    assert report.ok, report
    told = await fleet.exec("web", ["cat", "told"])
    assert [each.result.text for each in told.values() if each.result] == ["db1\n"] * 2  # in its setup already
    for name in ("db", "DB", "store", "agent-db-001"):
        assert await ask(fleet, name) == "db1"
    for name in ("agent-web-002", "agent-db-002"):  # nothing listens there, and there is none
        assert await ask(fleet, name) == "ConnectionResetError"
    assert await ask(fleet, "db", 7001) == "ConnectionRefusedError"
    for name in ("site", "nobody", "agent-store-001"):
        assert await ask(fleet, name) == "gaierror"
    script = "import urllib.request as web; print(web.urlopen('http://db:8080/server.py', timeout=20).status)"
    for env in ({}, {"http_proxy": ""}):
        done = await fleet.exec_on_agent("agent-web-001", ["python3", "-c", script], env=env)
        assert done.text == "200\n", done
    written = [line for line in lines(str(state_dir)) if line["kind"] in ("connect", "refuse")]
    assert ("connect", "store", 7000, "reach store:7000") in {
        (line["kind"], line["name"], line["port"], line.get("rule")) for line in written
    }
    (refused,) = [line for line in written if line["kind"] == "refuse" and line["name"] == "agent-db-002"]
    assert "no member is ready" in refused["reason"]
    assert (await fleet.status())["agent-web-001"].reach == ("db:7000", "db:8080", "store=db:7000", "web:7000")


async def test_members_that_come_and_go_are_followed(manager: AsyncSandboxManager, state_dir: Path) -> None:
    fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
    assert (await fleet.up()).ok
    assert (await fleet.scale(db=2)).ok
    assert {await ask(fleet, "db") for _ in range(2)} == {"db1", "db2"}
    await manager.destroy((await fleet.records())["agent-db-001"].id)
    assert {await ask(fleet, "db") for _ in range(2)} == {"db2"}
    assert (await fleet.up()).ok
    assert {await ask(fleet, name) for name in ("db", "agent-db-001")} == {"db1"}
    kill_gate(state_dir)
    async with AsyncSandboxManager(manager.config) as other:  # whoever comes next has it started again
        again = AsyncFleet(other, load_fleet("fleet.yaml", FILE))
        await eventually(lambda: len(gates(state_dir)) == 1, "the gate is there again")
        assert (await again.up()).ok

        async def is_served() -> bool:
            return await ask(again, "db") == "db1"

        await until(is_served)


async def test_fleets_of_the_same_phases_do_not_meet(manager: AsyncSandboxManager) -> None:
    first = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
    other = FILE.replace("name: site", "name: other").replace("setup: python3 ask.py db 7000 > told", "")
    second = AsyncFleet(manager, load_fleet("fleet.yaml", other))
    assert (await first.up()).ok
    assert (await second.up()).ok
    assert await ask(second, "db") == "db1"
    assert await second.stop_phase("db") == ["agent-db-001"]
    assert await ask(second, "db") == "ConnectionResetError"
    assert await ask(second, "agent-db-001") == "ConnectionResetError"
    assert await ask(first, "db") == "db1"


async def test_services_of_a_compose_file_find_each_other(manager: AsyncSandboxManager, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    fleet = AsyncFleet(manager, load_fleet(tmp_path / "compose.yaml"))
    report = await fleet.up()
    assert report.ok, report
    for name in ("db", "store", "the-db", "mine", "agent-db-001"):
        assert await ask(fleet, name) == "db1"
    assert await ask(fleet, "db", 8080) == "ConnectionRefusedError"  # it is not exposed
    for name in ("web", "db"):
        assert await ask(fleet, name, member="agent-apart-001") == "gaierror"


@pytest.fixture
async def mixed(
    docker_daemon: Daemon, docker_images: dict[str, str], vm_cache: Path, vm_image: str, state_dir: Path,
    own_registry: None,
) -> AsyncIterator[AsyncFleet]:  # fmt: skip
    providers = {
        "docker": {"host": docker_daemon.address, "cache_dir": str(state_dir / "cache")},
        "qemu": {"cache_dir": str(vm_cache.parent), "start_timeout_s": START_S},
    }
    spec = load_fleet("fleet.yaml", MIXED.replace("IMAGE", docker_images["busybox"]))
    async with AsyncSandboxManager(config_of(state_dir, provider="local", providers=providers)) as manager:
        yield AsyncFleet(manager, spec)
        await manager.destroy_all()
    end_gates(state_dir)


async def test_members_reach_each_other_whatever_their_providers(mixed: AsyncFleet) -> None:
    report = await mixed.up()
    assert report.ok, report
    for asker in PORTS:
        for phase, port in PORTS.items():
            for name in (phase, f"agent-{phase}-001") if phase != asker else ():
                command = f"python3 ask.py {name} {port}" if asker == "box" else f"nc {name} {port}"
                said = await mixed.exec_on_agent(f"agent-{asker}-001", command)
                assert (said.text, asker) == (f"{phase}\n", asker), said
        command = "python3 ask.py nobody 7000" if asker == "box" else "nc nobody 7000 || echo gaierror"
        assert (await mixed.exec_on_agent(f"agent-{asker}-001", command)).text == "gaierror\n"
    manager, container = mixed._manager, (await mixed.records())["agent-container-001"].id
    ask_container = ["python3", "ask.py", "container", "7001"]
    await manager.pause(container)
    assert (await mixed.exec_on_agent("agent-box-001", ask_container)).text == "ConnectionResetError\n"
    await manager.resume(container)
    assert (await mixed.exec_on_agent("agent-box-001", ask_container)).text == "container\n"
