from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from manager.conftest import host, host_clock, manager, mock, store
from providers.qemu.conftest import qemu_cache as qemu_cache
from providers.vmdocker.conftest import machines as machines
from store.conftest import postgres as postgres
from store.server import Server, find_binaries

from skerry import providers
from skerry.config import variable
from skerry.errors import ProviderUnavailable, Unsupported
from skerry.model.spec import Spec

from .world import World, running_world

__all__ = ["host", "host_clock", "manager", "mock", "store"]


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The little internet, with a database in it if this host has one."""
    is_required = "postgres" in (variable("SKERRY_REQUIRE") or "").split(",")
    database: Server | None = None
    if find_binaries() is not None or is_required:
        database = request.getfixturevalue("postgres")
    with running_world(f"{database.folder}/.s.PGSQL.5432" if database else None) as world:
        yield world


@pytest.fixture(scope="session")
def local_rules() -> None:
    """Boxes of this host can have rules."""

    async def check() -> None:
        local = providers.load("local")
        await local.check()
        await local.enforcement(Spec(network="rules"))

    try:
        asyncio.run(check())
    except (ProviderUnavailable, Unsupported) as error:
        if "local" in (variable("SKERRY_REQUIRE") or "").split(","):
            raise
        pytest.skip(str(error))
