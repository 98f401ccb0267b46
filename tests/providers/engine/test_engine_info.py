"""What is said of a daemon from its own account."""

from __future__ import annotations

import os

import pytest

from skerry.providers.engine.info import Info


def test_gvisor_is_there_under_any_name_that_says_so() -> None:
    for name in ("runsc", "runsc-kvm", "gvisor"):
        assert Info(runtimes={"runc": {}, name: {}}).runtimes_there()["gvisor"].by == f"runtime {name}"


def test_gvisor_that_is_not_registered_comes_with_its_fix() -> None:
    told = Info(runtimes={"runc": {}}).runtimes_there()
    assert (told["runtimes"].by, told["gvisor"].by) == ("runc", "")
    assert "runsc install" in told["gvisor"].why_not


@pytest.mark.parametrize("name", ["elsewhere", ""])
def test_a_daemon_of_another_machine_is_named(name: str) -> None:
    told = Info(name=name, kernel_version=os.uname().release).place("tcp://there:2375")
    assert told == f"tcp://there:2375, on {name or 'another machine'}"
