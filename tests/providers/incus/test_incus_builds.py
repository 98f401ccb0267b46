"""A Dockerfile becomes an image of Incus: whatever builder is here builds, and what it made is imported."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engines.daemons import Daemon, find
from engines.images import busybox, load
from engines.incus_world import World
from engines.incusd import Incusd
from manager.world import config_of

from skerry.errors import InvalidSpec, ProviderError, Unsupported
from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.base import Progress
from skerry.providers.incus import Incus

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("incus")]

BASE = "skerry-test/busybox"
NAME = "built"
DOCKERFILE = (
    f"FROM {BASE}\nARG WHO=nobody\nRUN echo built for $WHO > /etc/made\nENV MARK=yes\nWORKDIR /srv\nUSER 1000\n"
)
NOWHERE = "unix:///nonexistent/engine.sock"


@pytest.fixture(autouse=True)
async def _leave_no_image(incus: Incus) -> AsyncIterator[None]:
    yield
    for image in await incus.images():
        if image.names != ("busybox",):
            await incus.remove_image(image.id)


@pytest.fixture
def settings(incus_daemon: Incusd, cache: Path) -> dict[str, dict[str, Any]]:
    """Settings of providers, without any builder."""
    mine = {"host": incus_daemon.address, "cache_dir": str(cache)}
    return {"incus": mine, "docker": {"host": NOWHERE}, "podman": {"host": NOWHERE}}


def manager_of(folder: Path, settings: dict[str, dict[str, Any]]) -> AsyncSandboxManager:
    return AsyncSandboxManager(config_of(folder, provider="incus", providers=settings), reconcile=False)


async def check_built(manager: AsyncSandboxManager, image: str) -> None:
    """A box of it has the files, and what the Dockerfile asks for is heard."""
    sandbox = await manager.create(image=image, data=False)
    try:
        assert (await sandbox.exec("cat /etc/made; echo $MARK $PWD; id -u")).text == "built for us\nyes /srv\n1000\n"
    finally:
        await sandbox.destroy()


async def test_an_engine_builds_and_incus_has_the_image(
    docker_daemon: Daemon, settings: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    load(docker_daemon.address, "busybox")
    told: list[Progress] = []
    async with manager_of(tmp_path, settings | {"docker": {"host": docker_daemon.address}}) as manager:
        image = await manager.build_base_image(DOCKERFILE, name=NAME, args={"WHO": "us"}, on_progress=told.append)
        assert image.names == (NAME,)
        assert image.id in [each.id for each in await manager.images()]
        messages = [each.message for each in told]
        assert any(message.lower().startswith("step 3/") for message in messages)
        assert told[-1].done  # the bytes of the import
        await check_built(manager, NAME)
        with pytest.raises(ProviderError, match="went wrong"):
            await manager.build_base_image(f"FROM {BASE}\nRUN echo went wrong; exit 3\n", name="never")
        assert "never" not in [name for each in await manager.images() for name in each.names]


async def test_a_cluster_has_what_was_built_on_every_member(docker_daemon: Daemon, world: World) -> None:
    load(docker_daemon.address, "busybox")
    mine = world.manager()
    settings = {**mine.config.providers, "docker": {"host": docker_daemon.address}}
    await mine.aclose()
    async with manager_of(world.folder, settings) as manager:
        image = await manager.build_base_image(DOCKERFILE, name=NAME, args={"WHO": "us"})
        try:
            for member in world.cluster.members:
                sandbox = await manager.create(image=NAME, data=False, target=member)
                assert (await sandbox.exec(["cat", "/etc/made"])).text == "built for us\n"
                await sandbox.destroy()
        finally:
            await manager.remove_image(image.id)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Podman without a service, with a store of its own that has the base image."""
    program = find("podman")
    if program is None:
        pytest.skip("no podman here; scripts/install brings all that the tests need")
    folder = tmp_path / "storage"
    folder.mkdir()
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/root"\n'
    )
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        '[engine]\nevents_logger = "file"\nlock_type = "file"\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n'
        f'tmp_dir = "{folder}/tmp"\n[network]\nnetwork_config_dir = "{folder}/net"\n'
        f'[engine.runtimes]\nrunc = ["{find("runc")}"]\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
    monkeypatch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with busybox() as tar:
        subprocess.run([program, "import", "-", BASE], input=tar.read(), check=True, timeout=60, capture_output=True)
    return folder


async def test_without_any_service_a_program_builds_behind_the_same_walls(
    storage: Path, settings: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "note").write_text("copied\n")
    told: list[Progress] = []
    look = "grep -E '^(CapEff|Seccomp):' /proc/self/status; wc -l < /proc/net/dev"
    text = DOCKERFILE.replace("USER", f"COPY note /etc/note\nRUN {look}\nUSER")
    async with manager_of(tmp_path, settings) as manager:
        await manager.build_base_image(text, name=NAME, args={"WHO": "us"}, context=context, on_progress=told.append)
        await check_built(manager, NAME)
        said = [each.message for each in told]
        capabilities = next(line.split()[1] for line in said if line.startswith("CapEff"))
        assert int(capabilities, 16) == sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 31))
        assert "Seccomp:\t2" in said
        assert "3" in said  # two lines of titles, and loopback
        greedy = f"FROM {BASE}\nRUN dd if=/dev/zero of=/dev/null bs=200M count=1\n"
        with pytest.raises(ProviderError, match="64M of memory"):
            await manager.build_base_image(greedy, name="never", memory="64M")
        with pytest.raises(ProviderError, match="not here, and has no network"):
            await manager.build_base_image("FROM skerry-test/none\n", name="never")
        with pytest.raises(InvalidSpec, match="--mount"):
            await manager.build_base_image(f"FROM {BASE}\nRUN --mount=type=cache,target=/x true\n", name="never")
        with pytest.raises(ProviderError, match="went wrong"):
            await manager.build_base_image(f"FROM {BASE}\nRUN echo went wrong; exit 3\n", name="never")


async def test_where_nothing_builds_the_error_says_what_would(
    incus: Incus, settings: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.vm.images.programs.which", lambda program: None)
    async with manager_of(tmp_path, settings) as manager:
        with pytest.raises(Unsupported, match=r"no builder here.*Podman or Buildah.*skerry image import"):
            await manager.build_base_image(DOCKERFILE)
        with pytest.raises(Unsupported, match="recipes are for machines"):
            await manager.build_base_image(recipe="minimal")
