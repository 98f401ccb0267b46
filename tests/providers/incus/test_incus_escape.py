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
from escape.abuse import AbuseCases
from escape.escapes import EscapeCases
from escape.strangers import StrangerCases
from escape.takeover import SocketCases

from skerry.model.spec import SpecOptions
from skerry.providers.incus import Incus

IMAGE = "debian"


class TestIncus(EscapeCases, AbuseCases, SocketCases, StrangerCases):
    column = "incus"
    options: ClassVar[SpecOptions] = {"provider": "incus", "image": IMAGE, "data": False}

    @pytest.fixture
    def places(self, tmp_path: Path, incus_daemon: Incusd) -> tuple[Path, ...]:
        return (tmp_path, incus_daemon.folder)

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
