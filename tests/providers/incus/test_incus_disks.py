"""The disks of Incus boxes: what a quota holds, and what can be done with a box that has filled its own."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from engines.incusd import Incusd
from providers.making import Make

from skerry.errors import DiskFull, LimitReached, ProviderError, Unsupported
from skerry.providers.base import BoxState, Provider
from skerry.providers.incus import Incus
from skerry.providers.incus.api import IncusApi, Operation
from skerry.providers.incus.profile import RESERVE


def on_quotas(daemon: Incusd, cache: Path) -> Incus:
    pool = daemon.add_pool_with_quotas()
    return Incus(Incus.Config(host=daemon.address, cache_dir=str(cache), pool=pool))


async def test_a_pool_with_quotas_holds_the_disk(make: Make, incus_daemon: Incusd, cache: Path) -> None:
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M", data=True)
    assert "quota" in sandbox.enforced["disk"].by
    for path in ("too-big", "/.data/too-big"):
        with pytest.raises(DiskFull):
            await sandbox.files.write(path, bytes(64 << 20))
    await sandbox.files.write("small", b"still room")
    await sandbox.destroy(volumes=True)


async def test_a_box_that_filled_its_disk_to_the_last_byte_stops_starts_and_goes(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    """Incus writes to a box's disk as it stops it and as it starts it: a quota that is reached does not let it."""
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M")
    fill = """
    dd if=/dev/zero of=big bs=1M count=64; sync
    for i in $(seq 2000); do dd if=/dev/urandom of=small-$i bs=1500 count=1 || break; done; sync
    for i in $(seq 2000); do echo x > tiny-$i || break; done; sync
    """
    for _ in range(2):
        assert b"quota exceeded" in (await sandbox.exec(fill, timeout_s=60)).stderr
        with pytest.raises(LimitReached, match="the disk of the box is full"):
            await provider.snapshot(sandbox.id, "of-a-full-box")
        await provider.stop(sandbox.id)
        assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
        await provider.start(sandbox.id, sandbox.spec)
        assert (await sandbox.exec("rm big && sync && echo x > tiny")).ok
    await sandbox.exec(fill, timeout_s=60)
    await sandbox.destroy()
    assert sandbox.id not in await provider.discover()


async def test_a_pool_that_is_a_folder_holds_no_disk_and_says_so(make: Make) -> None:
    with pytest.raises(Unsupported, match="'dir'"):
        await make(disk="64M")


async def make_many(make: Make, provider: Provider, count: int) -> None:
    for _ in range(count):
        await make(provider)


async def test_a_full_pool_says_so(make: Make, incus_daemon: Incusd, cache: Path) -> None:
    # Its own one, as btrfs gives room back in its own time, after what was removed is gone.
    pool, volumes = incus_daemon.add_pool_with_quotas("filled"), "/1.0/storage-pools/filled/volumes/custom"
    provider = Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache), pool=pool))
    incus_daemon.ask("POST", volumes, {"name": "full"})
    try:
        place = incus_daemon.folder / "storage-pools" / pool / "custom" / "default_full"
        with suppress(OSError), (place / "f").open("wb") as file:
            while True:
                file.write(os.urandom(1 << 20))
        with pytest.raises(LimitReached, match="storage is full"):
            await make_many(make, provider, 50)
    finally:
        incus_daemon.ask("DELETE", f"{volumes}/full")


async def test_the_room_that_is_kept_for_incus_is_whole_again_after_a_start(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M", user="root")
    assert (await sandbox.exec(f"truncate -s 5000 {RESERVE}")).ok
    await provider.stop(sandbox.id)
    await provider.start(sandbox.id, sandbox.spec)
    assert (await sandbox.exec(f"stat -c '%s %a' {RESERVE}")).text == f"{1 << 20} 600\n"


async def test_a_box_that_put_something_else_into_that_place_starts(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M", user="root")
    for attempt in (f"mkfifo {RESERVE}", f"mkdir -p {RESERVE}/x", f"ln -s /etc/passwd {RESERVE}"):
        assert (await sandbox.exec(f"rm -r {RESERVE}; {attempt}")).ok
        await provider.stop(sandbox.id)
        await provider.start(sandbox.id, sandbox.spec)
    assert int((await sandbox.exec("wc -c < /etc/passwd")).text) < 1000


async def test_data_from_an_earlier_box_has_the_quota_of_the_new_one(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    provider = on_quotas(incus_daemon, cache)
    for disk in (None, "24M"):
        sandbox = await make(provider, name="kept", data=True, **({"disk": disk} if disk else {}))
        if disk is None:
            await sandbox.destroy()
    assert "quota of disk" in sandbox.enforced["data"].by
    with pytest.raises(DiskFull):
        await sandbox.files.write("/.data/too-big", bytes(64 << 20))


async def test_the_disk_of_one_box_does_not_bound_the_cache_of_its_project(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M", cache="write")
    await sandbox.files.write("/.cache/pip/wheel", bytes(64 << 20))
    await sandbox.destroy()
    for volume in await provider.volumes():
        await provider.remove_volume(volume.name)


async def test_a_snapshot_of_more_than_the_box_may_hold_does_not_stay(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    provider = on_quotas(incus_daemon, cache)
    sandbox = await make(provider, disk="24M")
    assert (await sandbox.exec("truncate -s 400M ~/hole")).ok
    with pytest.raises(LimitReached, match="holes"):
        await provider.snapshot(sandbox.id, "holes")
    assert not await provider.snapshots()
    assert (await sandbox.exec("rm ~/hole")).ok
    await provider.snapshot(sandbox.id, "holes")
    await provider.remove_snapshot("holes")


async def test_what_a_broken_off_snapshot_leaves_in_the_box_is_removed_by_incus(
    make: Make, incus: Incus, incus_daemon: Incusd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make()
    ask = IncusApi.do

    async def broken_off(self: IncusApi, method: str, path: str, **options: Any) -> Operation:
        if path == "/1.0/images" or method == "DELETE":
            raise ProviderError("broken off")
        return await ask(self, method, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(IncusApi, "do", broken_off)
        with pytest.raises(ProviderError, match="broken off"):
            await incus.snapshot(sandbox.id, "broken-off")
    left = incus_daemon.ask("GET", f"/1.0/instances/skerry-{sandbox.id}/snapshots?recursion=1")
    ends = [datetime.fromisoformat(each["expires_at"]) - datetime.now(UTC) for each in left]
    assert [timedelta(hours=23) < each < timedelta(hours=25) for each in ends] == [True]
    assert not await incus.snapshots()
