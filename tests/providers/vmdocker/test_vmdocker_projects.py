"""Which machines there are, for whom and how long: with a real Docker, and machines that are none."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from engines.api import ask_json
from engines.daemons import Daemon
from escape.strangers import StrangerCases
from providers.vmdocker.conftest import IMAGE
from providers.vmdocker.fakes import FakeMachines

from skerry import clock
from skerry.config import load
from skerry.errors import (
    AgentUnreachable,
    Conflict,
    CreateFailed,
    ImageNotFound,
    InvalidSpec,
    NotFound,
    ProviderUnavailable,
    Unsupported,
)
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec, SpecOptions, new_id
from skerry.model.states import State
from skerry.providers.base import BoxState
from skerry.providers.vmdocker import VmDocker, VmDockerConfig
from skerry.providers.vmdocker.projects import Project
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(120)
FOR_EVER = [None, None]
WHILE_IDLE = [None, 100]


def spec(project: str = "one", **fields: Any) -> Spec:
    return Spec.parse(
        {"provider": "vmdocker", "image": IMAGE, "project": project, "data": False, "lifetime_s": 0, **fields}
    )


def project_of(vmdocker: VmDocker, name: str = "one") -> Project:
    return vmdocker._projects.get(name)


@pytest.fixture
async def make(vmdocker: VmDocker) -> AsyncIterator[Any]:
    made: list[AsyncSandbox] = []

    async def one(project: str = "one", **fields: Any) -> AsyncSandbox:
        made.append(await AsyncSandbox.create(spec(project, **fields), vmdocker))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)


async def test_sandboxes_of_a_project_share_a_machine_and_those_of_two_do_not(
    make: Any, machines: FakeMachines
) -> None:
    sandboxes = await asyncio.gather(make(), make(), make("two"))
    assert sorted(machines.starts) == ["one", "two"]
    for sandbox in sandboxes:
        assert (await sandbox.exec(["echo", "hello"])).text == "hello\n"


async def test_whoever_names_no_project_is_told_how(vmdocker: VmDocker) -> None:
    for project in ({}, {"project": "default"}):
        fields = {"provider": "vmdocker", "image": IMAGE, **project}
        with pytest.raises(InvalidSpec, match="--project NAME") as caught:
            await AsyncSandbox.create(Spec.parse(fields), vmdocker)
        assert caught.value.field == "project"


@pytest.mark.parametrize(
    "fields",
    [
        {"mounts": [{"source": "/srv", "target": "/srv"}]},
        {"workspace": {"path": "/srv"}},
        {"network": "bridge"},
        {"memory": 64 << 30},
    ],
    ids=str,
)
async def test_what_a_machine_cannot_give_is_refused_before_one_is_started(
    vmdocker: VmDocker, machines: FakeMachines, fields: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported):
        await AsyncSandbox.create(spec(**fields), vmdocker)
    with pytest.raises(ImageNotFound, match="skerry image import"):
        await AsyncSandbox.create(spec(image="none-such"), vmdocker)
    assert not machines.starts


async def test_any_process_goes_on_with_what_another_began(make: Any, open_again: Callable[[], VmDocker]) -> None:
    sandbox = await make()
    await sandbox.files.write("note", "x")
    other = open_again()
    assert (await other.discover())[sandbox.id].state is BoxState.RUNNING
    again = await AsyncSandbox.open(sandbox.id, other)
    assert await again.files.read_text("note") == "x"
    await again.close()
    await other.destroy(sandbox.id)
    await other.aclose()
    assert not await open_again().discover()


async def test_the_last_sandbox_lets_the_machine_go_and_a_new_one_keeps_it(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    first, second = await make(), await make()
    vm = project_of(vmdocker).vm
    assert machines.told(vm) == FOR_EVER
    await first.destroy()
    assert machines.told(vm) == FOR_EVER
    await second.destroy()
    assert machines.told(vm) == WHILE_IDLE
    await make()
    assert machines.told(vm) == FOR_EVER
    assert machines.starts == ["one"]


async def test_a_machine_outlives_the_lifetime_of_its_boxes_by_no_more_than_it_waits(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await make(lifetime_s=500)
    await make(lifetime_s=50)
    lifetime_s, idle_s = machines.told(project_of(vmdocker).vm)
    assert lifetime_s is not None
    assert 500 < lifetime_s <= 600
    assert idle_s is None


async def test_a_machine_that_has_powered_off_with_nothing_in_it_is_removed(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await (await make()).destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    assert not await vmdocker.discover()
    assert not project.folder.exists()


async def test_a_project_is_nobodys_once_it_is_let_go_though_a_child_that_was_just_forked_has_its_descriptors(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await (await make()).destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    async with project.locked(0):
        lock = os.fspath(project._lock)
        held = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if _target(fd) == lock]
        copies = [os.dup(fd) for fd in held]
    try:
        assert len(copies) == 1
        assert not await vmdocker.discover()
        assert not project.folder.exists()
    finally:
        for copy in copies:
            os.close(copy)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


async def test_a_look_waits_for_another_that_is_just_at_the_project(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await (await make()).destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    async with project.locked(0):
        looking = asyncio.create_task(vmdocker.discover())
        await asyncio.sleep(0)
        assert not looking.done()
    assert not await looking
    assert not project.folder.exists()


async def test_a_machine_that_has_powered_off_with_nothing_in_it_is_not_booted_again_but_made_anew(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await (await make()).destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    (project.vm / "of before").touch()
    await make()
    assert machines.starts == ["one", "one"]
    assert not (project.vm / "of before").exists()


async def test_a_machine_that_has_powered_off_keeps_its_data(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    sandbox = await make(data=True, name="db")
    await sandbox.files.write("/.data/kept", "x")
    await sandbox.destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    assert not await vmdocker.discover()
    assert [volume.label for volume in await vmdocker.volumes()] == ["db"]
    assert not machines.is_running(project.vm)
    again = await make(data=True, name="db")
    assert machines.starts == ["one", "one"]
    assert await again.files.read_text("/.data/kept") == "x"


async def test_a_volume_of_a_machine_that_is_off_goes_with_the_machine_if_that_has_nothing_else(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await (await make(data=True)).destroy()
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    (volume,) = await vmdocker.volumes()
    await vmdocker.remove_volume(volume.name)
    assert not await vmdocker.volumes()
    assert not project.folder.exists()
    assert machines.starts == ["one"]


async def test_a_volume_that_was_removed_while_the_machine_was_off_is_not_found_again(
    make: Any, vmdocker: VmDocker, machines: FakeMachines, docker_daemon: Daemon
) -> None:
    kept, gone = await make(data=True, name="kept"), await make(data=True, name="gone")
    await gone.files.write("/.data/secret", "x")
    await machines.kill(project_of(vmdocker).vm)
    await vmdocker.destroy(gone.id, volumes=True)
    await vmdocker.destroy(kept.id)
    assert [volume.label for volume in await vmdocker.volumes()] == ["kept"]
    again = await make(data=True, name="gone")
    assert (await again.exec("ls /.data")).text == ""
    names = ask_json(docker_daemon.address, "GET", "/containers/json", {"all": "1"})
    assert len([each for each in names if "skerry-" in each["Names"][0]]) >= 1
    await vmdocker.discover()
    left = ask_json(docker_daemon.address, "GET", "/containers/json", {"all": "1"})
    assert [each["Names"] for each in left] == [[f"/skerry-{again.id}"]]


async def test_boxes_of_a_machine_that_was_killed_are_stopped_and_can_be_started(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    first, second = await make(data=True), await make()
    await first.files.write("/.data/kept", "x")
    await machines.kill(project_of(vmdocker).vm)
    assert {id: status.state for id, status in (await vmdocker.discover()).items()} == {
        first.id: BoxState.STOPPED,
        second.id: BoxState.STOPPED,
    }
    with pytest.raises(AgentUnreachable, match="is off"):
        await vmdocker.dial(first.id)
    await vmdocker.start(first.id, first.spec)
    found = await vmdocker.discover()
    assert (found[first.id].state, found[second.id].state) == (BoxState.RUNNING, BoxState.STOPPED)
    await first.close()
    assert await first.files.read_text("/.data/kept") == "x"


@pytest.mark.usefixtures("own_registry")
async def test_a_registry_follows_what_became_of_a_machine(
    vmdocker: VmDocker, machines: FakeMachines, tmp_path: Path
) -> None:
    config = load({"state_dir": str(tmp_path / "registry")})
    async with AsyncSandboxManager(config, providers={"vmdocker": vmdocker}) as manager:
        sandbox = await manager.create(spec(data=True))
        await machines.kill(project_of(vmdocker).vm)
        await manager.reconcile()
        assert (await manager.record(sandbox.id)).state is State.STOPPED
        await manager.start(sandbox.id)
        assert (await sandbox.exec(["echo", "hello"])).text == "hello\n"
        await manager.destroy(sandbox.id, volumes=True)
        await machines.kill(project_of(vmdocker).vm)
        await manager.reconcile()
    project = project_of(vmdocker)
    left = sorted(path.name for path in project.folder.rglob("*"))
    assert not project.folder.exists(), (left, project.holdings, vmdocker._projects.boxes())


async def test_a_box_whose_lifetime_was_over_is_dead_when_its_machine_is_off(
    make: Any, vmdocker: VmDocker, machines: FakeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make(lifetime_s=500)
    await machines.kill(project_of(vmdocker).vm)
    assert (await vmdocker.discover())[sandbox.id].state is BoxState.STOPPED
    wall, now = time.time, clock.now()
    for years in (-30, 30):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda jump=years * 31_557_600: wall() + jump)
            assert (await vmdocker.discover())[sandbox.id].state is BoxState.STOPPED
    monkeypatch.setattr(clock, "now", lambda: msgspec.structs.replace(now, at=now.at + 501))
    assert (await vmdocker.discover())[sandbox.id].state is BoxState.DEAD


async def test_a_stopped_sandbox_needs_no_machine_and_keeps_its_disk(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    sandbox = await make()
    project = project_of(vmdocker)
    await vmdocker.stop(sandbox.id)
    assert machines.told(project.vm) == WHILE_IDLE
    await machines.kill(project.vm)
    assert (await vmdocker.discover())[sandbox.id].state is BoxState.STOPPED
    assert project.folder.exists()
    await vmdocker.start(sandbox.id, sandbox.spec)
    assert machines.told(project.vm) == FOR_EVER
    assert (await vmdocker.discover())[sandbox.id].state is BoxState.RUNNING


async def test_boxes_of_a_machine_that_does_not_answer_are_not_gone(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    await make("two")
    await make()
    project = project_of(vmdocker)
    socket, aside = project.vm / "docker.sock", project.vm / "aside"
    os.rename(socket, aside)
    (project.vm / "hung").touch()
    with pytest.raises(ProviderUnavailable, match="'one' runs and does not answer"):
        await vmdocker.discover()
    with pytest.raises(ProviderUnavailable, match="does not answer"):
        await make()
    assert machines.starts == ["two", "one"]
    os.rename(aside, socket)
    (project.vm / "hung").unlink()
    for id, status in (await vmdocker.discover()).items():
        if status.state is not BoxState.RUNNING:
            await vmdocker.destroy(id)


async def test_a_machine_that_does_not_come_up_is_told_with_its_last_words(
    vmdocker: VmDocker, machines: FakeMachines
) -> None:
    machines.fails = True
    with pytest.raises(CreateFailed, match="last words of the console"):
        await AsyncSandbox.create(spec(), vmdocker)
    assert not await vmdocker.discover()
    machines.fails = False
    sandbox = await AsyncSandbox.create(spec(), vmdocker)
    await sandbox.destroy()


async def test_a_machine_that_does_not_come_up_again_does_not_run_on(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    sandbox = await make(data=True)
    await vmdocker.stop(sandbox.id)
    project = project_of(vmdocker)
    await machines.kill(project.vm)
    machines.fails = True
    with pytest.raises(CreateFailed):
        await vmdocker.start(sandbox.id, sandbox.spec)
    assert not machines.is_running(project.vm)
    machines.fails = False
    await vmdocker.start(sandbox.id, sandbox.spec)
    assert machines.is_running(project.vm)


async def test_what_a_killed_maker_left_is_found_and_removed(
    vmdocker: VmDocker, machines: FakeMachines, open_again: Callable[[], VmDocker]
) -> None:
    """It came as far as the note, and as far as a machine whose Docker had not answered."""
    from skerry.providers.vmdocker.projects import BoxNote

    id, project = new_id(), project_of(vmdocker)
    vmdocker._projects.note(id, BoxNote(project="one", created_at=time.time()))
    assert (await open_again().discover())[id].state is BoxState.REMAINS
    await open_again().destroy(id, volumes=True)
    assert not await open_again().discover()
    vmdocker._projects.note(id, BoxNote(project="one", created_at=time.time()))
    project.make()
    await machines.start(project.vm, "one", network=False)
    other = open_again()
    assert (await other.discover())[id].state is BoxState.REMAINS
    assert not machines.is_running(project.vm)
    await other.destroy(id)
    assert not project.folder.exists()


async def test_a_machine_that_was_never_told_to_go_is_told_by_whoever_looks(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    sandbox = await make()
    project = project_of(vmdocker)
    await vmdocker._lifecycle.engine(project).destroy(sandbox.id)
    vmdocker._projects.forget(sandbox.id)  # and there its process was killed
    assert machines.told(project.vm) == FOR_EVER
    assert not await vmdocker.discover()
    assert machines.told(project.vm) == WHILE_IDLE
    (project.vm / "end").write_text("[null, 42]")
    await vmdocker.discover()
    assert machines.told(project.vm) == [None, 42]  # a look does not make it wait longer


async def test_a_machine_that_did_not_go_when_it_should_is_ended_by_the_clock_of_the_boot(
    make: Any, vmdocker: VmDocker, machines: FakeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await make()).destroy()
    project = project_of(vmdocker)
    os.utime(project.folder / "idle", (0, 0))  # the wall clock jumped, by half a century
    await vmdocker.discover()
    assert project.folder.exists()
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: msgspec.structs.replace(now, at=now.at + 200))
    await vmdocker.discover()
    assert not project.folder.exists()


async def test_snapshots_are_of_their_project_and_outlive_the_machine(
    make: Any, vmdocker: VmDocker, machines: FakeMachines
) -> None:
    sandbox = await make()
    await sandbox.files.write("note", "x")
    await vmdocker.snapshot(sandbox.id, "first")
    other = await make("two")
    with pytest.raises(Conflict):
        await vmdocker.snapshot(other.id, "first")
    with pytest.raises(NotFound, match="project one has one"):
        await AsyncSandbox.create(spec("two", snapshot="first", image=None), vmdocker)
    await sandbox.destroy()
    await other.destroy()
    for name in ("one", "two"):  # both are one Docker here
        await machines.kill(project_of(vmdocker, name).vm)
    assert [each.name for each in await vmdocker.snapshots()] == ["first"]
    again = await make(snapshot="first", image=None)
    assert await again.files.read_text("note") == "x"
    await again.destroy()
    await vmdocker.remove_snapshot("first")
    assert not await vmdocker.snapshots()
    with pytest.raises(NotFound):
        await vmdocker.remove_snapshot("first")


async def test_an_image_is_kept_once_and_loaded_where_it_is_used(
    make: Any, vmdocker: VmDocker, root: Path, tmp_path: Path
) -> None:
    sandbox = await make()
    (image,) = await vmdocker.images()
    assert (image.names, image.used_by) == ((f"{IMAGE}:latest",), 1)
    assert (await vmdocker.discover())[sandbox.id].image == image.id
    assert image.id in sandbox.enforced["image"].by
    with pytest.raises(Conflict, match="used by 1"):
        await vmdocker.remove_image(IMAGE)
    other = tmp_path / "other"
    (other / "etc").mkdir(parents=True)
    (other / "etc" / "other").write_text("x")
    changed = await vmdocker.import_image(other, IMAGE, lambda _: None)
    assert changed.id != image.id
    assert len(list((tmp_path / "state" / "images").glob("*.tar"))) == 1
    await vmdocker.import_image(root, IMAGE, lambda _: None)
    await sandbox.destroy()
    await vmdocker.remove_image(IMAGE)
    with pytest.raises(ImageNotFound):
        await vmdocker.remove_image(IMAGE)
    assert not list((tmp_path / "state" / "images").iterdir())


async def test_a_box_has_a_bridge_where_machines_have_a_network(
    vmdocker: VmDocker, machines: FakeMachines, tmp_path: Path, cache: Path
) -> None:
    config = VmDockerConfig(state_dir=str(tmp_path / "state"), cache_dir=str(cache), idle_s=100, vm_network=True)
    networked = VmDocker(config, machines=machines)
    with pytest.raises(Unsupported, match="vm_network = true"):
        await AsyncSandbox.create(spec(network="bridge"), vmdocker)
    with pytest.raises(Unsupported, match="there are none, rules and bridge"):
        await AsyncSandbox.create(spec(network="host"), networked)
    machines.no_network = "nobody gives it one"
    with pytest.raises(Unsupported, match="nobody gives it one"):
        await AsyncSandbox.create(spec(network="bridge"), networked)
    machines.no_network = None
    assert not machines.starts

    without = await AsyncSandbox.create(spec(), vmdocker)
    with pytest.raises(Conflict, match="was started without a network"):
        await AsyncSandbox.create(spec(network="bridge"), networked)
    await without.destroy()
    await machines.kill(project_of(vmdocker).vm)
    bridged = await AsyncSandbox.create(spec(network="bridge"), networked)
    assert machines.networks == [False, True]
    assert "leads out but not to the host" in bridged.enforced["network"].by
    assert (await bridged.exec("cat /proc/net/dev")).text.count("eth0") == 1
    await bridged.destroy()
    await networked.aclose()


async def test_the_address_of_a_projects_docker(vmdocker: VmDocker, machines: FakeMachines) -> None:
    with pytest.raises(NotFound, match="--start"):
        await vmdocker.docker_host("one")
    with pytest.raises(InvalidSpec, match="--project"):
        await vmdocker.docker_host("default", start=True)
    address = await vmdocker.docker_host("one", start=True)
    assert await vmdocker.docker_host("one") == address
    assert ask_json(address, "GET", "/version")["Os"] == "linux"
    project = project_of(vmdocker)
    assert machines.told(project.vm) == WHILE_IDLE
    await machines.kill(project.vm)
    await vmdocker.discover()
    assert project.folder.exists()  # what somebody else put there is not ours to remove


class TestStrangers(StrangerCases):
    options: ClassVar[SpecOptions] = {"provider": "vmdocker", "project": "p", "image": IMAGE, "data": False}
    has_mounts = False

    @pytest.fixture
    def provider(self, vmdocker: VmDocker) -> VmDocker:
        return vmdocker
