"""The page in a real browser: signing in, the list, the form, a sandbox's parts, keys, and looks."""

from __future__ import annotations

import re

from playwright.async_api import Browser, expect
from surfaces.page.browsing import Visitor
from surfaces.server.world import Served


async def test_a_token_in_the_link_signs_in_and_leaves_the_address(browser: Browser, served: Served) -> None:
    async with Visitor.signed_in(browser, served) as visitor:
        assert "token" not in visitor.page.url
        await visitor.page.reload()
        await expect(visitor.heading("Sandboxes")).to_be_visible()
        await expect(visitor.page.locator(".who")).to_contain_text("admin")


async def test_a_token_is_typed_and_a_wrong_one_refused(browser: Browser, served: Served) -> None:
    async with Visitor.arriving(browser, served) as visitor:
        page = visitor.page
        await page.goto(served.url)
        await page.get_by_label("Token").fill("skerry_nonsense")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_be_visible()
        await page.get_by_label("Token").fill(await served.token())
        await page.keyboard.press("Enter")
        await expect(visitor.heading("Sandboxes")).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Token")).to_be_visible()
        assert await page.evaluate("sessionStorage.getItem('skerry.token')") is None


async def test_a_token_that_is_taken_back_signs_out(visitor: Visitor) -> None:
    await visitor.page.evaluate("sessionStorage.setItem('skerry.token', 'skerry_gone')")
    await visitor.go("health")
    await expect(visitor.page.get_by_label("Token")).to_be_visible()


async def test_the_list_is_live(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    await expect(page.get_by_text("There are no sandboxes yet.")).to_be_visible()
    sandbox = await manager.create(name="first", labels={"team": "blue"}, lifetime="1h")
    row = visitor.rows().filter(has_text="first")
    await expect(row).to_contain_text("ready")
    await expect(row).to_contain_text("mock")
    await expect(row).to_contain_text("team=blue")
    await expect(row).to_contain_text(re.compile("in 59m|in 1h"))
    await manager.pause(sandbox.id)
    await expect(row).to_contain_text("paused")
    await manager.destroy(sandbox.id)
    await expect(row).to_have_count(0)
    await page.reload()
    await page.get_by_label("ended").check()
    await expect(row).to_contain_text("somebody ended it")


async def test_use_of_cpu_and_memory_is_drawn_as_curves(visitor: Visitor) -> None:
    sandbox = await visitor.served.server.manager.create(name="measured")
    samples = {"id": sandbox.id, "cpu_percent": [1.0, 80.0, 37.0], "memory_bytes": [1e6, 2e6, 3 * 2**20]}
    await visitor.page.route("**/v1/metrics/history?*", lambda route: route.fulfill(json={"items": [samples]}))
    row = visitor.rows()
    await expect(row.get_by_role("img", name="CPU 37 %")).to_be_visible()
    await expect(row.get_by_role("img", name="memory 3.0 M")).to_be_visible()


async def test_a_tenant_sees_its_own_alone(browser: Browser, served: Served) -> None:
    await served.server.manager.create(name="of-all")
    client = await served.client("blue")
    assert (await client.post("/v1/sandboxes", json={"name": "of-blue"})).status_code == 201
    async with Visitor.signed_in(browser, served, tenant="blue") as visitor:
        await expect(visitor.rows()).to_have_count(1)
        await expect(visitor.rows()).to_contain_text("of-blue")
        await expect(visitor.page.locator(".who")).to_contain_text("blue")


async def test_the_filter_finds_by_name_state_and_label(visitor: Visitor) -> None:
    manager = visitor.served.server.manager
    for name, team in (("alpha", "red"), ("beta", "blue"), ("gamma", "blue")):
        await manager.create(name=name, labels={"team": team})
    await expect(visitor.rows()).to_have_count(3)
    await visitor.page.keyboard.press("/")
    await visitor.page.keyboard.type("team=blue gam")
    await expect(visitor.rows()).to_have_count(1)
    await expect(visitor.rows()).to_contain_text("gamma")
    await visitor.page.keyboard.press("Escape")
    await expect(visitor.rows()).to_have_count(3)


async def test_a_sandbox_is_made_from_the_form(visitor: Visitor) -> None:
    page = visitor.page
    await page.get_by_role("link", name="New sandbox").click()
    await expect(page.get_by_label("Name", exact=True)).to_be_focused()
    await page.get_by_label("Name", exact=True).fill("from-form")
    await expect(page.locator(".choice", has_text="mock").locator("input")).to_be_checked()
    await page.get_by_label("Memory", exact=True).fill("256M")
    await page.get_by_label("Lifetime").fill("30m")
    await page.get_by_text("Command, ports, environment, labels").click()
    await page.get_by_label("Labels").fill("team=blue\nx=y")
    await page.get_by_role("button", name="Create").click()
    await expect(visitor.heading("from-form")).to_be_visible()
    (record,) = await visitor.served.server.manager.list()
    assert (record.name, record.spec.memory, record.spec.lifetime_s) == ("from-form", 256 << 20, 1800)
    assert record.spec.labels == {"team": "blue", "x": "y"}


async def test_the_form_tells_what_was_wrong_at_its_field(visitor: Visitor) -> None:
    page = visitor.page
    await visitor.go("new")
    await page.get_by_label("Memory", exact=True).fill("lots")
    await page.get_by_role("button", name="Create").click()
    await expect(page.locator(".field.wrong", has_text="Memory")).to_contain_text("memory")


async def test_actions_pause_resume_and_destroy_after_a_question(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox = await manager.create(name="acted-on")
    await visitor.go("sandboxes", sandbox.id, "details")
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await page.get_by_role("button", name="Destroy").click()
    await page.get_by_role("button", name="Cancel").click()
    assert await manager.exists(sandbox.id)
    await page.get_by_role("button", name="Destroy").click()
    await page.get_by_role("dialog").get_by_role("button", name="Destroy").click()
    await expect(visitor.heading("Sandboxes")).to_be_visible()
    await expect(page.get_by_text("There are no sandboxes yet.")).to_be_visible()
    assert await manager.list() == []


async def test_a_snapshot_is_made_and_forked(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox = await manager.create(name="origin")
    await visitor.go("sandboxes", sandbox.id, "details")
    await page.get_by_role("button", name="Snapshot").click()
    await page.get_by_label("Name of the snapshot").fill("kept")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert [each.name for each in await manager.snapshots()] == ["kept"]
    await page.get_by_role("button", name="Fork").click()
    await page.get_by_label("Name of the fork").fill("copy")
    await page.keyboard.press("Enter")
    await expect(visitor.heading("copy")).to_be_visible()


async def test_details_tell_why_it_ends_and_move_its_end(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox = await manager.create(name="detailed", lifetime="1h")
    await visitor.go("sandboxes", "detailed", "details")
    await expect(page.locator(".card", has_text="Why and when it ends").locator("li").first).to_be_visible()
    await expect(page.locator(".card", has_text="Identity")).to_contain_text(sandbox.id)
    await page.get_by_label("Lifetime from now").fill("3d")
    await page.keyboard.press("Enter")
    await expect(page.locator(".facts-line")).to_contain_text(re.compile("in (2d 23h|3d)"))


async def test_health_pools_ledger_events_and_fleets_show_what_there_is(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox = await manager.create(name="seen")
    await manager.execute(sandbox.id, ["echo", "told"])
    await page.get_by_role("link", name="Health").click()
    await expect(page.locator(".card", has_text="mock").first).to_contain_text("works")
    await page.get_by_role("link", name="Pools").click()
    await expect(page.get_by_text("There are no pools.")).to_be_visible()
    await page.get_by_role("link", name="Ledger").click()
    line = page.locator(".log li", has_text="told")
    await expect(line).to_be_visible()
    await page.get_by_label("Search in the lines").fill("nothing has this")
    await expect(page.get_by_text("No line fits.")).to_be_visible()
    await page.get_by_label("Search in the lines").fill("")
    await manager.execute(sandbox.id, ["echo", "later"])
    await expect(page.locator(".log li", has_text="later")).to_be_visible()
    await page.get_by_role("link", name="Events").click()
    await expect(page.locator(".log li", has_text="seen").first).to_be_visible()
    await page.get_by_role("link", name="Fleets").click()
    await expect(page.get_by_text("There are no fleets.")).to_be_visible()


async def test_what_a_sandbox_reached_and_was_refused_is_shown_as_it_happens(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    sandbox, other = await manager.create(name="reaching"), await manager.create(name="other")
    ledger = manager.store.ledger  # the gate writes so
    ledger.note("connect", sandbox.id, name="pypi.org", port=443, rule="pypi.org")
    await visitor.go("sandboxes", sandbox.id, "network")
    lines = page.locator(".log li")
    await expect(lines).to_have_count(1)
    await expect(lines).to_contain_text("allowedpypi.org:443by pypi.org")
    ledger.note("refuse", other.id, name="other.example", port=443)
    ledger.note("refuse", sandbox.id, name="evil.example", port=80, reason="no rule allows it")
    await expect(lines).to_have_count(2)
    await expect(lines.first).to_contain_text("refusedevil.example:80no rule allows it")


async def test_a_fleet_is_drawn_with_what_waits_for_what_and_how_far_it_is(visitor: Visitor) -> None:
    page = visitor.page
    phases = "[{name: db}, {name: web, count: 2, wait_for: [db]}, {name: end, wait_for: [web, db]}]"
    client = await visitor.served.client()
    answer = await client.put("/v1/fleets/shop?wait_s=30", json={"file": f"name: shop\nphases: {phases}\n"})
    assert answer.json()["state"] == "done", answer.text
    await page.get_by_role("link", name="Fleets").click()
    await expect(page.get_by_role("button", name="web: 2 of 2 ready")).to_be_visible()
    await expect(page.locator(".edge")).to_have_count(3)
    await expect(page.locator(".members li")).to_have_count(4)
    await page.get_by_role("button", name="web: 2 of 2 ready").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".members li")).to_have_count(2)
    await page.get_by_role("link", name="agent-web-001").click()
    await expect(visitor.heading("agent-web-001")).to_be_visible()


async def test_a_pool_shows_how_many_wait_and_how_often_one_was_there(visitor: Visitor) -> None:
    page = visitor.page
    client = await visitor.served.client()
    assert (await client.post("/v1/pools", json={"name": "warm", "size": 2})).status_code == 201
    await page.get_by_role("link", name="Pools").click()
    card = page.locator(".card", has_text="warm")
    await expect(card).to_contain_text("2 of 2")
    assert (await client.post("/v1/pools/warm/acquire", json={})).is_success
    await expect(card).to_contain_text("100 % of 1")
    assert (await client.delete("/v1/pools/warm")).is_success


async def test_a_stream_that_was_lost_is_followed_again(visitor: Visitor) -> None:
    page, manager = visitor.page, visitor.served.server.manager
    await expect(page.locator(".head .link")).to_have_text("live")
    visitor.served.server.is_draining.set()
    await expect(page.locator(".head .link")).not_to_have_text("live")
    await manager.create(name="meanwhile")
    visitor.served.server.is_draining.clear()
    await expect(page.locator(".head .link")).to_have_text("live")
    await expect(visitor.rows()).to_contain_text("meanwhile")


async def test_the_looks_follow_the_system_and_can_be_turned(browser: Browser, served: Served) -> None:
    async with Visitor.signed_in(browser, served, color_scheme="dark") as visitor:
        page = visitor.page
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(ground)
        await page.keyboard.press("t")
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")
        light = await page.evaluate(ground)
        assert sum(map(int, re.findall(r"\d+", dark))) < 200 < 600 < sum(map(int, re.findall(r"\d+", light)))
        await page.reload()
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")
        await page.keyboard.press("t")
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_nothing_is_wider_than_a_narrow_screen(browser: Browser, served: Served) -> None:
    manager = served.server.manager
    await manager.create(name="a-name-that-is-rather-long-and-goes-on-for-a-while", labels={"team": "b" * 60})
    narrow = {"width": 400, "height": 800}
    async with Visitor.signed_in(browser, served, viewport=narrow) as visitor:
        await expect(visitor.rows()).to_have_count(1)
        (record,) = await manager.list()
        views = [("sandboxes",), ("new",), ("health",), ("ledger",), ("events",), ("pools",), ("fleets",)]
        views += [
            ("sandboxes", record.id, tab) for tab in ("terminal", "files", "processes", "network", "ports", "details")
        ]
        for view in views:
            await visitor.go(*view)
            await expect(visitor.page.locator("main h1")).to_be_visible()
            wide = await visitor.page.evaluate("document.documentElement.scrollWidth")
            inner = await visitor.page.evaluate("document.querySelector('main').scrollWidth")
            assert (wide, inner) == (400, 400), view
