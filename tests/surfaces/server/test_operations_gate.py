"""The gate under a server: it dies and is back without a call, and ends with the server if nobody needs it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from gate.own_gate import FETCH, end_gates, gates, kill_gate, web
from manager.world import until
from surfaces.server.process import ServeProcess

from skerry.config import load
from skerry.errors import GateUnavailable
from skerry.gate.client import GateClient

_AGAIN = """
import sys, time, urllib.request
url = sys.argv[1]
def get():
    try:
        return urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        return "no"
for wanted in ("hello", "no", "hello"):
    while get() != wanted:
        time.sleep(0.02)
    print(wanted, flush=True)
"""
"""Says when its requests work, when they do not any more, and when they do again."""


@pytest.fixture
async def process(folder: Path, own_registry: None) -> AsyncIterator[ServeProcess]:
    """A server whose sandboxes may reach this host by a name; its gate is ended after the test."""
    process = ServeProcess(folder, env={"SKERRY_STATE_DIR": str(folder), "SKERRY_LOG": "info"})
    with process.config.open("a") as file:
        file.write('[network.hosts]\n"web.test" = ["127.0.0.1"]\n')
    async with process:
        yield process
    end_gates(folder)


@pytest.fixture
async def site() -> AsyncIterator[str]:
    async with web() as port:
        yield f"web.test:{port}"


async def _make(client: httpx.AsyncClient, site: str) -> str:
    answer = await client.post("/v1/sandboxes", json={"allow": [site]})
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def _fetch(client: httpx.AsyncClient, id: str, site: str) -> str:
    command = ["python3", "-c", FETCH, f"http://{site}/", "direct"]
    answer = await client.post(f"/v1/sandboxes/{id}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["stdout"]
    return text.strip()


async def _remove(client: httpx.AsyncClient, id: str) -> None:
    assert (await client.delete(f"/v1/sandboxes/{id}?grace_s=0")).status_code == 204


async def _metric(client: httpx.AsyncClient, name: str) -> float | None:
    text = (await client.get("/metrics")).text
    found = [line.split() for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(found[0][1]) if found else None


async def _is_up(client: httpx.AsyncClient) -> bool:
    return await _metric(client, "skerry_gate_up") == 1


async def test_a_gate_that_is_killed_is_there_again_without_a_call(process: ServeProcess, site: str) -> None:
    async with process.client() as client:
        id = await _make(client, site)
        await until(lambda: _is_up(client))
        command = ["python3", "-c", _AGAIN, f"http://{site}/"]
        body = {"command": command, "timeout_s": 60}
        async with client.stream("POST", f"/v1/sandboxes/{id}/exec/stream", json=body) as answer:
            said: list[str] = []
            async for line in answer.aiter_lines():
                said += [word for word in ("hello", "no") if f'"{word}\\n"' in line]
                if said == ["hello"]:
                    kill_gate(process.folder)
                    said.append("")  # only once
        assert said == ["hello", "", "no", "hello"]
        await until(lambda: _is_up(client))
        assert await _metric(client, "skerry_gate_starts_total") == 1
        assert await _metric(client, "skerry_gate_sandboxes") == 1
        assert "the gate is gone, and starts again" in process.log()
        await _remove(client, id)


async def test_the_log_of_the_gate_is_in_that_of_the_server(process: ServeProcess, site: str) -> None:
    async with process.client() as client:
        id = await _make(client, site)

        async def is_told() -> bool:
            return f"skerry.gate: sandbox {id} has the gate" in process.log()

        await until(is_told)
        await _remove(client, id)


async def test_a_server_without_rules_has_no_gate_and_tells_of_none(process: ServeProcess) -> None:
    async with process.client() as client:
        answer = await client.post("/v1/sandboxes", json={})
        assert await _metric(client, "skerry_gate_up") is None
        await _remove(client, answer.json()["id"])
    assert gates(process.folder) == []


async def test_a_gate_that_no_sandbox_needs_ends_with_the_server_and_comes_back_with_it(
    process: ServeProcess, site: str
) -> None:
    async with process.client() as client:
        await _remove(client, await _make(client, site))
        await until(lambda: _is_up(client))
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert gates(process.folder) == []
    await process.start()
    async with process.client() as client:
        await until(lambda: _is_up(client))


async def test_a_gate_that_a_sandbox_needs_outlives_the_server(process: ServeProcess, site: str) -> None:
    async with process.client() as client:
        id = await _make(client, site)
        await until(lambda: _is_up(client))
    before = gates(process.folder)
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert gates(process.folder) == before
    await process.start()
    async with process.client() as client:
        assert await _fetch(client, id, site) == "hello"
        assert gates(process.folder) == before
        await _remove(client, id)


async def test_a_gate_that_is_stuck_is_told_of(
    process: ServeProcess, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.gate.client._SILENT_S", 3.0)
    async with process.client() as client:
        id = await _make(client, site)
        (gate,) = gates(process.folder)
        try:
            with pytest.raises(GateUnavailable, match="said nothing"):
                await GateClient(load({"state_dir": str(process.folder)})).follow(
                    lambda pulse: os.kill(gate.pid, signal.SIGSTOP)
                )
        finally:
            os.kill(gate.pid, signal.SIGCONT)
        await _remove(client, id)
