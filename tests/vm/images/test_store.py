"""The store of images: whole or not at all, whatever happens to those who make them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, ProviderError
from skerry.model.results import Progress
from skerry.oci import packing
from skerry.vm.base import Kernel
from skerry.vm.images import disks, recipes
from skerry.vm.images.store import ImageInfo, ImageStore

_STUCK = """
import asyncio, sys, time
from pathlib import Path
from skerry.vm.images import store as image_store
from skerry.vm.images.store import ImageStore

def stuck(*_):
    print("here", flush=True)
    time.sleep(600)

image_store.digest = stuck
asyncio.run(ImageStore(Path(sys.argv[1])).build_recipe("a", "minimal", lambda _: None))
"""


def silent(_: Progress) -> None:
    return


async def made(store: ImageStore, name: str = "a") -> ImageInfo:
    return await store.build_recipe(name, "minimal", silent)


def rootfs_of(cache: Path) -> Path:
    return next((cache / "images").glob("*/rootfs.ext4"))


def scratch(cache: Path) -> list[Path]:
    return list((cache / "images").glob(".new-*"))


async def test_an_image_is_found_by_its_name_and_its_id(store: ImageStore) -> None:
    info = await made(store)
    image = await store.resolve("a")
    assert (image.id, image.names) == (info.id, ("a",))
    assert image.rootfs.stat().st_size == image.size
    assert image.kernel.initrd.exists()
    assert (await store.resolve(info.id)).rootfs == image.rootfs
    assert (await store.resolve(info.id.removeprefix("sha256:")[:12])).rootfs == image.rootfs
    with pytest.raises(ImageNotFound, match="--recipe docker"):
        await store.resolve("docker")
    with pytest.raises(ImageNotFound):
        await store.resolve(info.id[:10])


async def test_those_who_make_the_same_at_once_make_it_once(cache: Path) -> None:
    said: list[str] = []
    stores = [ImageStore(cache) for _ in range(3)]

    def tell(progress: Progress) -> None:
        said.append(progress.message)

    found = await asyncio.gather(*(each.build_recipe(f"n{n}", "minimal", tell) for n, each in enumerate(stores)))
    assert len({info.id for info in found}) == 1
    assert said == ["writing"]
    assert stores[0].find("n0").names == ("n0", "n1", "n2")


async def test_the_same_content_has_the_same_id_however_often_it_is_made(store: ImageStore) -> None:
    first = await made(store)
    again = await store.build_recipe("b", "minimal", silent, again=True)
    assert again.id == first.id
    assert again.names == ("a", "b")


async def test_a_builder_that_is_killed_leaves_nothing_that_counts(cache: Path, store: ImageStore) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _STUCK, str(cache), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert await child.stdout.readline() == b"here\n"
        assert store.all() == []
        assert len(scratch(cache)) == 1
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert len(scratch(cache)) == 1
    await made(store)
    assert scratch(cache) == []
    assert [info.names for info in store.all()] == [("a",)]


async def test_one_that_is_cancelled_leaves_nothing(cache: Path, store: ImageStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    with open(large / "file", "wb") as file:
        file.truncate(4 << 30)
    begun = asyncio.Event()

    def told(progress: Progress) -> None:
        if progress.done:
            begun.set()

    importing = asyncio.create_task(store.import_(large, "a", told))
    await begun.wait()
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    assert (scratch(cache), store.all()) == ([], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_full_disk_is_told_and_nothing_is_left_on_it(tmp_path: Path, vm_cache: Path, vm_kernel: Kernel) -> None:
    source, small = tmp_path / "source", tmp_path / "small"
    source.mkdir()
    small.mkdir()
    (source / "file").write_bytes(os.urandom(3 << 20))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True, timeout=30)
    try:
        (small / "kernels").symlink_to(vm_cache / "kernels")
        store = ImageStore(small)
        with pytest.raises(ProviderError, match="no room"):
            asyncio.run(store.import_(source, "a", silent))
        assert (scratch(small), store.all()) == ([], [])
    finally:
        subprocess.run(["umount", small], check=True, timeout=30)


async def test_a_damaged_image_is_told_and_mended_by_making_it_again(cache: Path, store: ImageStore) -> None:
    info = await made(store)
    rootfs = rootfs_of(cache)
    whole = rootfs.read_bytes()
    rootfs.chmod(0o644)
    for damaged in (whole[:-4096], whole[:9000] + b"x" + whole[9001:]):
        rootfs.write_bytes(damaged)
        with pytest.raises(ProviderError, match="damaged"):
            await store.resolve("a")
        assert (await made(store)).id == info.id
        assert (await store.resolve("a")).rootfs.read_bytes() == whole
        rootfs.chmod(0o644)
    os.utime(rootfs)
    await store.resolve("a")


async def test_what_is_said_of_an_image_may_be_damaged_too(cache: Path, store: ImageStore) -> None:
    info = await made(store)
    for text in (b"", b"{", b'{"id": 1}'):
        about = rootfs_of(cache).with_name("image.json")
        about.write_bytes(text)
        with pytest.raises(ImageNotFound):
            await store.resolve("a")
        assert (await made(store)).id == info.id
    (cache / "names/a").write_bytes(b"\xff")
    assert store.find(info.id).names == ()


async def test_names_are_taken_away_one_by_one(store: ImageStore, cache: Path) -> None:
    info = await made(store, "a")
    await made(store, "team/b:1")
    with pytest.raises(Conflict, match="team/b:1"):
        await store.remove(info.id)
    await store.remove("a")
    assert store.find("team/b:1").names == ("team/b:1",)
    await store.remove("team/b:1")
    assert store.all() == []
    assert list((cache / "images").glob("[!.]*")) == []
    await made(store, "a")
    await made(store, "b")
    await store.remove(info.id, force=True)
    assert store.all() == []


@pytest.mark.parametrize("name", ["", "../x", "-x", "a b", "sha256:0000", "x" * 200, ".hidden"])
async def test_a_name_that_is_none_is_refused(store: ImageStore, name: str) -> None:
    with pytest.raises(InvalidSpec):
        await made(store, name)


async def test_an_unknown_recipe_is_told_with_those_there_are(store: ImageStore) -> None:
    with pytest.raises(InvalidSpec, match="minimal, debian-devbox, docker"):
        await store.build_recipe("a", "nothing", silent)


def test_the_developers_image_has_what_developers_use() -> None:
    packages = set(recipes.find("debian-devbox").packages)
    assert {"python3", "python3-venv", "nodejs", "npm", "bash", "git", "build-essential"} <= packages


async def test_the_drive_with_the_agent_is_made_once(cache: Path) -> None:
    found = await asyncio.gather(*(disks.runtime_disk(cache) for _ in range(3)))
    assert len(set(found)) == 1
    assert found[0][1].stat().st_size > 1 << 20
    assert [path.name for path in (cache / "runtimes").glob("*.ext4")] == [f"{found[0][0]}.ext4"]


async def test_an_empty_disk_takes_no_room(cache: Path) -> None:
    path = await disks.blank_disk(cache, (1 << 30) + 1)
    assert path.stat().st_size == (1 << 30) + 4096
    assert path.stat().st_blocks * 512 < 8 << 20
    assert await disks.blank_disk(cache, (1 << 30) + 1) == path
    assert path.stat().st_mode & 0o222 == 0
    with pytest.raises(InvalidSpec):
        await disks.blank_disk(cache, 100)


@pytest.mark.parametrize("journal", [False, True])
def test_nobody_who_mounts_an_empty_disk_has_to_write_its_tables(cache: Path, journal: bool) -> None:
    path = asyncio.run(disks.blank_disk(cache, 1 << 30, journal=journal))
    told = subprocess.run(["/sbin/dumpe2fs", path], capture_output=True, text=True, check=True).stdout
    groups = [line for line in told.splitlines() if re.match(r"Group \d+:", line)]
    assert len(groups) == 8
    assert all("ITABLE_ZEROED" in group for group in groups), groups


async def test_work_in_a_thread_is_waited_for_when_it_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(stop: Event) -> None:
        loop.call_soon_threadsafe(begun.set)
        stop.wait()
        loop.call_soon_threadsafe(ended.set)

    working = asyncio.create_task(packing.in_thread(work))
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert ended.is_set()
