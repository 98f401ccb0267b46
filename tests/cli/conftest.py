from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from skerry import cli, providers, start
from skerry.errors import ProviderUnavailable
from skerry.providers.mock import Mock

from .screen import INSTALLED, PROGRAM, Screen

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of this machine reaches a test; what a test makes is below its own folder."""
    for name in [name for name in os.environ if name.startswith("SKERRY_") and name != "SKERRY_REQUIRE"]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = tmp_path / "config.toml"
    file.touch()
    monkeypatch.setenv("SKERRY_CONFIG", str(file))
    return file


@pytest.fixture
def skerry(request: pytest.FixtureRequest) -> Run:
    """The real program in a process of its own, or with "forked" as parameter as it is installed: `exec` by a fork."""
    is_forked = getattr(request, "param", "") == "forked"
    program = request.getfixturevalue("fork_server") if is_forked else PROGRAM

    def run(
        *args: str, input: bytes | None = None, env: Mapping[str, str] | None = None, timeout: float = 30
    ) -> subprocess.CompletedProcess[bytes]:
        stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        return subprocess.run(
            [*program, *args], capture_output=True, env={**os.environ, **(env or {})}, timeout=timeout, **stdin
        )

    return run


@pytest.fixture
def fork_server() -> tuple[str, ...]:
    """The program as it is installed, with a process that forks for its `exec`."""
    deadline = time.monotonic() + 30
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            try:
                asking.connect(start.address())
                if asking.recv(1 << 16) == start.interpreter():
                    return INSTALLED
            except OSError:
                pass  # it is not there yet, or has just ended as its code has changed
        assert time.monotonic() < deadline, "no fork server has come up"
        start._start_server()
        time.sleep(0.2)  # nobody tells when it has come up


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, str, str]]:
    """The program in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        code = cli.invoke(args)
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What boxes share, made once for all tests; skips them where the default provider does not work."""
    folder = tmp_path_factory.mktemp("cache")
    try:
        asyncio.run(providers.load("local", {"cache_dir": str(folder)}).check())
    except ProviderUnavailable as error:
        if "local" in os.environ.get("SKERRY_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of the default provider's boxes, for this test alone, which has to leave none there."""
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SKERRY_PROVIDERS__LOCAL__CACHE_DIR", str(cache))
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))  # short, as it holds sockets
    folder.chmod(0o755)
    monkeypatch.setenv("SKERRY_PROVIDERS__LOCAL__STATE_DIR", str(folder))
    yield folder
    left = ids(folder)
    for id in left:
        subprocess.run([sys.executable, "-c", DESTROY, str(folder), id], check=True, timeout=30)
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def box(skerry: Run, boxes: Path) -> Iterator[str]:
    """The id of a sandbox called `box`, which goes with the test."""
    done = skerry("create", "--name", "box")
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    yield id
    assert skerry("rm", "-f", id).returncode == 0


def ids(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.count("-") == 4]


DESTROY = """
import asyncio, sys
from skerry import providers
asyncio.run(providers.load("local", {"state_dir": sys.argv[1]}).destroy(sys.argv[2]))
"""


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mock]:
    """The host that all mocks share which are loaded by name, empty before and after."""
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SKERRY_PROVIDER", "mock")
    mock = providers.load("mock")
    assert isinstance(mock, Mock)
    empty(mock)
    yield mock
    empty(mock)


def empty(mock: Mock) -> None:
    for id in list(mock.host.boxes):
        asyncio.run(mock.destroy(id, volumes=True))
    for volume in asyncio.run(mock.volumes()):
        asyncio.run(mock.remove_volume(volume.name))
    mock.host.snapshots.clear()
    mock.host.images.clear()


@pytest.fixture
def open_screen() -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []

    def open(*args: str) -> Screen:
        opened.append(Screen(*args))
        return opened[-1]

    yield open
    for screen in opened:
        screen.close()
