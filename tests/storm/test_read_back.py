"""A box that whoever makes it has not put into its groups is no box: the create fails, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines.daemons import Daemon
from engines.incusd import Incusd

from skerry import providers
from skerry.errors import CreateFailed
from skerry.host import cgroup
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.dockerapi import profile as engine_profile
from skerry.providers.incus import profile as incus_profile
from skerry.sandbox.sandbox import AsyncSandbox

from .test_first_creates import needs_root

pytestmark = pytest.mark.timeout(300)


async def refused(name: str, settings: dict[str, Any], why: str, **spec: Any) -> None:
    """As a default that nobody asks for, since of one that is asked for more is checked."""
    provider: Provider = providers.load(name, settings)
    try:
        with pytest.raises(CreateFailed, match=why):
            await AsyncSandbox.create(Spec.of(provider=name, **spec), provider)
        assert not await provider.discover()
    finally:
        await provider.aclose()


@pytest.fixture
def no_placing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made, and nothing comes of the process that is put there."""
    if cgroup.find().why_not:
        pytest.skip("this host lets us make no cgroups")
    monkeypatch.setattr(cgroup, "place", lambda groups, pid: None)


@needs_root
@pytest.mark.usefixtures("no_placing")
async def test_local(local: dict[str, Any]) -> None:
    await refused("local", local, "is not in the cgroup")


@needs_root
@pytest.mark.usefixtures("no_placing")
async def test_qemu(vm_cache: Path, vm_image: str, folder: Path) -> None:
    settings = {"state_dir": str(folder / "state"), "cache_dir": str(vm_cache.parent), "template": False}
    await refused("qemu", {**settings, "start_timeout_s": 120.0}, "is not in the cgroup", data=False)


@pytest.mark.parametrize("dropped", ["Memory", "PidsLimit", "NanoCpus"])
@pytest.mark.parametrize("engine", ["docker", "podman", "gvisor"])
async def test_an_engine_that_takes_a_limit_and_sets_none(
    engine: str, dropped: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "podman" if engine == "podman" else "docker"
    daemon: Daemon = request.getfixturevalue(f"{name}_daemon")
    images: dict[str, str] = request.getfixturevalue(f"{name}_images")
    runtime = {"runtime": request.getfixturevalue("gvisor")} if engine == "gvisor" else {}
    whole = engine_profile._host_config
    lost = {dropped, "MemorySwap"} if dropped == "Memory" else {dropped}
    monkeypatch.setattr(
        engine_profile,
        "_host_config",
        lambda *args: {key: value for key, value in whole(*args).items() if key not in lost},
    )
    settings = {"host": daemon.address, "state_dir": str(folder / "state"), "cache_dir": str(folder / "cache")}
    controller = {"Memory": "memory", "PidsLimit": "pids", "NanoCpus": "cpu"}[dropped]
    why = f"no cgroup holds process [0-9]+ to its limit of {controller}"
    await refused(name, {**settings, "cpus": 0.5}, why, image=images["busybox"], data=False, **runtime)


async def test_incus(incus_daemon: Incusd, incus_image: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incus_profile, "_limits", lambda frame: {})
    settings = {"host": incus_daemon.address, "cache_dir": str(folder / "cache")}
    await refused("incus", settings, "no cgroup holds process", image=incus_image, data=False)
