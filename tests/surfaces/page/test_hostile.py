"""Text that others wrote is text on the page, whatever is in it; and many sandboxes leave the page quick."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from manager.world import config_of
from playwright.async_api import Browser, expect
from surfaces.page.browsing import Visitor
from surfaces.server.world import Served, serving

from skerry.config import LedgerSettings
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

_XSS = (
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<svg/onload=document.title='owned'>",
    "\"><b id='owned'>bold</b>",
    "javascript:document.title='owned'",
    "{{constructor.constructor('document.title=1')()}}",
)
_VIEWS = ("terminal", "files", "processes", "network", "ports", "details")
MANY = 1000


async def _is_untouched(visitor: Visitor) -> None:
    page = visitor.page
    assert await page.title() == "skerry"
    made = "document.querySelectorAll('#owned, main img, script:not([src]), [onerror], [onload]').length"
    assert await page.evaluate(made) == 0
    links = await page.evaluate("[...document.querySelectorAll('a[href]')].map((each) => each.getAttribute('href'))")
    assert [each for each in links if not re.match(r"#|https?://", each)] == []


async def test_hostile_labels_ids_and_errors_are_text(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    labels = {f"x{number}": text for number, text in enumerate(_XSS)}
    sandbox = await manager.create(name="hostile", labels=labels, command=f"echo {_XSS[0]}", env={"A": _XSS[1]})
    await expect(visitor.rows()).to_contain_text(_XSS[0])
    await _is_untouched(visitor)
    for tab in _VIEWS:
        await visitor.go("sandboxes", sandbox.id, tab)
        await expect(page.locator(".tabs [aria-current]")).to_have_text(tab.capitalize())
        await _is_untouched(visitor)
    await expect(page.locator(".details")).to_contain_text(_XSS[1])
    await visitor.go("sandboxes", "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    await expect(page.get_by_role("alert")).to_contain_text("<img")
    await _is_untouched(visitor)
    await visitor.go("new")
    await page.get_by_label("Memory", exact=True).fill(_XSS[0])
    await page.get_by_role("button", name="Create").click()
    await expect(page.locator(".field.wrong")).to_contain_text("<img")
    await _is_untouched(visitor)


async def test_hostile_commands_are_text_in_the_ledger(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox = await manager.create(name="hostile")
    await visitor.go("ledger")
    for text in _XSS:
        await manager.execute(sandbox.id, ["echo", text])
    await expect(page.locator(".log")).to_contain_text("{{constructor")
    await page.locator(".log .entry", has_text="onerror").first.click()
    await expect(page.get_by_role("dialog")).to_contain_text("onerror")
    await _is_untouched(visitor)


@pytest.mark.timeout(120)
async def test_hostile_files_output_and_processes_of_a_real_box_are_text(
    browser: Browser, served_local: Served
) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        page = visitor.page
        sandbox: AsyncSandbox = await served_local.server.manager.create(name="hostile")
        names = [text.replace("/", "|") for text in _XSS]
        for name, text in zip(names, _XSS, strict=True):
            await sandbox.files.write(name, text)
        await sandbox.files.write("page.html", _XSS[1])
        await sandbox.files.write("picture.svg", f"<svg xmlns='http://www.w3.org/2000/svg'>{_XSS[1]}</svg>")
        await sandbox.files.write("not.png", _XSS[1])
        await visitor.go("sandboxes", sandbox.id, "files")
        for name in names:
            await expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
        for name in (names[0], "page.html", "picture.svg"):
            await page.get_by_role("button", name=name, exact=True).click()
            await expect(page.get_by_role("dialog").locator("pre")).to_contain_text("owned")
            await _is_untouched(visitor)
            await page.keyboard.press("Escape")
        await page.get_by_role("button", name="not.png", exact=True).click()
        await expect(page.get_by_role("dialog").locator("img")).to_have_count(1)
        assert await page.title() == "skerry"
        await page.keyboard.press("Escape")

        await sandbox.start(["sh", "-c", f"cat page.html; echo '{names[3].replace(chr(39), '')}' >&2"], background=True)
        await visitor.go("sandboxes", sandbox.id, "processes")
        await page.locator(".processlist .entry").first.click()
        await expect(page.locator(".output")).to_contain_text("<script>")
        await _is_untouched(visitor)

        await visitor.go("sandboxes", sandbox.id, "terminal")
        screen = page.locator(".screen .xterm-rows")
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await page.keyboard.type("cat page.html; printf '\\033]0;owned\\007'; echo; echo d''one\n")
        await expect(screen).to_contain_text("done")
        await expect(screen).to_contain_text("<script>")
        await _is_untouched(visitor)


@pytest.mark.timeout(180)
async def test_a_thousand_sandboxes_are_listed_moved_in_and_filtered(
    browser: Browser, tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    config = config_of(tmp_path, max_sandboxes=MANY, ledger=LedgerSettings(enabled=False))
    async with serving(tmp_path, mock_provider, config=config) as served:
        manager = served.server.manager
        for begin in range(0, MANY, 50):
            numbers = range(begin, begin + 50)
            made = (manager.create(name=f"box-{each:04d}", labels={"number": str(each)}) for each in numbers)
            await asyncio.gather(*made)
        async with Visitor.signed_in(browser, served) as visitor:
            page = visitor.page
            await expect(page.locator(".tools .quiet")).to_have_text(f"{MANY} ready")
            await page.get_by_label("Order").select_option("name")
            assert await visitor.rows().count() < 60
            await page.get_by_label("Sandboxes: arrow keys move, Enter opens").focus()
            await page.keyboard.press("End")
            await expect(visitor.rows().last).to_contain_text("box-0999")
            await page.keyboard.press("Home")
            await expect(visitor.rows().first).to_contain_text("box-0000")
            for _ in range(40):
                await page.keyboard.press("ArrowDown")
            chosen = page.locator("[role=row][aria-selected=true]")
            await expect(chosen).to_contain_text("box-0040")
            await expect(chosen).to_be_in_viewport()
            await page.keyboard.press("PageDown")
            await expect(chosen).to_be_in_viewport()
            await page.get_by_label("Filter sandboxes").fill("number=77")
            await expect(visitor.rows()).to_have_count(11)  # 77 and 770 to 779
            await page.get_by_label("Filter sandboxes").fill("")
            await page.evaluate("document.querySelector('.rows').scrollTop = 0")
            await manager.destroy("box-0003")
            await expect(visitor.rows().filter(has_text="box-0003")).to_have_count(0)
            took_ms = await page.evaluate(_SCROLL)
            print(f"{MANY} sandboxes: each of {FRAMES} jumps through the list took {took_ms / FRAMES:.0f} ms")


FRAMES = 40
_SCROLL = """async () => {
  const rows = document.querySelector(".rows");
  const began = performance.now();
  for (let step = 1; step <= 40; step += 1) {
    rows.scrollTop = (rows.scrollHeight - rows.clientHeight) * step / 40;
    await new Promise((then) => requestAnimationFrame(then));
  }
  return performance.now() - began;
}"""
