"""Ways out of an Incus box, and ways to harm the host from one: the whole catalogue that every provider has."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from engines.daemons import NotStartable
from engines.images import make_debian
from engines.incusd import Incusd
from escape import host
from escape.abuse import AbuseCases
from escape.boxes import USERS, Make, as_user
from escape.escapes import ON_X86, EscapeCases, probe

from skerry.providers.incus import Incus
from skerry.spec import SpecOptions

IMAGE = "debian"


class TestIncus(EscapeCases, AbuseCases):
    options: ClassVar[SpecOptions] = {"provider": "incus", "image": IMAGE, "data": False}
    own: ClassVar[frozenset[str]] = frozenset(
        {
            *(f"C3 make {path}" for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/.skerry/x", "/home/x", "/var/x")),
            "C3 write /etc/passwd",
            "C3 write /usr/bin/env",
            "C4 read /etc/shadow",
            "C4 read /root",
            "C4 read /sys",
            "C4 read /sys/fs/cgroup",
            "C4 read /var/lib",
            "D read /proc/1/root/etc/shadow",
            "D1 write /proc/sys/net/ipv4/ip_forward",
            "D6 read /sys/class/thermal",
            "D6 read /sys/firmware",
        }
    )
    """The root of a box has a copy of the image and a network that are its own; the kernel tells any container some."""

    @pytest.fixture
    async def provider(self, incus: Incus, incus_daemon: Incusd, cache: Path) -> AsyncIterator[Incus]:
        """On a pool that holds limits."""
        try:
            pool = incus_daemon.add_pool_with_quotas()
            if all(IMAGE not in image.names for image in await incus.images()):
                await incus.import_image(make_debian(), IMAGE, lambda _: None)
        except (NotStartable, subprocess.SubprocessError) as error:
            pytest.skip(str(error))
        provider = Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache), pool=pool, disk="768M"))
        yield provider
        await provider.aclose()

    @ON_X86
    @USERS
    async def test_the_kernel_answers_no_call_that_reaches_beyond_the_box(self, make: Make, user: str | None) -> None:
        """Calls that Incus's own seccomp library does not know by name yet cannot be refused by a list of names."""
        before = host.state()
        assert self.got_in(await probe(await make(as_user(user)), "kernel")) == []
        assert host.state() == before
