"""What containers can do beyond what every box can: any image, users, writable roots, daemons that are elsewhere."""

from __future__ import annotations

import os
import signal
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent.lying_agent import LyingAgent, Message, client_of
from engines.api import ask, ask_json
from engines.daemons import Daemon
from few_inodes import few_inodes, use_up_inodes
from providers import scores
from providers.clients import all_served
from providers.making import making

from skerry.agent.client import AgentClient
from skerry.errors import CallInterrupted, ImageNotFound, InvalidSpec, LimitReached, ProviderError, Unsupported
from skerry.model.spec import Spec
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import containers
from skerry.providers.dockerapi.info import EngineInfo
from skerry.providers.shared import proc_socket
from skerry.sandbox.sandbox import AsyncSandbox


@pytest.fixture
async def make(docker: Docker, docker_images: dict[str, str]) -> AsyncIterator[Any]:
    async with making(docker) as make:
        yield lambda image, **options: make(image=docker_images.get(image, image), **options)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that shares neither our files nor our processes."""

    async def refuse(_pid: int, _timeout_s: float) -> None:
        raise proc_socket.NotShared

    monkeypatch.setattr(proc_socket, "connect", refuse)
    monkeypatch.setattr(EngineInfo, "is_local", property(lambda _self: False))


async def test_an_image_with_nothing_but_one_program_is_a_sandbox(make: Any) -> None:
    sandbox = await make("distroless")
    assert (await sandbox.exec(["/busybox", "echo", "hello"])).text == "hello\n"
    await sandbox.files.write("note", "x")
    assert await sandbox.files.read_text("note") == "x"
    assert (await sandbox.exec(["sh"])).exit_code == 127


async def test_a_daemon_elsewhere_is_reached_through_its_own_exec(make: Any, elsewhere: None) -> None:
    sandbox = await make("busybox", env={"SECRET": "s"})
    assert (await sandbox.exec('echo "$SECRET"; echo x > ~/f; echo y > /.data/f')).ok
    assert "tmpfs" in sandbox.enforced["disk"].by
    await sandbox.close()
    assert (await sandbox.exec("cat ~/f /.data/f")).text == "x\ny\n"
    data = os.urandom(3_000_000)
    await sandbox.files.write("blob", data)
    assert await sandbox.files.read("blob") == data


async def test_boxes_are_the_first_to_be_killed_where_memory_runs_out(make: Any, docker: Docker, gvisor: str) -> None:
    """And no user of a box, not its root either, can change that for a process of it."""
    for runtime in (None, gvisor):
        sandbox = await make("busybox", **({"runtime": runtime} if runtime else {}))
        pid = (await containers.inspect(docker._engine, sandbox.id)).state.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    for options in ({}, {"user": "root"}, {"admin": True}):
        sandbox = await make("busybox", **options)
        for user in (None, "root"):
            await scores.check_first_to_be_killed(sandbox, user)


async def test_boxes_meet_on_a_network_by_its_name(make: Any, docker_daemon: Daemon) -> None:
    network = {"Name": "skerry-test-net", "Internal": True}
    ask(docker_daemon.address, "POST", "/networks/create", json_body=network)
    try:
        one, other = [await make("busybox", network="skerry-test-net") for _ in range(2)]
        assert "skerry-test-net (bridge) with all others there; leads nowhere else" in one.enforced["network"].by
        address = (await one.exec("hostname -i")).text.strip()
        await one.start("nc -ll -p 7000 -e echo hello", background=True)
        assert (await other.exec(f"until nc -w 1 {address} 7000; do :; done", timeout_s=20)).text == "hello\n"
        with pytest.raises(Unsupported, match=r"no network 'skerry-test'.*skerry-test-net"):
            await make("busybox", network="skerry-test")
        await one.destroy()
        await other.destroy()
    finally:
        ask(docker_daemon.address, "DELETE", "/networks/skerry-test-net")


async def test_a_daemon_that_only_looks_like_ours_has_no_disks_of_this_machine(
    make: Any, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its account is this machine's, as a clone's would be, but what lies in its volumes is not seen here."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: "/volumes/skerry-runtime-" not in str(path) and exists(path))
    first, second = await make("busybox"), await make("busybox")
    assert "tmpfs" in second.enforced["disk"].by
    for sandbox in (first, second):
        assert (await sandbox.exec("echo x > ~/f; grep /home/user /proc/mounts")).text.startswith("tmpfs")
    assert not docker._homes.all()


async def test_a_process_here_with_the_number_of_one_elsewhere_is_not_taken_for_it(make: Any, docker: Docker) -> None:
    sandbox = await make("busybox")
    box = await containers.inspect(docker._engine, sandbox.id)
    assert proc_socket.is_of(box.state.pid, box.id)
    assert not proc_socket.is_of(os.getpid(), box.id)
    assert not proc_socket.is_of(box.state.pid, "0" * 64)
    assert not proc_socket.is_of(box.state.pid, "")


async def test_who_runs_in_a_box(make: Any) -> None:
    for asked, told in (("app", "1000 1000"), ("4242:77", "4242 77"), ("4242", "4242 4242"), ("root", "0 0")):
        sandbox = await make("busybox", user=asked)
        assert (await sandbox.exec('echo "$(id -u) $(id -g)"')).text.strip() == told
        await sandbox.files.write("mine", "x")
        assert (await sandbox.exec("echo x > /.data/mine")).ok


async def test_a_user_that_the_image_does_not_know_is_refused(make: Any, docker: Docker) -> None:
    with pytest.raises(InvalidSpec, match="nobody-knows"):
        await make("busybox", user="nobody-knows")
    assert not await docker.discover()


async def test_a_command_runs_as_another_user_of_the_box(make: Any) -> None:
    sandbox = await make("busybox", env={"A": "1"})
    assert (await sandbox.exec("id -u; echo $A", user="root")).text == "0\n1\n"
    assert (await sandbox.exec(["id", "-u"], user="app")).text == "1000\n"
    assert (await sandbox.exec(["sh", "-c", "echo $$ > /proc/sys/kernel/hostname"], user="root")).exit_code != 0


async def test_the_root_is_writable_only_where_that_was_asked(make: Any) -> None:
    closed, open_ = await make("busybox", user="root"), await make("busybox", user="root", writable_root=True)
    assert not (await closed.exec("touch /etc/new")).ok
    assert (await open_.exec("touch /etc/new")).ok
    assert open_.enforced["root"].why_not


async def test_a_snapshot_has_what_was_changed_in_the_root_too(make: Any, docker: Docker) -> None:
    first = await make("busybox", user="root", writable_root=True)
    await first.exec("echo changed > /etc/marker; echo mine > ~/marker")
    await docker.snapshot(first.id, "rooted")
    try:
        second = await make("busybox", snapshot="rooted")
        assert (await second.exec("cat /etc/marker ~/marker")).text == "changed\nmine\n"
        assert (await second.exec(["id", "-u"])).text != "0\n"
        await second.destroy(volumes=True)
    finally:
        await docker.remove_snapshot("rooted")


DISK = 64 << 20


@pytest.mark.parametrize(
    "fill",
    ["truncate -s 1500M ~/hole", "head -c 40000000 /dev/zero > ~/a; ln ~/a ~/b; ln ~/a ~/c", "truncate -s 9G /hole"],
    ids=["holes", "names", "holes in the root"],
)
async def test_a_snapshot_of_more_than_the_box_may_hold_is_refused(
    make: Any, docker: Docker, cache: Path, fill: str
) -> None:
    sandbox = await make("busybox", user="root", writable_root="/hole" in fill.split(), disk=DISK)
    assert (await sandbox.exec(fill)).ok
    with pytest.raises(LimitReached, match="max_root" if "/hole" in fill.split() else "disk of 64M"):
        await docker.snapshot(sandbox.id, "full")
    assert not await docker.snapshots()
    assert not [path for path in cache.iterdir() if path.name.startswith(".snapshot-")]


async def test_an_agent_that_lies_makes_the_host_write_no_more_than_its_box_holds(
    make: Any, docker: Docker, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box whose agent was taken over: it packs without end whatever is asked for."""
    sandbox = await make("busybox", disk=DISK)
    most = 0

    def packs_without_end(agent: LyingAgent, message: Message) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in cache.rglob(".snapshot-*/**/*") if path.is_file()))
        if message["method"] == "tree_download":
            member = tarfile.TarInfo("x")
            member.size = 1 << 40
            agent.data(message["id"], member.tobuf(tarfile.GNU_FORMAT))
            agent.data(message["id"], bytes((1 << 20) - 512))
        elif message["method"] == "credit":
            agent.data(message["params"]["id"], bytes(message["params"]["bytes"]))

    @asynccontextmanager
    async def lies(_box: object) -> AsyncIterator[AgentClient]:
        yield (await client_of(packs_without_end))[0]

    monkeypatch.setattr(docker._dialer, "client", lies)
    with pytest.raises(LimitReached, match="disk of 64M"):
        await docker.snapshot(sandbox.id, "full")
    assert most <= DISK
    assert not await docker.snapshots()
    assert not [path for path in cache.iterdir() if path.name.startswith(".snapshot-")]


async def test_what_cannot_be_made_is_refused_before_anything_is(make: Any, docker: Docker, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound, match="skerry image pull"):
        await make("no-such-image")
    with pytest.raises(InvalidSpec, match="needs one"):
        await AsyncSandbox.create(Spec(provider="docker"), docker)
    with pytest.raises(InvalidSpec, match="mounts"):
        await make("busybox", mounts=[f"{tmp_path}/none:/x"])
    with pytest.raises(InvalidSpec, match="neither"):
        await make("busybox", mounts=["/dev/null:/x"])
    with pytest.raises(Unsupported, match="runtime"):
        await make("busybox", runtime="no-such")
    assert not await docker.discover()


async def test_a_folder_of_the_host_is_mounted(make: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "in").write_text("seen\n")
    sandbox = await make("busybox", mounts=[f"{tmp_path}:/work", f"{tmp_path}:/fixed:ro"])
    assert (await sandbox.exec("cat /work/in; echo out > /work/out; echo x > /fixed/x || echo refused")).text == (
        "seen\nrefused\n"
    )
    assert (tmp_path / "out").read_text() == "out\n"


async def test_the_digest_of_the_image_is_recorded(
    make: Any, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    sandbox = await make("busybox")
    image = ask_json(docker_daemon.address, "GET", f"/images/{docker_images['busybox']}/json")["Id"]
    assert image in sandbox.enforced["image"].by


async def test_a_bridge_is_an_address_of_its_own(make: Any) -> None:
    sandbox = await make("busybox", network="bridge")
    assert "eth0" in (await sandbox.exec(["ip", "addr"])).text


async def test_an_engines_labels_say_whose_a_box_is(make: Any, docker_daemon: Daemon) -> None:
    sandbox = await make("busybox", project="p", labels={"skerry.instance": "i", "mine": "x"})
    found = ask_json(docker_daemon.address, "GET", f"/containers/skerry-{sandbox.id}/json")["Config"]["Labels"]
    assert found["skerry"] == "docker"
    assert found["skerry.sandbox"] == sandbox.id
    assert (found["skerry.project"], found["skerry.instance"], found["mine"]) == ("p", "i", "x")


async def test_a_volume_that_somebody_removed_is_filled_again(make: Any, docker: Docker) -> None:
    """The runtime's: boxes hold it, so only one that nobody uses can go."""
    await (await make("busybox")).destroy(volumes=True)
    volume = docker._agent.volume
    for name in (volume, docker._agent._mark):
        await docker._engine.delete(f"/volumes/{name}")
    again = Docker(docker._config)  # type: ignore[arg-type]
    sandbox = await AsyncSandbox.create(Spec.of(provider="docker", image="skerry-test/busybox"), again)
    await sandbox.destroy(volumes=True)


async def test_what_goes_on_in_a_gvisor_that_is_killed_breaks_off(make: Any, docker: Docker, gvisor: str) -> None:
    """As it is for want of memory. Docker may keep streams into it open, and then nobody would hear of it for long."""
    sandbox = await make("busybox", runtime=gvisor)
    process = await sandbox.start("sleep 1000")
    os.kill((await containers.inspect(docker._engine, sandbox.id)).state.pid, signal.SIGKILL)
    with pytest.raises(CallInterrupted):  # and no "silent for 30 s"
        await process.wait()


async def test_hundreds_of_clients_of_several_programs_are_all_served(
    make: Any, docker_daemon: Daemon, tmp_path: Path, cache: Path
) -> None:
    sandbox = await make("busybox")
    config = {"host": docker_daemon.address, "state_dir": str(tmp_path / "state"), "cache_dir": str(cache)}
    await all_served("docker", config, sandbox.id, programs=2, handles=150)


async def test_a_box_is_destroyed_where_no_file_can_be_made(
    docker: Docker, docker_images: dict[str, str], tmp_path: Path
) -> None:
    spec = Spec.of(image=docker_images["debian"], data=False)
    with few_inodes(tmp_path / "state"):
        sandbox = await AsyncSandbox.create(spec, docker)
        use_up_inodes(tmp_path / "state")
        with pytest.raises(ProviderError, match="No space left"):
            await AsyncSandbox.create(spec, docker)
        await sandbox.destroy()
        assert await docker.discover() == {}
