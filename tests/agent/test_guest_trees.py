"""Folders that hostile hands made: too deep, too wide, without permissions, with names that are no text."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.agent.bundle import GUEST
from skerry.agent.guest import trees
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest

DEPTH = 3000


def make_deep(top: Path, depth: int) -> None:
    """Folders one in the other, by steps: the whole path is longer than any path may be."""
    fd = os.open(top, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=fd)
            deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    finally:
        os.close(fd)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed by other means than ours, whatever is in it."""
    made = tmp_path / "folder"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


def remove(path: Path) -> int:
    return sum(1 for _ in trees.remove_tree(os.fsencode(path)))


def test_a_folder_3000_deep_is_walked_and_removed(folder: Path) -> None:
    make_deep(folder, DEPTH)
    fds = set(os.listdir("/proc/self/fd"))
    walked = list(trees.walk(os.fsencode(folder), sys.maxsize))
    assert len(walked) == DEPTH + 1
    assert walked[-1][0] == b"d/" * DEPTH + b"file"
    remove(folder)
    assert not folder.exists()
    assert set(os.listdir("/proc/self/fd")) <= fds  # fewer where garbage of an earlier test went meanwhile


async def test_a_folder_3000_deep_is_listed_and_removed_by_the_agent(sandbox: AsyncSandbox, guest: Guest) -> None:
    (guest.home / "deep").mkdir()
    make_deep(guest.home / "deep", DEPTH)
    listed = await sandbox.files.list("deep", depth=10_000)
    assert len(listed) == DEPTH + 1
    await sandbox.files.remove("deep", recursive=True)
    assert os.listdir(guest.home) == []


async def test_a_folder_300_deep_goes_out_and_in(sandbox: AsyncSandbox, guest: Guest, folder: Path) -> None:
    (guest.home / "deep").mkdir()
    make_deep(guest.home / "deep", 300)
    await sandbox.files.download("deep", folder / "copy")
    assert len(list(trees.walk(os.fsencode(folder / "copy"), sys.maxsize))) == 301
    await sandbox.files.upload(folder / "copy", "again")
    assert len(await sandbox.files.list("again", depth=1000)) == 301


def test_a_wide_folder_is_removed_in_steps(folder: Path) -> None:
    for i in range(2000):
        (folder / f"{i}").touch()
    assert remove(folder) >= 2000
    assert not folder.exists()


def test_links_are_removed_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(precious)
    (folder / "sub/link").symlink_to(precious)
    (folder / "loop").symlink_to(folder)
    remove(folder)
    assert not folder.exists()
    assert (precious / "file").exists()


def test_a_folder_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "file").touch()
    link = tmp_path / "link"
    link.symlink_to(folder)
    remove(link)
    assert not os.path.lexists(link)
    assert (folder / "file").exists()


def test_nothing_to_remove_is_no_error(tmp_path: Path) -> None:
    assert remove(tmp_path / "missing") == 0


def test_names_that_are_no_text(folder: Path) -> None:
    names = [b"\xff\xfe", b" ", b"\n", b"-rf", b"*", b"n" * 255, b"\x01", b".skerry-removing-1", b"..."]
    for name in names:
        inner = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.join(inner, b"sub", name))
        with open(os.path.join(inner, b"sub", b"\xff" + name[:200]), "w"):
            pass
    found = [path for path, _ in trees.walk(os.fsencode(folder), 1)]
    assert found == sorted(names)
    remove(folder)
    assert not folder.exists()


LOCKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import trees
top = sys.argv[2]
for name in ("a", "a/b", "a/b/c", "x", "x/y"):
    os.mkdir(os.path.join(top, name))
for name in ("a/file", "a/b/c/file", "x/y/file"):
    open(os.path.join(top, name), "w").close()
for name in ("a/b/c", "a/b", "a", "x/y", "x"):
    os.chmod(os.path.join(top, name), {mode})
for _ in trees.remove_tree(os.fsencode(top)):
    pass
print(os.path.exists(top))
"""


@pytest.mark.parametrize("mode", ["0o000", "0o500", "0o300", "0o444"])
def test_folders_without_permissions_are_removed_by_their_owner(mode: str) -> None:
    """Root may do everything, so this is tried as somebody else."""
    parent = Path(tempfile.mkdtemp(prefix="skerry-locked-"))
    try:
        shutil.copy(GUEST / "trees.py", parent / "trees.py")
        top = parent / "top"
        top.mkdir()
        other = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
        for path in (parent, top, parent / "trees.py"):
            path.chmod(0o755)
            if other:
                os.chown(path, 65534, 65534)
        python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        argv = [python, "-I", "-B", "-c", LOCKED.replace("{mode}", mode), str(parent), str(top)]
        done = subprocess.run(argv, capture_output=True, text=True, extra_groups=[] if other else None, **other)  # type: ignore[call-overload]
        assert done.stdout == "False\n", done.stderr
    finally:
        subprocess.run(["rm", "-rf", str(parent)], check=True)


def test_a_pack_holds_what_a_tar_can_and_leaves_out_the_rest(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "file").write_bytes(b"x" * 1000)
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 20)
    out = io.BytesIO()
    trees.pack(os.fsencode(folder), out.write)
    out.seek(0)
    target = folder / "copy"
    trees.unpack(out.read, os.fsencode(target))
    assert sorted(os.listdir(target)) == ["file", "sparse"]
    assert (target / "file").read_bytes() == b"x" * 1000


async def test_a_tree_into_a_place_that_cannot_be_says_why(sandbox: AsyncSandbox, guest: Guest, folder: Path) -> None:
    (folder / "x").touch()
    (guest.home / "file").touch()
    with pytest.raises(Exception, match="file") as caught:
        await sandbox.files.upload(folder, "file/below")
    assert type(caught.value).__module__ == "skerry.errors"
    with pytest.raises(FileNotFoundError):
        await sandbox.files.download("missing", folder / "copy")
    await sandbox.ping()
    assert not guest.children()


async def test_a_watch_that_is_not_read_tells_of_its_overflow(sandbox: AsyncSandbox, guest: Guest) -> None:
    async with await sandbox.files.watch(".") as events:
        # more than the stream's window and what the agent keeps beside it, however quickly it reads the kernel's queue
        script = "import os\nfor _ in range(40000): os.close(os.open('f', os.O_CREAT | os.O_WRONLY)); os.unlink('f')"
        assert (await sandbox.exec([sys.executable, "-S", "-c", script])).ok
        async for event in events:
            if event.event == "overflow":
                break
    await sandbox.ping()
