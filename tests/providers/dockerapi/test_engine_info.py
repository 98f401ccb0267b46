"""What is said of a daemon from its own account."""

from __future__ import annotations

import os

import msgspec
import pytest

from skerry.host import disks
from skerry.providers.dockerapi.info import EngineInfo


def test_gvisor_is_there_under_any_name_that_says_so() -> None:
    for name in ("runsc", "runsc-kvm", "gvisor"):
        assert EngineInfo(runtimes={"runc": {}, name: {}}).runtimes_there()["gvisor"].by == f"runtime {name}"


def test_gvisor_that_is_not_registered_comes_with_its_fix() -> None:
    told = EngineInfo(runtimes={"runc": {}}).runtimes_there()
    assert (told["runtimes"].by, told["gvisor"].by) == ("runc", "")
    assert "runsc install" in told["gvisor"].why_not


@pytest.mark.parametrize("name", ["elsewhere", ""])
def test_a_daemon_of_another_machine_is_named(name: str) -> None:
    told = EngineInfo(name=name, kernel_version=os.uname().release).place("tcp://there:2375")
    assert told == f"tcp://there:2375, on {name or 'another machine'}"


@pytest.mark.parametrize("option", ["name=userns", "name=rootless"])
def test_a_daemon_with_other_uids_than_ours_gets_no_disks_of_ours(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "why_none", lambda: None)
    host, memory = os.uname(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = EngineInfo(name=host.nodename, kernel_version=host.release, mem_total=memory)
    assert info.has_disks
    assert not msgspec.structs.replace(info, security_options=[option]).has_disks
