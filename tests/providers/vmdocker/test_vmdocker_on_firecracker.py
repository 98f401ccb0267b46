"""Machines of projects on Firecracker, of which there is a stand-in: which programs run them, and when they run."""

from __future__ import annotations

import io
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from providers.firecracker.conftest import stand_ins as stand_ins
from providers.firecracker.conftest import world_folder as world_folder
from providers.firecracker.fc_world import config_on
from vm.firecracker.installing import StandIns
from vm.standins import script, vm_folder

from skerry.errors import ProviderError
from skerry.host import processes, uids
from skerry.providers.dockerapi import api, progress
from skerry.providers.dockerapi.progress import EngineWork
from skerry.providers.vmdocker import VmDocker, VmDockerConfig, archives
from skerry.providers.vmdocker.machines import ProjectMachines
from skerry.vm import launch
from skerry.vm.folder import VmFolder
from skerry.vm.launch import JailedProcess, Launch

needs_root = pytest.mark.skipif(not uids.are_available(), reason="only root has jails")


@pytest.mark.parametrize("hypervisor", ["", "firecracker"])
async def test_the_programs_of_the_settings_run_the_machines(
    world_folder: Path, stand_ins: StandIns, hypervisor: str
) -> None:
    jailed = uids.are_available()
    firecracker = config_on(world_folder, jailed=jailed)
    config = VmDockerConfig(
        hypervisor=hypervisor,  # type: ignore[arg-type]
        program=firecracker.program,
        jailer=firecracker.jailer,
        state_dir=firecracker.state_dir,
        cache_dir=firecracker.cache_dir,
    )
    provider = VmDocker(config)
    assert (await provider.describe())["hypervisor"].by == "firecracker 1.17.0, kvm"
    assert bool(stand_ins.jailed()) == jailed
    await provider.aclose()


@pytest.fixture
def folder() -> Iterator[VmFolder]:
    with vm_folder() as folder:
        yield folder


@needs_root
def test_a_machine_that_has_lost_its_warden_does_not_run(folder: VmFolder, tmp_path: Path) -> None:
    """Nobody serves the socket of its Docker any more."""
    argv = script("sleep 60 & echo $! > pid").argv  # as a jailer leaves its child to the warden
    vm = launch.start(folder, Launch(argv=argv, jail=JailedProcess(uid=uids.take(), pid_file="pid")), None)
    assert vm.warden is not None
    assert vm.vmm is not None
    machines = ProjectMachines(VmDockerConfig(cache_dir=str(tmp_path)), lambda _: pytest.fail("it is not asked"))
    assert machines.is_running(folder.path)
    os.kill(vm.warden.pid, signal.SIGKILL)
    assert processes.wait_until_dead([vm.warden], 10)
    assert vm.vmm.is_alive()
    assert not machines.is_running(folder.path)
    assert not vm.vmm.is_alive()


def test_lists_without_end_from_a_machine_that_was_taken_over_are_refusals_like_others(tmp_path: Path) -> None:
    """It answers for its Docker."""
    deep = b'{"message":' + b"[" * 30_000
    assert api._message(deep).startswith('{"message":[[')
    assert progress._read_line(EngineWork("the build"), deep) is None
    with tarfile.open(tmp_path / "archive", "w") as tar:
        manifest = tarfile.TarInfo("manifest.json")
        manifest.size = len(deep)
        tar.addfile(manifest, io.BytesIO(deep))
    with pytest.raises(ProviderError, match="has no image in it"):
        archives._image_id(tmp_path / "archive")
