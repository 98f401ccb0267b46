"""Pictures of the page for the documentation: `python -m tests.surfaces.page.pictures` takes them anew."""

from __future__ import annotations

import asyncio
import math
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from manager.world import config_of  # noqa: E402
from playwright.async_api import Route, async_playwright, expect  # noqa: E402
from surfaces.page.browsing import Visitor  # noqa: E402
from surfaces.server.world import Served, serving  # noqa: E402

FOLDER = TESTS.parent / "docs" / "images"
SIZE = {"width": 1180, "height": 720}
NAMES = ("api-tests", "build-main", "crawler-1", "crawler-2", "docs-preview", "etl-nightly", "notebook", "review-812")
SCRIPT = (
    ("PS1='\\[\\033[36m\\]~\\[\\033[0m\\] $ '; clear", "~ $"),
    ("uname -sm", "Linux"),
    ("python3 -c 'print(sum(n * n for n in range(1_000_000)))'", "333332833333500000"),
    ("printf '\\033[32mok\\033[0m  12 passed\\n\\033[33mwarn\\033[0m  1 skipped\\n'", "warn  1 skipped"),
)
"""What is typed, and what is waited for after it."""
FLEET = """
name: shop
project: default
phases:
  - {name: db}
  - {name: cache}
  - {name: workers, count: 4, wait_for: [db]}
  - {name: web, count: 2, wait_for: [db, cache]}
  - {name: report, wait_for: [web, workers]}
"""


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))
    folder.chmod(0o755)
    config = config_of(folder, provider="local", providers={"local": {"state_dir": str(folder / "local")}})
    program = shutil.which("chromium")
    assert program is not None, "install chromium"
    try:
        async with serving(folder, config=config) as served, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            await _fill(served)
            for theme in ("light", "dark"):
                options = {"viewport": SIZE, "color_scheme": theme}
                async with Visitor.signed_in(browser, served, **options) as visitor:
                    await _take(visitor, theme)
            for record in await served.server.manager.list():
                await served.server.manager.destroy(record.id)
            await browser.close()
    finally:
        shutil.rmtree(folder)


async def _fill(served: Served) -> None:
    manager = served.server.manager
    for at, name in enumerate(NAMES):
        labels = {"team": ("blue", "green", "red")[at % 3]}
        await manager.create(name=name, labels=labels, memory="512M", lifetime=f"{at + 1}h")
    client = await served.client()
    answer = await client.put("/v1/fleets/shop?wait_s=60", json={"file": FLEET})
    assert answer.status_code < 300, answer.text
    notebook = await manager.get("notebook")
    await notebook.files.write("data/prices.csv", "day,price\n1,2.50\n")
    await notebook.files.write("train.py", 'print("hello")\n')
    await notebook.files.write("README.md", "# Notes\n")


async def _history(served: Served) -> dict[str, Any]:
    """Curves as busy sandboxes have them: those of the pictures do nothing."""
    chance = random.Random(7)
    items = []
    for record in await served.server.manager.list():
        base, phase = chance.uniform(2, 70), chance.uniform(0, 6)
        cpu = [max(0.5, base + 20 * math.sin(at / 4 + phase) + chance.gauss(0, 5)) for at in range(40)]
        used = chance.uniform(40, 300)
        memory = [(used + at * chance.uniform(0, 1.5)) * 2**20 for at in range(40)]
        items.append({"id": record.id, "cpu_percent": cpu, "memory_bytes": memory})
    return {"items": items}


async def _take(visitor: Visitor, theme: str) -> None:
    page = visitor.page
    found = await _history(visitor.served)

    async def answer(route: Route) -> None:
        await route.fulfill(json=found)

    await page.route("**/v1/metrics/history?*", answer)
    await page.reload()
    await expect(visitor.rows().first.locator("svg").first).to_be_visible()
    await _keep(visitor, f"list-{theme}")
    await visitor.go("sandboxes", "notebook", "terminal")
    screen = page.locator(".screen .xterm-rows")
    await expect(screen).to_contain_text(re.compile(r"[$#]"))
    for line, answer_to_it in SCRIPT:
        await page.keyboard.type(f"{line}\n")
        await expect(screen).to_contain_text(answer_to_it)
        await expect(screen.locator("div", has=page.locator(".xterm-cursor"))).to_contain_text("$")
    await _keep(visitor, f"terminal-{theme}")
    await visitor.go("new")
    await page.get_by_label("Name", exact=True).fill("review-813")
    await expect(page.locator(".choice").first).to_be_visible()
    await page.get_by_label("Memory", exact=True).fill("1G")
    await _keep(visitor, f"create-{theme}")
    await visitor.go("fleets", "shop")
    await expect(page.locator(".edge")).to_have_count(5)
    await _keep(visitor, f"fleet-{theme}")
    if "--all" in sys.argv:
        await _take_all(visitor, theme)


async def _take_all(visitor: Visitor, theme: str) -> None:
    """Pictures of the rest, to look at and not to keep."""
    for tab in ("files", "processes", "network", "ports", "details"):
        await visitor.go("sandboxes", "notebook", tab)
        await expect(visitor.page.locator(".tabs [aria-current]")).to_have_text(tab.capitalize())
        await visitor.page.wait_for_timeout(800)
        await _keep(visitor, f"all-{tab}-{theme}")
    for section in ("fleets", "pools", "health", "ledger", "events"):
        await visitor.go(section)
        await visitor.page.wait_for_timeout(1500)
        await _keep(visitor, f"all-{section}-{theme}")
    await visitor.page.keyboard.press("?")
    await _keep(visitor, f"all-help-{theme}")
    await visitor.page.keyboard.press("Escape")
    await visitor.page.set_viewport_size({"width": 400, "height": 760})
    for name, view in (("list", ("sandboxes",)), ("terminal", ("sandboxes", "notebook")), ("ledger", ("ledger",))):
        await visitor.go(*view)
        await visitor.page.wait_for_timeout(800)
        await _keep(visitor, f"all-narrow-{name}-{theme}")


async def _keep(visitor: Visitor, name: str) -> None:
    folder = Path(tempfile.gettempdir()) / "skerry-pictures" if name.startswith("all-") else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    await visitor.page.screenshot(path=folder / f"page-{name}.png", animations="disabled")


if __name__ == "__main__":
    asyncio.run(main())
