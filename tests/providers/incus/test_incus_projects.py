"""Projects of Incus as tenants: what each may have, and what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.incusd import Incusd
from providers.making import Make

from skerry.errors import CreateFailed, LimitReached
from skerry.providers.incus import Incus

_SHARING = {"features.images": "false", "features.profiles": "false"}
_VOLUMES = "/1.0/storage-pools/default/volumes/custom"


async def test_a_full_project_says_so(make: Make, incus_daemon: Incusd, cache: Path) -> None:
    config = {**_SHARING, "limits.containers": "1"}
    incus_daemon.ask("POST", "/1.0/projects", {"name": "small", "config": config})
    try:
        provider = Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache), project="small"))
        sandbox = await make(provider)
        with pytest.raises(LimitReached, match="project's limits"):
            await make(provider)
        assert set(await provider.discover()) == {sandbox.id}
        await sandbox.destroy()
    finally:
        incus_daemon.ask("DELETE", "/1.0/projects/small")


async def test_tenants_on_one_bridge_share_its_addresses(
    make: Make, incus: Incus, incus_daemon: Incusd, cache: Path
) -> None:
    """None is told of the addresses that the other has."""
    small = f"{incus_daemon.bridge}-t"
    config = {"ipv4.address": "10.63.64.1/29", "ipv4.nat": "false", "ipv6.address": "none"}
    incus_daemon.ask("POST", "/1.0/networks", {"name": small, "type": "bridge", "config": config})
    incus_daemon.ask("POST", "/1.0/projects", {"name": "tenant", "config": _SHARING})
    try:
        ours, theirs = (
            Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache), network=small, project=project))
            for project in ("default", "tenant")
        )
        boxes = [await make(provider, network="bridge") for provider in (ours, ours, ours, theirs, theirs)]
        with pytest.raises(LimitReached, match="no address left"):
            await make(theirs, network="bridge")
        assert set(await theirs.discover()) == {each.id for each in boxes[3:]}
        for each in boxes:
            await each.destroy()
    finally:
        incus_daemon.ask("DELETE", "/1.0/projects/tenant")
        incus_daemon.ask("DELETE", f"/1.0/networks/{small}")


async def test_a_restricted_project_has_boxes_without_folders_of_the_host(
    make: Make, incus_daemon: Incusd, cache: Path
) -> None:
    config = {"features.images": "false", "restricted": "true"}
    incus_daemon.ask("POST", "/1.0/projects", {"name": "tenant", "config": config})
    try:
        fields = {"host": incus_daemon.address, "cache_dir": str(cache), "pool": "default", "project": "tenant"}
        provider = Incus(Incus.Config(**fields))
        with pytest.raises(CreateFailed, match=r"restricted\.containers\.lowlevel=allow"):
            await make(provider)
        whole = incus_daemon.ask("GET", "/1.0/projects/tenant")["config"]
        allowed = {**whole, "restricted.containers.lowlevel": "allow"}
        incus_daemon.ask("PUT", "/1.0/projects/tenant", {"config": allowed})
        sandbox = await make(provider)
        assert (await sandbox.exec("echo hello")).text == "hello\n"
        await sandbox.destroy()
    finally:
        for volume in incus_daemon.ask("GET", f"{_VOLUMES}?project=tenant"):
            incus_daemon.ask("DELETE", f"{_VOLUMES}/{volume.rpartition('/')[2].partition('?')[0]}?project=tenant")
        incus_daemon.ask("DELETE", "/1.0/projects/tenant")
