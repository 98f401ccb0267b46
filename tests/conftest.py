from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from state_folders import boxes

from skerry import providers
from skerry.errors import ProviderUnavailable
from skerry.model.spec import SandboxId

pytest_plugins = ["engines.fixtures", "spread", "vm.fixtures"]

# How fast examples are made and run says how busy the machine is.
settings.register_profile("suite", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the suite apart from how it was started, and from the registry and the settings of this machine.

    A suite that is started in the background ignores Ctrl-C, and all that it starts would inherit that. The registry
    of the machine may be in use, or made by another version.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="skerry-tests-", dir="/tmp"))  # short, as it holds sockets
    folder.chmod(0o755)
    config.add_cleanup(lambda: shutil.rmtree(folder))
    settings_file = folder / "config.toml"
    settings_file.touch()
    os.environ.update(SKERRY_STATE_DIR=str(folder / "state"), SKERRY_CONFIG=str(settings_file))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine reaches a test, and what it makes is below its own folder."""
    for name in [name for name in os.environ if name.startswith("SKERRY_") and name != "SKERRY_REQUIRE"]:
        monkeypatch.delenv(name)
    file = tmp_path / "config.toml"
    file.touch()
    monkeypatch.setenv("SKERRY_CONFIG", str(file))
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for this test alone, which has to leave no box there."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))  # short, as it holds sockets
    folder.chmod(0o755)
    monkeypatch.setenv("SKERRY_STATE_DIR", str(folder))
    try:
        asyncio.run(providers.load("local", {"state_dir": str(folder / "local")}).check())
    except ProviderUnavailable as error:
        shutil.rmtree(folder)
        if "local" in os.environ.get("SKERRY_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    yield folder
    left = boxes(folder)
    for id in left:
        asyncio.run(providers.load("local", {"state_dir": str(folder / "local")}).destroy(SandboxId(id)))
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture(autouse=True)
def _logging_of_a_command_ends_with_its_test() -> Iterator[None]:
    """A command that ran in this process has set levels for all that comes after it."""
    yield
    if (log := sys.modules.get("skerry.log")) is not None:
        for name in log._configured:
            logging.getLogger(name).setLevel(logging.NOTSET)
        log._configured.clear()
