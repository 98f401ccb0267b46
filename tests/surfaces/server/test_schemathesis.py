"""The OpenAPI document is true: generated calls of every operation are answered as it says, and never by a failure."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from surfaces.server import schemathesis_hooks as names
from surfaces.server.world import serving

from skerry.providers.mock import Mock
from skerry.surfaces.rest.routes import ALL

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ENDLESS = ("ledger_follow", "files_watch", "processes_output")
"""Streams that never end; tests of their own read those."""
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "2")
"""Of each operation; more take longer, and find more."""


def test_what_is_left_out_is_there() -> None:
    assert set(ENDLESS) <= {route.name for route in ALL}


@pytest.mark.timeout(400)
async def test_every_operation_answers_as_its_description_says(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with serving(tmp_path, mock_provider, rate=1_000_000) as served:
        client = await served.client()
        for name in (names.BOX, names.STILL, names.GONE):
            assert (await client.post("/v1/sandboxes", json={"name": name})).status_code == 201
        assert (await client.post("/v1/pools", json={"name": names.POOL, "size": 1})).status_code == 201
        file = f"name: {names.FLEET}\nphases:\n  - name: db\n"
        assert (await client.put(f"/v1/fleets/{names.FLEET}?wait_s=60", json={"file": file})).status_code == 202
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/v1/openapi.json"),
            *("--header", f"Authorization: {client.headers['authorization']}", "--checks", CHECKS),
            *("--generation-deterministic", "--no-shrink", "--no-color", "--warnings", "off"),
            *("--phases", "fuzzing", "--max-examples", EXAMPLES, "--request-timeout", "30", "--continue-on-failure"),
            *(part for name in ENDLESS for part in ("--exclude-operation-id", name)),
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": names.__file__},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await run.communicate()
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
        assert run.returncode == 0, said.decode(errors="replace")
        assert f"{_count()} passed" in said.decode(), said.decode(errors="replace")
        assert (await client.get("/v1/whoami")).status_code == 200, "its token was good to the end"
        lines = (await client.get("/metrics")).text.splitlines()
        calls = [line for line in lines if line.startswith("skerry_calls_total")]
        assert not [line for line in calls if 'status="401"' in line], "and none was refused for it"
        assert len([line for line in calls if 'status="2' in line]) > _count() // 2, "most operations did what they do"


def _count() -> int:
    return sum(route.method != "WEBSOCKET" for route in ALL) - len(ENDLESS)
