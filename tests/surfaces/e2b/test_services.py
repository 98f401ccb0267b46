"""What answers in a real sandbox by E2B's names: the code interpreter, ports, and what ends with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from surfaces.e2b.e2b_world import E2b, e2b_serving


@pytest.fixture
async def real(own_registry: None, folder: Path) -> AsyncIterator[E2b]:
    """A server for E2B's clients whose sandboxes are those of `local`."""
    async with e2b_serving(folder) as e2b:
        yield e2b


async def test_the_code_interpreter_answers_at_its_own_port(real: E2b) -> None:
    made = await real.create(templateID="code-interpreter-v1")
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49999"}
    refused = await real.http.post("/execute", json={"code": "1"}, headers=headers)
    assert refused.status_code == 401
    headers["X-Access-Token"] = made["envdAccessToken"]
    answer = await real.http.post("/execute", json={"code": "print('hi')\n40 + 2"}, headers=headers)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert ("stdout", "hi\n") in [(line["type"], line.get("text")) for line in lines]
    assert ("result", "42") in [(line["type"], line.get("text")) for line in lines]


async def test_a_port_is_open_to_whoever_knows_its_name_or_has_the_traffic_token(real: E2b) -> None:
    for private in (False, True):
        network = {"allowPublicTraffic": not private, "maskRequestHost": "app.example:${PORT}"}
        made = await real.create(network=network)
        sandbox = (await real.served.server.manager.list())[-1].id
        handle = await real.served.server.manager.get(sandbox)
        process = await handle.start(["python3", "-u", "-c", _APP])
        async with asyncio.timeout(20):
            async for _ in process:  # it says that it listens
                break
        host = {"host": f"8000-{made['sandboxID']}.localhost"}
        plain = await real.http.get("/", headers=host)
        assert plain.status_code == (403 if private else 200)
        if private:
            host["e2b-traffic-access-token"] = made["trafficAccessToken"]
        shown = (await real.http.get("/", headers=host)).text
        assert "Host: app.example:8000" in shown
        assert "traffic" not in shown.lower()
        await real.call("DELETE", f"/sandboxes/{made['sandboxID']}")


_APP = """
import http.server
class App(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(self.headers).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", 8000), App)
print("listens")
server.serve_forever()
"""


async def test_what_is_under_way_is_cut_off_when_its_sandbox_is_killed(real: E2b) -> None:
    made = await real.create()
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", "echo begins; sleep 60"]}}).encode()
    headers = {
        "E2b-Sandbox-Id": made["sandboxID"],
        "X-Access-Token": made["envdAccessToken"],
        "content-type": "application/connect+json",
        "connect-protocol-version": "1",
    }
    body = b"\0" + len(message).to_bytes(4, "big") + message
    async with (
        asyncio.timeout(30),
        real.http.stream("POST", "/process.Process/Start", content=body, headers=headers) as answer,
    ):
        seen = b""
        pieces = answer.aiter_bytes()
        while b"data" not in seen:
            seen += await anext(pieces)
        await real.call("DELETE", f"/sandboxes/{made['sandboxID']}")
        with pytest.raises(httpx.TransportError):
            await _drained(pieces)


async def _drained(pieces: AsyncIterator[bytes]) -> int:
    return sum([len(piece) async for piece in pieces])
