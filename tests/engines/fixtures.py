"""One engine of each kind for all tests of a session, started when the first test asks for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from skerry.config import variable

from .daemons import Daemon, NotStartable, find, running
from .images import load, make_clients, make_debian
from .incus_cluster import Cluster, running_cluster
from .incusd import IMAGE, Incusd, running_incus


@pytest.hookimpl(tryfirst=True)  # before any worker is given a test
def pytest_collection_finish(session: pytest.Session) -> None:
    """What takes a minute the first time is done before any test's time runs, and what the engines change for good
    before any test compares the host with itself."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    if wanted & {"docker_images", "podman_images", "debian_root"}:
        with suppress(NotStartable, subprocess.SubprocessError):
            make_debian()
    if "clients_root" in wanted:
        with suppress(NotStartable, subprocess.SubprocessError):
            make_clients()
    if any(f"{name}_daemon" in wanted and find(name) for name in ("docker", "podman", "incus")):
        with suppress(OSError):  # not root, who alone starts them
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[Daemon]:
    yield from _started("docker")


@pytest.fixture(scope="session")
def podman_daemon() -> Iterator[Daemon]:
    yield from _started("podman")


@pytest.fixture(scope="session")
def docker_images(docker_daemon: Daemon) -> dict[str, str]:
    """The names of the images, by their short names: busybox, debian, distroless."""
    return _loaded(docker_daemon)


@pytest.fixture(scope="session")
def podman_images(podman_daemon: Daemon) -> dict[str, str]:
    return _loaded(podman_daemon)


@pytest.fixture(scope="session")
def clients_root() -> Path:
    """A packed root file system with the programs that `gate.clients` runs."""
    try:
        return make_clients()
    except (NotStartable, subprocess.SubprocessError) as error:
        _refuse("qemu", str(error))


@pytest.fixture(scope="session")
def debian_root() -> Path:
    """A packed root file system of Debian, which the engines' image of that name is made of."""
    try:
        return make_debian()
    except (NotStartable, subprocess.SubprocessError) as error:
        _refuse("qemu", str(error))


@pytest.fixture(scope="session")
def gvisor() -> str:
    """The name of the runtime that Docker knows gVisor by; Podman takes no runtime from a request."""
    if find("runsc") is None:
        _refuse("gvisor", "no runsc here; scripts/install brings all that the tests need")
    return "runsc"


@pytest.fixture(scope="session")
def incus_daemon() -> Iterator[Incusd]:
    with ExitStack() as stack:
        try:
            daemon = stack.enter_context(running_incus())
        except NotStartable as error:
            _refuse("incus", str(error))
        yield daemon


@pytest.fixture(scope="session")
def incus_cluster() -> Iterator[Cluster]:
    """Three members, n1 to n3, with the same image as the one daemon has."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(running_cluster())
        except NotStartable as error:
            _refuse("incus", str(error))
        yield cluster


@pytest.fixture(scope="session")
def incus_image(incus_daemon: Incusd) -> str:
    """The alias of an image with busybox and nothing else."""
    return IMAGE


def _started(name: str) -> Iterator[Daemon]:
    with ExitStack() as stack:
        try:
            daemon = stack.enter_context(running(name))
        except NotStartable as error:
            _refuse(name, str(error))
        yield daemon


def _loaded(daemon: Daemon) -> dict[str, str]:
    try:
        return {name: load(daemon.address, name) for name in ("busybox", "debian", "distroless")}
    except (NotStartable, subprocess.SubprocessError) as error:
        _refuse(daemon.name, str(error))


def _refuse(what: str, why: str) -> NoReturn:
    """A lack skips the test, but not where this component is said to be there."""
    if what in (variable("SKERRY_REQUIRE") or "").split(","):
        pytest.fail(f"SKERRY_REQUIRE names {what}, and {why}")
    pytest.skip(why)
