"""A visit to the page in a real browser, which tells what the browser complained about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, expect
from surfaces.server.world import Served

WAIT_MS = 20_000
_NO_COMPLAINTS = "Failed to load resource", "WebSocket is closed before the connection is established"
"""Answers of calls that are no success, and terminals whose view somebody leaves before they are there."""
expect.set_options(timeout=WAIT_MS)


class Visitor:
    """A page of the browser, at the server."""

    def __init__(self, page: Page, served: Served) -> None:
        self.page = page
        self.served = served
        self.complaints: list[str] = []
        """What the browser said on its console that is no answer of a call: errors of scripts, refusals by policy."""
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in _NO_COMPLAINTS):
            self.complaints.append(message.text)

    @classmethod
    @asynccontextmanager
    async def arriving(cls, browser: Browser, served: Served, **options: Any) -> AsyncIterator[Visitor]:
        """Somebody without a token, who has complained about nothing at the end of the visit."""
        context = await browser.new_context(**options)
        context.set_default_timeout(WAIT_MS)
        try:
            visitor = cls(await context.new_page(), served)
            yield visitor
            assert not visitor.complaints, visitor.complaints
        finally:
            await context.close()

    @classmethod
    @asynccontextmanager
    async def signed_in(
        cls, browser: Browser, served: Served, *, tenant: str | None = None, **options: Any
    ) -> AsyncIterator[Visitor]:
        """Somebody who came by a link with a token."""
        async with cls.arriving(browser, served, **options) as visitor:
            token = await served.token(tenant)
            await visitor.page.goto(f"{served.url}/#token={token}")
            await expect(visitor.page.get_by_role("heading", name="Sandboxes")).to_be_visible()
            yield visitor

    async def go(self, *parts: str) -> None:
        """Be at a view."""
        await self.page.evaluate("(to) => { location.hash = to }", "#/" + "/".join(parts))

    def heading(self, text: str) -> Locator:
        return self.page.get_by_role("heading", name=text, exact=True)

    def rows(self) -> Locator:
        """The rows of the list that the browser draws."""
        return self.page.locator(".rows [role=row]")

    async def screen_text(self) -> str:
        """What the terminal shows."""
        return await self.page.locator(".screen:not([hidden]) .xterm-rows").inner_text()
