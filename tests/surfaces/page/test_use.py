"""Real sandboxes used from the page: terminals, files, processes, and all of it by keyboard alone."""

from __future__ import annotations

import base64
import re

import pytest
from playwright.async_api import Browser, expect
from surfaces.page.browsing import Visitor
from surfaces.server.world import Served

from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(180)
_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


async def _at(visitor: Visitor, tab: str) -> AsyncSandbox:
    sandbox = await visitor.served.server.manager.create(name="box", lifetime="1h")
    await visitor.go("sandboxes", sandbox.id, tab)
    await expect(visitor.heading("box")).to_be_visible()
    return sandbox


async def test_what_is_typed_runs_and_what_it_writes_is_shown(browser: Browser, served_local: Served) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        await _at(visitor, "terminal")
        page = visitor.page
        screen = page.locator(".screen:not([hidden]) .xterm-rows")
        await expect(page.locator(".xterm-helper-textarea").first).to_be_focused()
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await page.keyboard.type("echo sum $((40+2)); printf '\\033[38;2;200;80;20mcoloured\\033[0m\\n'\n")
        await expect(screen).to_contain_text("sum 42")
        await expect(screen.locator("span[style*='200, 80, 20']")).to_contain_text("coloured")
        # it fills its place, and follows when that changes
        await page.keyboard.type("clear; tput cols; tput lines\n")
        await page.set_viewport_size({"width": 700, "height": 700})
        await page.keyboard.type("clear; echo size=$(stty size)\n")
        await expect(screen).to_contain_text(re.compile(r"size=\d+ [4-8]\d"))


async def test_a_terminal_is_found_again_after_a_reload_and_others_open_beside_it(
    browser: Browser, served_local: Served
) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        await _at(visitor, "terminal")
        page = visitor.page
        screen = page.locator(".screen:not([hidden]) .xterm-rows")
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await page.keyboard.type("kept=here; echo first-$kept\n")
        await expect(screen).to_contain_text("first-here")
        await page.reload()
        await expect(screen).to_contain_text("first-here")
        await page.locator(".screen:not([hidden]) .xterm").click()
        await page.keyboard.type("echo again-$kept\n")
        await expect(screen).to_contain_text("again-here")
        await page.get_by_role("button", name="New terminal").click()
        await expect(page.get_by_role("tab")).to_have_count(2)
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await page.keyboard.type("echo second-$kept.\n")
        await expect(screen).to_contain_text("second-.")
        await page.keyboard.type("exit\n")
        await expect(page.locator(".screen:not([hidden]) .note")).to_contain_text("It has ended with 0")
        await page.keyboard.press("Enter")
        await expect(page.locator(".screen:not([hidden]) .note")).to_have_text("")


async def test_a_terminal_that_lost_its_connection_goes_on(browser: Browser, served_local: Served) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        await _at(visitor, "terminal")
        page = visitor.page
        screen = page.locator(".screen:not([hidden]) .xterm-rows")
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await page.keyboard.type("kept=here; echo before-$kept\n")
        await expect(screen).to_contain_text("before-here")
        served_local.server.is_draining.set()
        await expect(page.locator(".note")).not_to_have_text("")
        served_local.server.is_draining.clear()
        await expect(page.locator(".note")).to_have_text("")
        await page.keyboard.type("echo after-$kept\n")
        await expect(screen).to_contain_text("after-here")


async def test_files_are_uploaded_seen_downloaded_and_deleted(browser: Browser, served_local: Served) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        sandbox = await _at(visitor, "files")
        page = visitor.page
        await page.get_by_label("Files to upload").set_input_files([
            {"name": "note.txt", "mimeType": "text/plain", "buffer": "two\nlines ü".encode()},
            {"name": "dot.png", "mimeType": "image/png", "buffer": _PICTURE},
            {"name": "raw.bin", "mimeType": "application/octet-stream", "buffer": b"\0\1\2"},
        ])  # fmt: skip
        await page.get_by_role("button", name="note.txt", exact=True).click()
        await expect(page.get_by_role("dialog").locator("pre")).to_have_text("two\nlines ü")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="dot.png", exact=True).click()
        picture = page.get_by_role("dialog").locator("img")
        await expect(picture).to_be_visible()
        assert await picture.evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 1
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("button", name="raw.bin", exact=True).click()
        await expect(page.get_by_role("dialog")).to_contain_text("no text")
        await page.keyboard.press("Escape")
        async with page.expect_download() as coming:
            await page.get_by_role("button", name="Download dot.png").click()
        download = await coming.value
        assert download.suggested_filename == "dot.png"
        assert (await download.path()).read_bytes() == _PICTURE
        await page.get_by_role("button", name="New folder").click()
        await page.get_by_role("dialog").get_by_role("textbox").fill("inner")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="inner", exact=True).click()
        await expect(page.get_by_text("This folder is empty.")).to_be_visible()
        await page.get_by_role("button", name="..", exact=True).click()
        await page.get_by_role("button", name="Delete note.txt").click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        await expect(page.get_by_role("button", name="note.txt", exact=True)).to_have_count(0)
        assert sorted(each.name for each in await sandbox.files.list(".") if "." in each.name[1:]) == [
            "dot.png",
            "raw.bin",
        ]


async def test_folders_are_walked_from_an_empty_home_to_the_root_and_back(
    browser: Browser, served_local: Served
) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        await _at(visitor, "files")
        page = visitor.page
        crumbs = page.get_by_role("navigation", name="Folder")
        await expect(page.get_by_text("This folder is empty.")).to_be_visible()
        await expect(crumbs).to_have_text(re.compile(r"/\s*home /\s*user"))
        for entry in ("user", "usr"):
            await page.get_by_role("button", name="..", exact=True).click()
            await expect(
                page.get_by_label("Files", exact=True).get_by_role("button", name=entry, exact=True)
            ).to_be_visible()
        await expect(crumbs).to_have_text("/")
        for entry in ("home", "user"):
            await page.get_by_label("Files", exact=True).get_by_role("button", name=entry, exact=True).click()
        await expect(crumbs).to_have_text(re.compile(r"/\s*home /\s*user"))
        await crumbs.get_by_role("button", name="/", exact=True).click()
        await expect(page.get_by_role("button", name="usr", exact=True)).to_be_visible()


async def test_processes_are_started_heard_and_ended(browser: Browser, served_local: Served) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        await _at(visitor, "processes")
        page = visitor.page
        await page.get_by_label("Command to run in the background").fill("echo out; echo err >&2; exec sleep 600")
        await page.keyboard.press("Enter")
        await expect(page.locator(".output")).to_contain_text("out")
        await expect(page.locator(".output")).to_contain_text("err")
        await page.get_by_role("button", name="Kill").click()
        await expect(page.get_by_text("It has ended with 137.")).to_be_visible()
        await expect(page.get_by_role("button", name="Kill")).to_have_count(0)


async def test_a_port_that_listens_gets_a_link_that_opens_it(browser: Browser, served_local: Served) -> None:
    async with Visitor.signed_in(browser, served_local) as visitor:
        sandbox = await _at(visitor, "ports")
        await sandbox.files.write("index.html", "<title>inside</title>hello from the box")
        await sandbox.start(["python3", "-m", "http.server", "8123"], background=True)
        page = visitor.page
        card = page.locator(".card", has_text="8123")
        await expect(card).to_contain_text("listens")
        await card.get_by_role("button", name="Make a link").click()
        async with page.context.expect_page() as coming:
            await card.get_by_role("link", name="Open in the browser").click()
        opened = await coming.value
        await expect(opened.locator("body")).to_contain_text("hello from the box")
        assert await opened.evaluate("sessionStorage.length") == 0
        await opened.close()


async def test_all_is_reached_by_keyboard_alone(browser: Browser, served_local: Served) -> None:
    async with Visitor.arriving(browser, served_local) as visitor:
        page, keys = visitor.page, visitor.page.keyboard
        token = await served_local.token()
        await page.goto(served_local.url)
        await expect(page.get_by_label("Token")).to_be_focused()
        await keys.type(token)
        await keys.press("Enter")
        await expect(visitor.heading("Sandboxes")).to_be_visible()
        await keys.press("n")
        await expect(page.get_by_label("Name", exact=True)).to_be_focused()
        await keys.type("by-keys")
        await expect(page.locator(".choice", has_text="local").locator("input")).to_be_checked()
        await keys.press("Enter")
        await expect(visitor.heading("by-keys")).to_be_visible()
        screen = page.locator(".screen .xterm-rows")
        await expect(screen).to_contain_text(re.compile(r"[$#]"))
        await keys.type("echo typed\n")
        await expect(screen).to_contain_text("typed")
        await keys.press("Shift+Escape")
        await expect(page.get_by_role("link", name="Terminal", exact=True)).to_be_focused()
        for key, tab in (("2", "Files"), ("3", "Processes"), ("4", "Network"), ("5", "Ports"), ("6", "Details")):
            await keys.press(key)
            await expect(page.get_by_role("link", name=tab, exact=True)).to_have_attribute("aria-current", "page")
        for key, title in (("f", "Fleets"), ("p", "Pools"), ("h", "Health"), ("l", "Ledger"), ("e", "Events")):
            await keys.press("g")
            await keys.press(key)
            await expect(visitor.heading(title)).to_be_visible()
        await keys.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("New sandbox")
        await keys.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await keys.press("g")
        await keys.press("s")
        await expect(visitor.rows()).to_have_count(1)
        for _ in range(30):
            if await page.evaluate("document.activeElement.classList.contains('rows')"):
                break
            await keys.press("Tab")
            ring = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert ring != "none", await page.evaluate("document.activeElement.outerHTML")
        await keys.press("Enter")
        await expect(visitor.heading("by-keys")).to_be_visible()
        await keys.press("6")
        await page.get_by_role("button", name="Destroy").focus()
        await keys.press("Enter")
        await expect(page.get_by_role("dialog").get_by_role("button", name="Destroy")).to_be_focused()
        await keys.press("Enter")
        await expect(page.get_by_text("There are no sandboxes yet.")).to_be_visible()
