"""Builds of templates by E2B's control plane, where none can be; those that can are in the SDK's own tests."""

from __future__ import annotations

from pathlib import Path

from surfaces.e2b.e2b_world import e2b_serving


async def test_a_build_is_refused_with_the_reason_where_nothing_can_be_kept(own_registry: None, folder: Path) -> None:
    async with e2b_serving(folder) as e2b:
        asked = (await e2b.call("POST", "/v3/templates", {"name": "mine"})).json()
        path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
        answer = await e2b.call("POST", path, {"fromImage": "e2bdev/base", "steps": []})
        assert answer.status_code == 422
        assert "snapshot" in answer.json()["message"]
        assert await e2b.served.server.manager.count() == 0
