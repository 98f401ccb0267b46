"""What another user of the host gets at while there are boxes of root's: every path that a create has left is tried."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from skerry.model.spec import SpecOptions
from skerry.sandbox.sandbox import AsyncSandbox

from .boxes import Boxes, Make

STRANGER = 61_235
_ROOTS = ("/run", "/dev", "/var/lib", "/var/cache")
_FILL = "mkdir -m 777 open; echo secret > open/file; chmod 666 open/file; chmod 777 ."
_TRY = """
import json, os, socket, stat, sys

def ways(path):
    try:
        mode, size = os.lstat(path).st_mode, os.lstat(path).st_size
    except OSError:
        return
    if stat.S_ISDIR(mode):
        if os.access(path, os.W_OK):
            yield "change"
        if os.access(path, os.R_OK):
            yield "list"
    elif stat.S_ISSOCK(mode):
        try:
            socket.socket(socket.AF_UNIX).connect(path)
            yield "connect"
        except OSError:
            pass
    elif not stat.S_ISLNK(mode):
        if size:
            yield "see"
        for flag, way in (os.O_RDONLY, "read"), (os.O_WRONLY, "write"):
            try:
                fd = os.open(path, flag | os.O_NONBLOCK)
                if way == "write" or os.read(fd, 1):  # an empty file is a mount point
                    yield way
            except OSError:
                pass

print(json.dumps([way + " " + path for path in json.load(sys.stdin) for way in ways(path)]))
"""


class StrangerCases(Boxes):
    """A subclass gives a fixture `places`: the folders that only this test's boxes are in."""

    with_disk: ClassVar[SpecOptions] = {}
    has_mounts: ClassVar[bool] = True

    @pytest.fixture
    def places(self, tmp_path: Path) -> tuple[Path, ...]:
        return (tmp_path,)

    @pytest.fixture(autouse=True)
    def _are_open(self, places: tuple[Path, ...]) -> Iterator[None]:
        """The ways to those folders keep nobody out, nor does the manager's umask: what we make must do that."""
        if os.geteuid() != 0:
            pytest.skip("only root makes boxes of other uids, and can be a stranger")
        ways = {way: way.stat().st_mode for place in places for way in (place, *place.parents)}
        for way, mode in ways.items():
            if not mode & stat.S_IXOTH:
                way.chmod(mode | 0o055)
        umask = os.umask(0)
        yield
        os.umask(umask)
        for way, mode in ways.items():
            way.chmod(stat.S_IMODE(mode))

    async def test_no_path_that_a_create_leaves_lets_a_stranger_in(
        self, make: Make, places: tuple[Path, ...], tmp_path: Path
    ) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(0o700)
        (closed / "inner").mkdir()
        (closed / "inner" / "file").write_text("secret")
        (closed / "file").write_text("secret")
        mounts = [f"{closed}/inner:/home/user/inner:rw", f"{closed}/file:/home/user/file"] if self.has_mounts else []
        before = _paths(places, "")
        box = await make({**self.with_disk, "mounts": mounts})
        assert (await box.exec(_FILL)).exit_code == 0
        left = {path for path in _paths(places, box.id) - before if _is_of(path, box, places)}
        assert left
        reached = _reached_by_a_stranger(left)
        assert not reached, reached[:20]
        if self.has_mounts:
            assert (await box.exec("echo changed > inner/file; cat file")).stdout == b"secret"
            assert (closed / "inner" / "file").read_text() == "changed\n"


def _is_of(path: str, box: AsyncSandbox, places: tuple[Path, ...]) -> bool:
    """Others are at work on this host."""
    return box.id in path or any(path.startswith(f"{place}/") for place in places)


def _paths(places: tuple[Path, ...], id: str) -> set[str]:
    """All that there is in the folders that things are left in, and wherever something of this box is mounted."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found = {point for point in points if id and id in point}
    for root in {*_ROOTS, *map(str, places), *found}:
        for folder, folders, files in os.walk(root):
            found.update(os.path.join(folder, name) for name in (*folders, *files))
    return found


def _reached_by_a_stranger(paths: set[str]) -> list[str]:
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", _TRY],
        input=json.dumps(sorted(paths)),
        capture_output=True,
        text=True,
        cwd="/",
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        check=True,
    )
    reached: list[str] = json.loads(done.stdout)
    return reached
