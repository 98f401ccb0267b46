from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manager.world import config_of
from playwright.async_api import Browser, async_playwright
from surfaces.page.browsing import Visitor
from surfaces.server.world import Served, serving

from skerry.config import variable
from skerry.providers.mock import Mock

_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A real Chromium, that of the machine."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        if "chromium" in (variable("SKERRY_REQUIRE") or "").split(","):
            pytest.fail("SKERRY_REQUIRE names chromium, and there is none on PATH")
        pytest.skip("there is no chromium on PATH")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(_QUIET))
        yield browser
        await browser.close()


@pytest.fixture
async def served(tmp_path: Path, own_registry: None, mock_provider: Mock) -> AsyncIterator[Served]:
    """A server whose sandboxes are the mock's."""
    async with serving(tmp_path, mock_provider) as served:
        yield served


@pytest.fixture
async def served_local(folder: Path) -> AsyncIterator[Served]:
    """A server whose sandboxes are real."""
    config = config_of(folder, provider="local", providers={"local": {"state_dir": str(folder / "local")}})
    async with serving(folder, config=config) as served:
        yield served
        for record in await served.server.manager.list():
            await served.server.manager.destroy(record.id)


@pytest.fixture
async def visitor(browser: Browser, served: Served) -> AsyncIterator[Visitor]:
    """Somebody who may do everything, signed in at the page of a server with the mock's sandboxes."""
    async with Visitor.signed_in(browser, served) as visitor:
        yield visitor
