"""What can befall a file: damage, no right to write, no room, removal."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from few_inodes import use_up_inodes

from skerry.errors import StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from skerry.model.records import Cause, Owner, Record
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.store import Store
from skerry.store.sqlite import BALLAST_BYTES

OWNER = Owner("host", 1, 1)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "registry.db"


@pytest.fixture
def public_path() -> Iterator[Path]:
    """As `path`, where another user can come: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder, "state", "registry.db")


async def reserve(store: Store) -> Record:
    record, _ = await store.reserve(new_id(), Spec(), owner=OWNER, boot_id="")
    return record


async def make(path: Path, *, records: int = 30) -> list[Record]:
    store = await Store.open(str(path))
    made = [await reserve(store) for _ in range(records)]
    await store.aclose()
    return made


async def reserve_until_full(store: Store) -> list[Record]:
    made: list[Record] = []
    try:
        while len(made) < 1000:
            made.append(await reserve(store))
    except StoreFull:
        return made
    raise AssertionError("the disk is not full")


@contextmanager
def unprivileged(*owned: Path) -> Iterator[None]:
    """As a user whom file modes bind."""
    if os.geteuid() != 0:
        yield
        return
    for path in owned:
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


def fill(disk: Path) -> Path:
    """Take all the room there is, to the last page."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


async def test_a_registry_is_readable_by_its_user_only(path: Path) -> None:
    before = os.umask(0)
    try:
        store = await Store.open(f"sqlite://{path}")
        await reserve(store)
        files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    await store.aclose()
    names = ["registry.db", "registry.db-ballast", "registry.db-shm", "registry.db-spare", "registry.db-wal"]
    assert files == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_opening_a_current_registry_is_fast(path: Path) -> None:
    await make(path)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        store = await Store.open(str(path))
        times.append(time.perf_counter() - begun)
        await store.aclose()
    assert min(times) < 0.015  # 1 ms on a quiet machine


def test_nothing_of_a_database_is_imported_before_it_is_needed() -> None:
    code = "import sys, skerry.store; sys.exit('sqlite3' in sys.modules or 'psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("size", [0, 50, 100, 4096, 5000, -4096])
async def test_a_truncated_file_is_damage_and_left_as_it_is(path: Path, size: int) -> None:
    await make(path, records=200)
    size = size if size >= 0 else path.stat().st_size + size
    os.truncate(path, size)
    before = path.read_bytes()
    with pytest.raises(StoreCorrupt, match="left as it is"):
        await Store.open(str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [os.urandom(20_000), b"hello", bytes(8192)])
async def test_a_file_that_is_something_else_is_damage_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="move it away"):
        await Store.open(str(path))
    assert path.read_bytes() == content


async def test_a_folder_that_is_a_file_is_named(path: Path) -> None:
    path.parent.touch()
    with pytest.raises(StoreUnavailable, match=f"{path.parent} is no folder"):
        await Store.open(str(path))


async def test_another_programs_database_is_not_taken(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreCorrupt, match="not skerry's"):
        await Store.open(str(path))


async def test_pages_of_noise_never_give_anything_but_a_store_error(path: Path) -> None:
    await make(path, records=100)
    whole = path.read_bytes()
    for page in range(1, len(whole) // 4096):
        path.write_bytes(whole[: page * 4096] + os.urandom(4096) + whole[(page + 1) * 4096 :])
        with suppress(StoreError):
            store = await Store.open(str(path))
            try:
                await store.list()
                await reserve(store)
            finally:
                await store.aclose()


async def test_a_record_that_makes_no_sense_is_damage_and_named(path: Path) -> None:
    (record,) = await make(path, records=1)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sandboxes SET spec = '{\"cpus\": -1}'")
    connection.close()
    store = await Store.open(str(path))
    with pytest.raises(StoreCorrupt, match=record.id):
        await store.get(record.id)
    await store.aclose()


async def test_a_file_that_may_not_be_written_is_read_only(public_path: Path) -> None:
    made = await make(public_path)
    public_path.chmod(0o400)
    with unprivileged(public_path, public_path.parent):
        store = await Store.open(str(public_path))
        assert await store.list() == made
        with pytest.raises(StoreReadOnly, match="cannot be written"):
            await reserve(store)
        with pytest.raises(StoreReadOnly, match="cannot be written"):
            await store.change(made[0], to=State.DESTROYED)
        await store.aclose()


async def test_a_folder_that_may_not_be_written_is_read_only(public_path: Path) -> None:
    await make(public_path)
    public_path.parent.chmod(0o500)
    with unprivileged(public_path, public_path.parent):
        assert public_path.exists()
        for path in (public_path, public_path.parent / "new" / "registry.db", public_path.with_name("other.db")):
            with pytest.raises(StoreReadOnly, match="cannot be written"):
                await Store.open(str(path))


@needs_root
async def test_a_file_system_that_is_read_only_is_told(disk: Path) -> None:
    path = disk / "registry.db"
    made = await make(path)
    remount(disk, "ro")
    with pytest.raises(StoreReadOnly):
        await Store.open(str(path))
    remount(disk, "rw")
    store = await Store.open(str(path))
    assert await store.list() == made
    await store.aclose()


@needs_root
async def test_on_a_full_disk_nothing_is_made_but_everything_can_be_destroyed(disk: Path) -> None:
    store = await Store.open(str(disk / "registry.db"))
    made = [await reserve(store) for _ in range(60)]
    filler = fill(disk)
    made += await reserve_until_full(store)
    assert sum(file.stat().st_size for file in disk.glob("registry*")) > 2 * BALLAST_BYTES
    for record in made:
        doomed = await store.change(record, doomed=True, cause=Cause.USER)
        await store.change(doomed, to=State.DESTROYED)
    assert await store.list() == []
    filler.unlink()
    await reserve(store)
    assert (disk / "registry.db-ballast").stat().st_size == BALLAST_BYTES
    await store.aclose()
    with closing(sqlite3.connect(disk / "registry.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@needs_root
async def test_a_registry_on_a_full_disk_can_be_opened_read_and_emptied(disk: Path) -> None:
    made = await make(disk / "registry.db", records=50)
    fill(disk)
    for record in made:
        store = await Store.open(str(disk / "registry.db"))
        assert await store.get(record.id) == record
        await store.change(record, to=State.DESTROYED)
        with pytest.raises(StoreFull, match="destroying sandboxes still works"):
            await reserve(store)
        await store.aclose()
    store = await Store.open(str(disk / "registry.db"))
    assert await store.count() == 0
    assert await store.prune(before=time.time() + 1) == 50
    await store.aclose()


@needs_root
async def test_a_registry_without_a_free_inode_can_be_opened_read_and_emptied(disk: Path) -> None:
    remount(disk, "nr_inodes=32")
    made = await make(disk / "registry.db", records=5)
    use_up_inodes(disk)
    for record in made:
        store = await Store.open(str(disk / "registry.db"))
        assert await store.get(record.id) == record
        doomed = await store.change(record, doomed=True, cause=Cause.USER)
        await store.change(doomed, to=State.DESTROYED)
        with pytest.raises(StoreFull, match="destroying sandboxes still works"):
            await reserve(store)
        await store.aclose()
        use_up_inodes(disk)
    store = await Store.open(str(disk / "registry.db"))
    assert await store.count() == 0
    await store.aclose()


@needs_root
async def test_a_large_registry_on_a_full_disk_can_be_emptied_in_one_go(disk: Path) -> None:
    made = await make(disk / "registry.db", records=300)
    fill(disk)
    store = await Store.open(str(disk / "registry.db"))
    for record in made:
        doomed = await store.change(record, doomed=True, cause=Cause.USER)
        await store.change(doomed, to=State.DESTROYED)
    assert await store.count() == 0
    await store.aclose()


@needs_root
async def test_no_registry_can_be_made_on_a_full_disk(disk: Path) -> None:
    filler = fill(disk)
    with pytest.raises(StoreFull):
        await Store.open(str(disk / "registry.db"))
    assert list(disk.iterdir()) == [filler]


@pytest.mark.parametrize("become", [Path.unlink, lambda path: path.replace(path.with_name("moved"))])
async def test_a_file_that_goes_away_while_in_use_is_told_and_not_made_again(
    path: Path, become: Callable[[Path], object]
) -> None:
    store = await Store.open(str(path))
    become(path)
    with pytest.raises(StoreUnavailable, match="removed"):
        await reserve(store)
    await make(path)
    with pytest.raises(StoreUnavailable, match="replaced"):
        await store.list()
    await store.aclose()


def test_what_was_written_survives_a_process_that_is_killed(path: Path) -> None:
    code = (
        "import asyncio, os, sys; sys.path.insert(0, sys.argv[2]); import racer\n"
        "async def main():\n"
        "    store = await racer.Store.open(sys.argv[1])\n"
        "    await racer.write(store, rounds=20)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    killed = subprocess.run([sys.executable, "-c", code, path, Path(__file__).parent])
    assert killed.returncode == -9
    assert asyncio.run(look(path)) == (20, 40)


async def look(path: Path) -> tuple[int, int]:
    store = await Store.open(str(path))
    try:
        return len(await store.list()), await store.last_event()
    finally:
        await store.aclose()
