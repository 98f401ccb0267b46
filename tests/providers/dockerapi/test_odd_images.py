"""Boxes of images whose users, folders and volumes are not the usual ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Unpack

import pytest

from skerry.errors import ImageNotFound, InvalidSpec, SkerryError, UserNotFound
from skerry.model.spec import Spec, SpecOptions
from skerry.providers.base import ImageBuild
from skerry.providers.docker import Docker
from skerry.sandbox.sandbox import AsyncSandbox

Build = Callable[..., Awaitable[str]]


@pytest.fixture
async def build(docker: Docker, docker_images: dict[str, str]) -> AsyncIterator[Build]:
    """Images of one's own on top of busybox; they go at the end, with the boxes that were made of them."""
    names: list[str] = []

    async def build(*lines: str) -> str:
        names.append(f"skerry-odd:{len(names)}")
        text = "\n".join([f"FROM {docker_images['busybox']}", *lines])
        await docker.build_image(ImageBuild(dockerfile=text, name=names[-1]), lambda _: None)
        return names[-1]

    yield build
    for id in await docker.discover():
        await docker.destroy(id, volumes=True)
    for name in names:
        await docker.remove_image(name)


async def make(docker: Docker, image: str, **options: Unpack[SpecOptions]) -> AsyncSandbox:
    return await AsyncSandbox.create(Spec.of(provider="docker", image=image, **options), docker)


async def test_who_an_image_names_by_a_number_and_a_group_runs_in_its_box(docker: Docker, build: Build) -> None:
    groups = "RUN echo 'tools:x:77:' >> /etc/group"
    for user, told in (("1000:tools", "1000 77"), ("app:tools", "1000 77"), ("4242:78", "4242 78")):
        sandbox = await make(docker, await build(groups, f"USER {user}"))
        assert (await sandbox.exec('echo "$(id -u) $(id -g)"; echo x > ~/mine')).text.strip() == told
    with pytest.raises(InvalidSpec, match="no group is called 'none'"):
        await make(docker, await build("USER 1000:none"))


async def test_commands_start_in_the_folder_of_the_image_if_their_user_may_enter_it(
    docker: Docker, build: Build
) -> None:
    image = await build("RUN mkdir -m 700 /closed", "WORKDIR /closed")
    sandbox = await make(docker, image)
    assert (await sandbox.exec("pwd")).text == "/home/user\n"
    assert (await sandbox.exec("pwd", user="root")).text == "/closed\n"
    assert (await (await make(docker, await build("WORKDIR /open"))).exec("pwd")).text == "/open\n"
    asked = await make(docker, image, cwd="/closed")
    with pytest.raises(SkerryError, match="Permission denied"):
        await asked.exec("pwd")


async def test_a_mount_goes_before_a_volume_of_the_image(docker: Docker, build: Build, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "in").write_text("seen\n")
    sandbox = await make(docker, await build("VOLUME /work/"), mounts=[f"{tmp_path}:/work"])
    assert (await sandbox.exec("cat /work/in")).text == "seen\n"


async def test_a_command_of_a_user_that_the_box_does_not_know_says_so(docker: Docker, build: Build) -> None:
    sandbox = await make(docker, await build())
    with pytest.raises(UserNotFound, match="no user is called 'nobody-knows'"):
        await sandbox.exec(["true"], user="nobody-knows")
    assert (await sandbox.exec(["true"])).ok


async def test_what_is_no_user_or_no_image_is_refused(docker: Docker, build: Build) -> None:
    with pytest.raises(InvalidSpec, match="out of range"):
        await make(docker, await build(), user="9999999999")
    with pytest.raises(InvalidSpec, match="not a name for an image"):
        await make(docker, "../../info")
    with pytest.raises(ImageNotFound, match="skerry image pull --provider docker no-such-image"):
        await make(docker, "no-such-image")
    assert not await docker.discover()
