"""A root that can install packages: what it takes, and what every other box is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from providers import packages
from providers.making import making

from skerry.errors import InvalidSpec
from skerry.model.spec import Spec
from skerry.providers.docker import Docker
from skerry.providers.podman import Podman

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def make(docker: Docker, docker_images: dict[str, str]) -> AsyncIterator[Any]:
    async with making(docker, image=docker_images["debian"], data=False) as make:
        yield make


@pytest.mark.xdist_group("docker")
async def test_a_root_of_docker_installs_a_package(make: Any, tmp_path: Path) -> None:
    sandbox = await make(admin=True)
    assert sandbox.enforced["admin"].by.startswith("the host's root, with no capability but CHOWN")
    await packages.check_capabilities(sandbox)
    await packages.check_root_can_install(sandbox, packages.make(tmp_path))
    plain = await make(user="root", writable_root=True)
    assert not (await plain.exec("useradd worker && touch /x && chown worker /x")).ok
    assert "admin" not in plain.enforced


@pytest.mark.xdist_group("docker")
async def test_a_root_of_gvisor_installs_a_package(make: Any, gvisor: str, tmp_path: Path) -> None:
    sandbox = await make(admin=True, runtime=gvisor)
    assert sandbox.enforced["admin"].by == "root of a kernel of its own"
    await packages.check_root_can_install(sandbox, packages.make(tmp_path), has_setuid=False)  # its kernel knows none


@pytest.mark.xdist_group("podman")
async def test_a_root_of_podman_installs_a_package(
    podman: Podman, podman_images: dict[str, str], tmp_path: Path
) -> None:
    async with making(podman, image=podman_images["debian"], data=False) as make:
        sandbox = await make(admin=True)
        await packages.check_capabilities(sandbox)
        await packages.check_root_can_install(sandbox, packages.make(tmp_path))
        await packages.check_scratch(await make())


@pytest.mark.xdist_group("docker")
async def test_scratch_folders_can_be_written_to_and_are_bounded(make: Any, gvisor: str, tmp_path: Path) -> None:
    for options in ({}, {"runtime": gvisor}):
        await packages.check_scratch(await make(**options))
    sandbox = await make()
    sizes = await sandbox.exec("df -B1 --output=size /tmp /run /var/tmp | sort -u | wc -l")
    assert sizes.text == "2\n"  # a title, and one size
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("kept\n")
    mine = await make(mounts=[f"{tmp_path}/kept:/run:ro", f"{tmp_path}/kept:/var/tmp/inner:ro"])
    assert (await mine.exec("cat /run/file /var/tmp/inner/file")).text == "kept\nkept\n"


def test_an_admin_is_root() -> None:
    spec = Spec.of(provider="docker", image="x", admin=True)
    assert (spec.user, spec.writable_root) == ("root", True)
    assert Spec.parse({"image": "x", "admin": True, "user": "0"}).user == "0"
    with pytest.raises(InvalidSpec, match="the box is root's then"):
        Spec.of(image="x", admin=True, user="1000")
