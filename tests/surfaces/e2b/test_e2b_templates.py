"""Builds of templates by E2B's control plane that fail; those that do not are in the SDK's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manager.world import until
from surfaces.e2b.e2b_world import E2b, e2b_serving

from skerry.errors import HostFull


async def test_a_build_is_refused_with_the_reason_where_nothing_can_be_kept(own_registry: None, folder: Path) -> None:
    async with e2b_serving(folder) as e2b:
        asked = (await e2b.call("POST", "/v3/templates", {"name": "mine"})).json()
        path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
        answer = await e2b.call("POST", path, {"fromImage": "e2bdev/base", "steps": []})
        assert answer.status_code == 422
        assert "snapshot" in answer.json()["message"]
        assert await e2b.served.server.manager.count() == 0


async def test_a_build_that_the_machinery_fails_is_not_blamed_on_its_steps(
    e2b: E2b, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise HostFull("the host has no memory left")

    monkeypatch.setattr(e2b.served.server.manager, "create", full)
    asked = (await e2b.call("POST", "/v3/templates", {"name": "mine"})).json()
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    assert (await e2b.call("POST", f"/v2{path}", {"fromImage": "e2bdev/base", "steps": []})).status_code == 202

    async def has_failed() -> bool:
        return (await e2b.call("GET", f"{path}/status")).json()["status"] == "error"

    await until(has_failed)
    reason = (await e2b.call("GET", f"{path}/status")).json()["reason"]
    assert "no memory" in reason["message"]
    assert (reason["error_code"], reason["retryable"], reason["infrastructure"]) == ("host_full", True, True)
