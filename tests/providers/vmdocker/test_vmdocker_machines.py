"""Projects in real virtual machines, with a real Docker in each: on QEMU, in software where it must be."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from providers.qemu.host import left_of

from skerry.config import load
from skerry.errors import AgentUnreachable, ProviderUnavailable, SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Network, Spec
from skerry.providers.base import BoxState, ImageBuild
from skerry.providers.vmdocker import VmDocker, VmDockerConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm import launch
from skerry.vm.folder import VmFolder

pytestmark = pytest.mark.timeout(900)

IMAGE = "skerry-test/in-a-machine"
_END_S = 120.0


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """For this test alone, which has to leave nothing that runs there."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-vmd-", dir="/tmp"))
    yield folder
    left = left_of(folder)
    shutil.rmtree(folder)
    assert left == set()


@pytest.fixture
def settings(vm_cache: Path, docker_vm_image: str, state_dir: Path) -> dict[str, Any]:
    return {
        "state_dir": str(state_dir),
        "cache_dir": str(vm_cache.parent),
        "hypervisor": "qemu",
        "idle_s": 3,
        "ready_timeout_s": 120,
        "start_timeout_s": 180,
        "timeout_s": 120,
    }


@pytest.fixture
def open_again(settings: dict[str, Any]) -> Iterator[Callable[[], VmDocker]]:
    """Another object for the same installation, as another process would have it; nothing is left at the end."""
    try:
        asyncio.run(VmDocker(VmDockerConfig(**settings)).check())
    except ProviderUnavailable as error:
        if "vmdocker" in os.environ.get("SKERRY_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    yield lambda: VmDocker(VmDockerConfig(**settings))
    asyncio.run(_end_all(VmDocker(VmDockerConfig(**settings))))


async def _end_all(provider: VmDocker) -> None:
    for project in provider._projects.all():
        await provider._machines.kill(project.vm)


def folder_of(provider: VmDocker, project: str) -> VmFolder:
    return VmFolder(provider._projects.get(project).vm)


def skerry(settings: dict[str, Any], *args: str) -> bytes:
    """The command, in a process of its own with the same settings."""
    env = {f"SKERRY_PROVIDERS__VMDOCKER__{name.upper()}": str(value) for name, value in settings.items()}
    program = [sys.executable, "-c", "from skerry.cli import main; main()", *args]
    return subprocess.run(
        program,
        env={**os.environ, **env, "SKERRY_CONFIG": "/dev/null"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout


async def test_projects_in_machines_of_their_own(
    open_again: Callable[[], VmDocker], settings: dict[str, Any], root: Path
) -> None:
    """One test for what belongs together, since each machine takes its time: it follows their whole life."""
    first = open_again()
    await first.import_image(root, IMAGE, lambda _: None)

    # Two at once start one machine; another project has another, and no number in common with it.
    one, two, other = await asyncio.gather(
        *(AsyncSandbox.create(_spec(project, name), first) for project, name in _BOXES)
    )
    seen = [
        (await box.exec("cat /proc/sys/kernel/random/boot_id; head -c 8 /dev/urandom | od -An -tx1")).text.split("\n")
        for box in (one, two, other)
    ]
    assert len({text[1] for text in seen}) == 3
    alpha, beta = folder_of(first, "alpha"), folder_of(first, "beta")
    assert alpha.is_running()
    assert beta.is_running()
    assert (await one.exec(["uname", "-r"])).text.strip() != os.uname().release
    assert (await one.exec("echo mine > /.data/kept; echo x > ~/work; sync")).ok
    await first.aclose()

    # Another process: the docker command sees the boxes of its project, and no others.
    told = json.loads(await asyncio.to_thread(skerry, settings, "docker-env", "alpha", "--json"))
    listed = await asyncio.to_thread(_docker, told["docker_host"], "ps", "--format", "{{.Names}}")
    assert sorted(listed.split()) == sorted(f"skerry-{box.id}" for box in (one, two))
    second = open_again()
    assert {status.state for status in (await second.discover()).values()} == {BoxState.RUNNING}
    again = await AsyncSandbox.open(two.id, second)
    assert (await again.exec(["echo", "hello"])).text == "hello\n"
    await again.close()

    # The last box of a project lets its machine go, without anybody's help, and nothing is left of it.
    await second.destroy(other.id, volumes=True)
    await second.aclose()
    assert await beta.wait(_END_S)
    assert "reboot" in beta.read_console()
    third = open_again()
    assert set(await third.discover()) == {one.id, two.id}
    assert not beta.path.parent.exists()

    # A machine that is killed takes what was in memory, and leaves what was on its disk.
    vm = alpha.read()
    assert vm is not None
    assert vm.vmm is not None
    os.kill(vm.vmm.pid, signal.SIGKILL)
    assert await alpha.wait(_END_S)
    found = await third.discover()
    assert {found[box.id].state for box in (one, two)} == {BoxState.STOPPED}
    with pytest.raises(AgentUnreachable, match="is off"):
        await third.dial(one.id)
    await third.destroy(two.id, volumes=True)
    await third.start(one.id, one.spec)
    started = await AsyncSandbox.open(one.id, third)
    assert (await started.exec("cat /.data/kept; ls -A ~")).text == "mine\n"
    await started.close()
    assert set(await third.discover()) == {one.id}
    await third.destroy(one.id, volumes=True)
    assert not await third.volumes()
    await third.aclose()


_BOXES = (("alpha", "one"), ("alpha", "two"), ("beta", "other"))


def _spec(project: str, name: str, **fields: Any) -> Spec:
    return Spec.of(provider="vmdocker", image=IMAGE, project=project, name=name, **fields)


def _docker(address: str, *args: str) -> str:
    program = shutil.which("docker")
    if program is None:
        pytest.skip("no docker command here")
    env = {**os.environ, "DOCKER_HOST": address}
    return subprocess.run([program, *args], env=env, stdout=subprocess.PIPE, check=True, timeout=120).stdout.decode()


async def test_what_strangers_wrote_is_built_in_a_machine_and_given_to_the_docker_of_the_host(
    open_again: Callable[[], VmDocker], settings: dict[str, Any], docker_daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    """The images of the host's Docker are no part of it: what the build needs, the machine is given."""
    provider = open_again()
    await provider.import_image(root, IMAGE, lambda _: None)
    both = {"vmdocker": settings, "docker": {"host": docker_daemon.address}}
    config = load({"provider": "docker", "state_dir": str(tmp_path)})
    manager = AsyncSandboxManager(msgspec.structs.replace(config, providers=both))
    name = "skerry-test/of-a-stranger"
    text = f"FROM {IMAGE}\nRUN uname -r > /told; ls /sys/class/net >> /told\n"
    try:
        image = await manager.build_base_image(text, name=name, builder="vmdocker")
        assert image.names == (f"{name}:latest",)
        body = {"Image": name, "Cmd": ["x"]}
        id = ask_json(docker_daemon.address, "POST", "/containers/create", json_body=body)["Id"]
        content = ask(docker_daemon.address, "GET", f"/containers/{id}/archive", {"path": "/told"})
        ask(docker_daemon.address, "DELETE", f"/containers/{id}")
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            release, *interfaces = tar.extractfile("told").read().decode().split()
        assert release != os.uname().release
        assert interfaces == ["lo"]
        await manager.remove_image(name)
    finally:
        await manager.aclose()
    assert provider._projects.all() == []
    assert [each.names for each in await provider.images()] == [(f"{IMAGE}:latest",)]
    await provider.aclose()


async def test_a_machine_whose_docker_does_not_come_up_is_told_with_what_it_said(
    open_again: Callable[[], VmDocker], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skerry.errors import CreateFailed
    from skerry.providers.vmdocker import machines

    monkeypatch.setattr(machines, "_SERVICE", "echo dockerd cannot go on >&2; exit 7")
    provider = open_again()
    await provider.import_image(root, IMAGE, lambda _: None)
    with pytest.raises(CreateFailed, match="dockerd cannot go on"):
        await AsyncSandbox.create(_spec("alpha", "one"), provider)
    assert not await provider.discover()
    await provider.aclose()


@pytest.mark.skipif(launch.why_no_network() is not None, reason=str(launch.why_no_network()))
async def test_a_bridge_leads_out_of_the_machine_and_not_to_the_hosts_own_services(
    open_again: Callable[[], VmDocker], settings: dict[str, Any], root: Path
) -> None:
    """What is outside is here an address of this host that is not its loopback."""
    settings["vm_network"] = True
    provider = open_again()
    await provider.import_image(root, IMAGE, lambda _: None)
    with serving("0.0.0.0") as port:
        outside = _own_address()
        bridged = await AsyncSandbox.create(_spec("alpha", "bridged", network="bridge"), provider)
        assert (await bridged.exec(f"wget -qO- http://{outside}:{port}/")).text == "hello"
        for inside in ("127.0.0.1", "10.0.2.2", "10.0.3.2"):
            result = await bridged.exec(f"wget -T 5 -qO- http://{inside}:{port}/", timeout_s=60)
            assert not result.ok, inside
        alone = await AsyncSandbox.create(_spec("alpha", "alone"), provider)
        assert (await alone.exec("ls /sys/class/net")).text.split() == ["lo"]
        text = f"FROM {IMAGE}\nRUN wget -qO /got http://{outside}:{port}/\n"
        build = ImageBuild(dockerfile=text, name="skerry-test/got", network=Network.BRIDGE)
        assert (await provider.build_image(build, lambda _: None)).names == ("skerry-test/got:latest",)
    with pytest.raises(SkerryError, match=r"127\.0\.0\.1:9"):
        await provider.pull_image("127.0.0.1:9/nobody/here", lambda _: None)
    assert [project.name for project in provider._projects.all()] == ["alpha"]
    await bridged.destroy(volumes=True)
    await alone.destroy(volumes=True)
    await provider.aclose()


@contextmanager
def serving(address: str) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _own_address() -> str:
    """An address of this host that others reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address: str = probe.getsockname()[0]
        except OSError:
            pytest.skip("this host has no network")
    return address
