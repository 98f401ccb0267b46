from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.host import uids
from vm.firecracker.installing import StandIns, install
from vm.firecracker.world import World

NEEDS_ROOT = pytest.mark.skipif(not uids.are_available(), reason="only root has jails")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """As sockets need it, and open to the uids that machines run as."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stand_ins(short_folder: Path) -> StandIns:
    return install(short_folder / "bin")


@pytest.fixture(params=["plain", pytest.param("jailed", marks=NEEDS_ROOT)])
async def world(request: pytest.FixtureRequest, short_folder: Path, stand_ins: StandIns) -> AsyncIterator[World]:
    made = World(short_folder, stand_ins, jailed=request.param == "jailed")
    yield made
    await made.end()
    assert stand_ins.violations == [], "a request was sent that Firecracker's description does not allow"
