"""Builds in machines that are there for one build alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from engines.api import ask
from engines.daemons import Daemon
from engines.oci_layouts import Layout, layer
from providers.dockerapi.registry import serving
from providers.vmdocker.conftest import IMAGE
from providers.vmdocker.fakes import FakeMachines

from skerry.errors import ImageNotFound, ProviderError, Unsupported
from skerry.model.spec import Network, Spec
from skerry.providers.base import ImageBuild, Progress
from skerry.providers.vmdocker import VmDocker
from skerry.sandbox.sandbox import AsyncSandbox


def ignore(_: Progress) -> None:
    return


async def test_an_image_is_built_in_a_machine_of_its_own_which_goes_with_the_build(
    vmdocker: VmDocker, machines: FakeMachines, tmp_path: Path
) -> None:
    name = "skerry-test/made-in-a-machine"
    build = ImageBuild(dockerfile=f"FROM {IMAGE}\nRUN echo made > /made\n", name=name)
    up: list[bool] = []
    image = await vmdocker.build_image(build, lambda _: up.append(any(tmp_path.glob("state/*/vm/running"))))
    assert any(up)
    assert machines.starts == [f"build of {name}"]
    assert image.names == (f"{name}:latest",)
    sandbox = await AsyncSandbox.create(Spec.of(provider="vmdocker", image=name, project="one"), vmdocker)
    assert (await sandbox.exec(["cat", "/made"])).text == "made\n"
    await sandbox.destroy()
    with pytest.raises(ProviderError, match="no network"):
        await vmdocker.build_image(msgspec.structs.replace(build, dockerfile=f"FROM {IMAGE}\nRUN false\n"), ignore)
    assert [project.name for project in vmdocker._projects.all()] == ["one"]
    await vmdocker.remove_image(name)


async def test_a_build_does_not_begin_in_what_one_that_was_killed_left(
    vmdocker: VmDocker, machines: FakeMachines, tmp_path: Path
) -> None:
    name = "skerry-test/made-in-a-machine"
    project = vmdocker._projects.get(f"build of {name}")
    project.make()
    await machines.start(project.vm, project.name, network=False)
    project.mark_up(True)
    left = project.vm / "of-the-last-one"
    left.touch()
    seen: list[bool] = []
    build = ImageBuild(dockerfile=f"FROM {IMAGE}\nRUN true\n", name=name)
    await vmdocker.build_archive(build, tmp_path / "made", lambda _: seen.append(left.exists()))
    assert seen[0]
    assert not any(seen[1:])
    assert not project.folder.exists()


async def test_a_build_with_a_network_gets_what_it_builds_on_from_its_registry(
    vmdocker: VmDocker, machines: FakeMachines, docker_daemon: Daemon
) -> None:
    name = "skerry-test/made-in-a-machine"
    with serving(Layout(layer({"base": b"x"}))) as registry:
        base = f"{registry}/some/base"
        build = ImageBuild(dockerfile=f"FROM {base}\nLABEL made=here\n", name=name, network=Network.BRIDGE)
        await vmdocker.build_image(build, ignore)
    ask(docker_daemon.address, "DELETE", f"/images/{base}")
    assert machines.networks == [True]
    newest, *_ = await vmdocker.images()
    assert newest.names == (f"{name}:latest",)
    assert not vmdocker._projects.all()


async def test_an_image_is_pulled_in_a_machine_of_its_own_which_goes_with_the_pull(
    vmdocker: VmDocker, machines: FakeMachines, docker_daemon: Daemon
) -> None:
    with serving(Layout(layer({"f": b"x"}))) as registry:
        name = f"{registry}/some/image"
        image = await vmdocker.pull_image(name, ignore)
        assert (machines.starts, machines.networks) == ([f"pull of {name}"], [True])
        with pytest.raises(ImageNotFound, match="no registry has"):
            await vmdocker.pull_image(f"{name}:other", ignore)
    ask(docker_daemon.address, "DELETE", f"/images/{name}")
    assert image.names == (f"{name}:latest",)
    assert image.id in {each.id for each in await vmdocker.images()}
    assert not vmdocker._projects.all()
    assert not list(vmdocker._config.state().glob("images/.new-*"))


async def test_what_a_machine_without_a_network_cannot_build_is_refused_before_one_is_started(
    vmdocker: VmDocker, machines: FakeMachines
) -> None:
    machines.no_network = "nobody gives it one"
    build = ImageBuild(dockerfile=f"FROM {IMAGE}", name="y", network=Network.BRIDGE)
    with pytest.raises(Unsupported, match="nobody gives it one; leave it at none"):
        await vmdocker.build_image(build, ignore)
    with pytest.raises(Unsupported, match=r"nobody gives it one.*docker save"):
        await vmdocker.pull_image("debian", ignore)
    with pytest.raises(ImageNotFound, match="image import"):
        await vmdocker.build_image(ImageBuild(dockerfile="FROM x", name="y"), ignore)
    with pytest.raises(Unsupported, match="vm_memory"):
        await vmdocker.build_image(ImageBuild(dockerfile=f"FROM {IMAGE}", name="y", memory=1 << 40), ignore)
    assert machines.starts == []
