"""Programs that people use, unchanged, through the gate, from boxes of every kind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import msgspec
import pytest
from engines.daemons import Daemon
from providers.firecracker.conftest import stand_ins as stand_ins
from providers.firecracker.conftest import world_folder as world_folder
from providers.firecracker.fc_world import config_on
from providers.test_local import PACKAGES, as_plain_user
from providers.test_local import plain_home as plain_home
from providers.vmdocker.fakes import FakeMachines

from skerry.config import Config
from skerry.host import uids
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SpecOptions

from .clients import run_all
from .installation import host_root, installed, is_usr_merged
from .world import TRUST, World

pytestmark = pytest.mark.timeout(240)

IMAGE = "skerry-test/clients:1"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name that boxes of other users can look into."""
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def check(config: Config, world: World, root: Path | None = None, **options: Unpack[SpecOptions]) -> None:
    """Run all clients in one box, which has nothing but rules for what they reach."""
    async with AsyncSandboxManager(config) as manager:
        if root is not None:
            await manager.import_image(root, IMAGE)
            options["image"] = IMAGE
        try:
            sandbox = await manager.create(allow=world.allow, env=TRUST, **options)
            failed = await run_all(sandbox, world)
        finally:
            await manager.destroy_all()
            if root is not None:
                await manager.remove_image(IMAGE, force=True)
    assert failed == {}


@pytest.mark.usefixtures("local_rules")
async def test_clients_get_through_from_a_local_box(world: World, place: Path) -> None:
    with installed(place, world) as config:
        await check(config, world)


@pytest.mark.usefixtures("local_rules")
async def test_clients_get_through_from_a_plain_users_box(world: World, plain_home: Path) -> None:
    """The manager, the box and its gate are a plain user's."""
    tests = str(Path(__file__).parents[1])
    wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = shutil.which(wanted, path="/usr/bin:/usr/local/bin")  # it has to start itself once more, as the gate
    if python is None:
        pytest.skip(f"no {wanted} that every user may start")
    done = await asyncio.to_thread(
        subprocess.run,
        [*as_plain_user(), python, "-B", "-m", "gate.plain", str(plain_home), *_told(world)],
        env={"PATH": os.defpath, "HOME": str(plain_home), "PYTHONPATH": f"{PACKAGES}:{tests}"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "{}"), done.stderr


def _told(world: World) -> list[str]:
    return [str(world.folder), *(f"{name}={port}" for name, port in world.ports.items())]


async def on_engine(world: World, place: Path, daemon: Daemon, **options: Any) -> None:
    if not is_usr_merged():
        pytest.skip("the programs of this host are not all below /usr, which these boxes have theirs from")
    with installed(place, world, daemon.name, {"host": daemon.address, "cache_dir": str(place / "cache")}) as config:
        await check(
            config, world, host_root(place / "root.tar"), mounts=["/usr:/usr:ro"], user="app", data=False, **options
        )


async def test_clients_get_through_from_docker(world: World, place: Path, docker_daemon: Daemon) -> None:
    await on_engine(world, place, docker_daemon)


async def test_clients_get_through_from_gvisor(world: World, place: Path, docker_daemon: Daemon, gvisor: str) -> None:
    await on_engine(world, place, docker_daemon, runtime=gvisor)


async def test_clients_get_through_from_podman(world: World, place: Path, podman_daemon: Daemon) -> None:
    await on_engine(world, place, podman_daemon)


async def test_clients_get_through_from_incus(world: World, place: Path, incus_daemon: Daemon) -> None:
    await on_engine(world, place, incus_daemon)


async def test_clients_get_through_from_a_machine(
    world: World, place: Path, qemu_cache: Path, clients_vm_image: str
) -> None:
    settings = {"cache_dir": str(qemu_cache), "start_timeout_s": 120.0}
    with installed(place, world, "qemu", settings) as config:
        await check(config, world, image=clients_vm_image, user="app", memory="1G", data=False)


def also_for_the_gate(place: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have every interpreter that is started from now on begin with `code`."""
    (place / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{place}:{Path(__file__).parents[1]}")


STAND_INS = """
import pathlib
from providers.firecracker import fc_world
fc_world.config_on(pathlib.Path({folder!r}), jailed={jailed})
"""


@pytest.mark.usefixtures("stand_ins")
async def test_clients_get_through_from_a_machine_of_firecracker(
    world: World, place: Path, world_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is a stand-in, for the gate too, with programs of this host; agents and streams are real."""
    jailed = uids.are_available()
    also_for_the_gate(place, monkeypatch, STAND_INS.format(folder=str(world_folder), jailed=jailed))
    settings = msgspec.to_builtins(config_on(world_folder, jailed=jailed))
    settings = {name: value for name, value in settings.items() if value is not None}
    with installed(place, world, "firecracker", settings) as config:
        await check(config, world, data=False)


FAKES = """
from providers.vmdocker.fakes import FakeMachines
from skerry.providers.vmdocker import machines
machines.ProjectMachines = lambda *_: FakeMachines({address!r})
"""


async def test_clients_get_through_from_a_container_of_a_projects_machine(
    world: World,
    place: Path,
    machines: FakeMachines,
    docker_daemon: Daemon,
    clients_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine is a fake, for the gate too; its Docker is real. Its image has all programs, as no folder of the
    host can be mounted."""
    also_for_the_gate(place, monkeypatch, FAKES.format(address=docker_daemon.address))
    monkeypatch.setattr("skerry.providers.vmdocker.machines.ProjectMachines", lambda *_: machines)
    with installed(place, world, "vmdocker", {"cache_dir": str(place / "cache")}) as config:
        await check(config, world, clients_root, project="shop", user="app", data=False)
