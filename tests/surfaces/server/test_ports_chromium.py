"""Ports of sandboxes in a real browser: what an app can do there, and what a hostile one cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser
from surfaces.page.conftest import browser as browser
from surfaces.server.ports_world import Box, boxed

ECHO = """url => new Promise((resolve) => {
  const socket = new WebSocket(url), seen = [];
  socket.onopen = () => socket.send("hello");
  socket.onmessage = (event) => { seen.push(event.data); if (seen.length == 2) resolve(seen[1]) };
  socket.onerror = () => resolve("refused");
})"""
FETCH = """([url, options]) => fetch(url, options).then(async (answer) => answer.type == "opaque"
  ? "opaque" : `${answer.status} ${await answer.text()}`, () => "refused")"""


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with boxed(folder) as box:
        yield box


async def test_an_app_works_on_its_own_origin_and_others_cannot_reach_it(browser: Browser, box: Box) -> None:
    port, hostile = await box.mirror(), await box.mirror()
    page = await browser.new_page()
    answer = await page.goto(await box.link(port))
    assert answer is not None
    assert (answer.status, page.url) == (200, f"http://{box.host(port)}/")
    assert await page.evaluate("document.cookie") == ""
    seen: Any = await page.evaluate("fetch('/x', {method: 'POST', body: 'hi'}).then((answer) => answer.json())")
    assert (seen["method"], seen["size"], "skerry" in str(seen)) == ("POST", 2, False)
    assert await page.evaluate("isSecureContext")
    assert await page.evaluate(ECHO, f"ws://{box.host(port)}/") == "hello"

    await page.goto(await box.link(hostile))
    private = f"http://{box.host(port)}/"
    for options in ({"credentials": "include"}, {"credentials": "include", "method": "POST", "body": "x"}):
        assert await page.evaluate(FETCH, [private, options]) == "refused"
    assert await page.evaluate(ECHO, f"ws://{box.host(port)}/") == "refused"
    await page.evaluate("document.cookie = 'skerry-port=mine; domain=localhost; path=/'")
    for url in (f"{box.served.url}/v1/sandboxes", f"{box.served.url.replace('127.0.0.1', 'localhost')}/v1/sandboxes"):
        assert await page.evaluate(FETCH, [url, {"credentials": "include"}]) == "refused"
    answer = await page.goto(private)
    assert answer is not None
    assert answer.status == 200
