"""What machines of tests are made of: made once, kept for other runs in a folder beside the engines' images."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from skerry.config import variable
from skerry.errors import ImageNotFound, SkerryError
from skerry.vm.base import Kernel
from skerry.vm.images.store import ImageStore

_LONG = {"vm_kernel": "", "vm_image": "minimal", "docker_vm_image": "docker"}
"""Which recipe makes what a fixture gives; the kernel comes with each."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """What takes minutes the first time is done before any test's time runs."""
    wanted = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    if session.config.option.collectonly:
        return
    for name, recipe in _LONG.items():
        if name in wanted:
            with suppress(SkerryError):
                _made(recipe)


@pytest.fixture(scope="session")
def vm_cache() -> Path:
    """The folder of an ImageStore, with all that is made for tests."""
    return _cache()


@pytest.fixture(scope="session")
def vm_kernel() -> Kernel:
    """Debian's."""
    _made_or_refused("")
    return asyncio.run(ImageStore(_cache()).kernels.get())


@pytest.fixture(scope="session")
def vm_image() -> str:
    """The name of the smallest image, in `vm_cache`."""
    return _made_or_refused("minimal")


@pytest.fixture(scope="session")
def docker_vm_image() -> str:
    """The name of an image with a Docker engine, in `vm_cache`."""
    return _made_or_refused("docker")


@pytest.fixture(scope="session")
def clients_vm_image(clients_root: Path, vm_kernel: Kernel) -> str:
    """The name of an image with clients of networks, in `vm_cache`."""
    return _imported(clients_root, clients_root.name.partition(".")[0].replace("debian", "clients"))


@pytest.fixture(scope="session")
def debian_vm_image(debian_root: Path, vm_kernel: Kernel) -> str:
    """The name of an image of Debian with its usual programs, in `vm_cache`."""
    return _imported(debian_root, debian_root.name.partition(".")[0])


def _imported(root: Path, name: str) -> str:
    store = ImageStore(_cache())
    try:
        store.find(name)
    except ImageNotFound:
        asyncio.run(store.import_(root, name, lambda _: None))
    return name


def _made(recipe: str) -> str:
    store = ImageStore(_cache())
    if recipe:
        asyncio.run(store.build_recipe(recipe, recipe, lambda _: None))
    else:
        asyncio.run(store.kernels.get_or_fetch(lambda _: None))
    return recipe


def _made_or_refused(recipe: str) -> str:
    try:
        return _made(recipe)
    except SkerryError as error:
        _refuse(str(error))


def _cache() -> Path:
    base = "/var/cache" if os.geteuid() == 0 else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "skerry-tests/vm"


def _refuse(reason: str) -> NoReturn:
    if "qemu" in (variable("SKERRY_REQUIRE") or "").split(","):
        pytest.fail(f"SKERRY_REQUIRE names qemu, and {reason}")
    pytest.skip(reason)
