"""Interpreters over REST, of a real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from surfaces.server.use_world import Box, local_box

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with local_box(folder) as box:
        yield box


async def test_an_interpreter_is_made_used_started_again_and_closed(box: Box) -> None:
    assert (await box.post("/interpreters", json={"name": "one"})).json()["language"] == "python"
    assert (await box.post("/interpreters/one/run", json={"code": "x = 4"})).json()["error"] is None
    ran = (await box.post("/interpreters/one/run", json={"code": "print(x); x / 0"})).json()
    assert (ran["stdout"], ran["error"]["name"], ran["execution_count"]) == ("4\n", "ZeroDivisionError", 2)
    shown = (await box.post("/interpreters/one/run", json={"code": "x"})).json()["results"]
    assert shown == [{"data": {"text/plain": "4"}, "metadata": {}, "is_result": True}]
    assert [each["name"] for each in (await box.get("/interpreters")).json()["items"]] == ["one"]
    assert (await box.post("/interpreters/one/restart")).status_code == 204
    again = (await box.post("/interpreters/one/run", json={"code": "x"})).json()
    assert again["error"]["name"] == "NameError"
    assert (await box.delete("/interpreters/one")).status_code == 204
    assert (await box.post("/interpreters/one/run", json={"code": "x"})).status_code == 404
    assert (await box.post("/interpreters", json={"name": "a/b"})).status_code in (400, 422, 502)


async def test_events_come_as_they_happen(box: Box) -> None:
    await box.post("/interpreters", json={})
    told = await box.all_events("POST", "/interpreters/python/stream", json={"code": "print('a')\ndisplay(1)\n2"})
    assert [each.event for each in told] == ["started", "stdout", "display", "result", "end"]
    assert told[3].data["result"]["data"] == {"text/plain": "2"}


async def test_code_is_interrupted_when_its_client_goes(box: Box) -> None:
    await box.post("/interpreters", json={})
    code = "import time\nx = 1\nprint('begun')\ntime.sleep(600)"
    async with box.events("POST", "/interpreters/python/stream", json={"code": code}) as events:
        async for event in events:
            if event.event == "stdout":
                break
    after = await box.post("/interpreters/python/run", json={"code": "x", "timeout_s": 20})
    assert after.json()["results"][0]["data"]["text/plain"] == "1"
    waiting = asyncio.create_task(box.post("/interpreters/python/run", json={"code": "time.sleep(600)"}))
    await asyncio.sleep(0.3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    after = await box.post("/interpreters/python/run", json={"code": "x", "timeout_s": 20})
    assert after.json()["results"][0]["data"]["text/plain"] == "1"


async def test_a_dead_interpreter_is_told_by_a_code_of_its_own(box: Box) -> None:
    await box.post("/interpreters", json={})
    died = await box.post("/interpreters/python/run", json={"code": "import os; os._exit(1)"})
    assert (died.status_code, died.json()["code"]) == (409, "interpreter_died")
    killed = await box.post("/interpreters/python/restart")
    assert killed.status_code == 204
    killed = await box.post("/interpreters/python/run", json={"code": "import os; os.kill(os.getpid(), 9)"})
    assert (killed.status_code, killed.json()["code"]) == (503, "interpreter_killed")
