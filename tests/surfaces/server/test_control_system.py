"""Providers, the doctor, reconcile, prune and metrics over time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from manager.world import config_of, until
from surfaces.server.world import Served, serving

from skerry.config import AdmissionSettings
from skerry.model.records import Cause
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.surfaces.server import history


async def test_providers_tell_what_they_can_do_and_whether_they_work(served: Served) -> None:
    client = await served.client("acme")
    found = {each["name"]: each for each in (await client.get("/v1/providers")).json()["items"]}
    mock = found["mock"]
    assert (mock["default"], mock["available"], mock["reason"]) == (True, True, "")
    assert set(mock["capabilities"]) == set(Mock.capabilities)
    assert set(mock["honours"]) == set(Mock.honours)
    assert "root" in found["docker"]["refuses"]
    assert all(not each["details"] and not each["fix"] for each in found.values())


async def test_the_doctor_tells_an_admin_how_all_is(served: Served) -> None:
    admin = await served.client()
    found = (await admin.get("/v1/doctor")).json()
    assert (found["ok"], found["default_provider"]) == (True, "mock")
    assert found["host"]["state_dir_writable"]
    assert found["ledger"]["enabled"]
    assert found["gate"]["needed_by"] == 0


async def test_the_room_of_the_host_is_the_same_everywhere(served: Served) -> None:
    admin = await served.client()
    found = (await admin.get("/v1/host")).json()
    assert found["memory_bytes"] > found["memory_free_bytes"] > 0
    assert (found["memory_promised_bytes"], found["memory_promisable_bytes"], found["short"]) == (0, None, "")
    assert (await admin.get("/v1/doctor")).json()["host"]["room"].keys() == found.keys()
    told = (await admin.get("/metrics")).text
    assert f"skerry_host_memory_bytes {found['memory_bytes']:.10g}\n" in told
    assert "skerry_creates_waiting 0\n" in told
    bounds = AdmissionSettings(overcommit=2.0, min_free_disk=1 << 62)
    await served.server.reload(msgspec.structs.replace(served.server.config, admission=bounds))
    found = (await admin.get("/v1/host")).json()
    assert (found["overcommit"], found["memory_promisable_bytes"]) == (2.0, 2 * found["memory_bytes"])
    assert "admission.min_free_disk" in found["short"]
    told = (await admin.get("/metrics")).text
    assert "skerry_host_short 1\n" in told
    assert f"skerry_host_memory_promisable_bytes {found['memory_promisable_bytes']:.10g}\n" in told


async def test_reconcile_tells_its_verdicts_and_does_nothing_when_asked_not_to(
    served: Served, mock_provider: Mock
) -> None:
    admin = await served.client()
    made = (await admin.post("/v1/sandboxes", json={})).json()
    await mock_provider.destroy(made["id"])
    dry = (await admin.post("/v1/reconcile", json={"dry_run": True})).json()["items"]
    assert [(each["id"], each["action"]) for each in dry] == [(made["id"], "lost")]
    assert (await admin.get(f"/v1/sandboxes/{made['id']}")).json()["state"] == "ready"
    await admin.post("/v1/reconcile", json={})
    assert (await admin.get(f"/v1/sandboxes/{made['id']}")).json()["state"] == "lost"


async def test_a_tenant_forgets_its_own_sandboxes_alone(served: Served) -> None:
    ours, theirs = await served.client("acme"), await served.client("other")
    for client in (ours, theirs):
        id = (await client.post("/v1/sandboxes", json={})).json()["id"]
        await served.server.manager.destroy(id)
    assert (await ours.post("/v1/prune", json={"older_s": 0})).json() == {"records": 1}
    assert (await ours.get("/v1/sandboxes?ended=true")).json()["items"] == []
    assert len((await theirs.get("/v1/sandboxes?ended=true")).json()["items"]) == 1


async def test_metrics_are_sampled_once_somebody_asks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "EVERY_S", 0.05)
    client, other = await served.client("acme"), await served.client("other")
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    url = f"/v1/sandboxes/{id}/metrics/history"
    assert (await client.get(url)).json()["time"] == []

    async def is_sampled() -> bool:
        return len((await client.get(url)).json()["time"]) >= 3

    await until(is_sampled)
    found = (await client.get(url)).json()
    columns = ("time", "cpu_percent", "memory_bytes", "disk_bytes", "processes", "load")
    assert len({len(found[name]) for name in columns}) == 1
    assert found["time"] == sorted(found["time"])
    since = found["time"][1]
    later = (await client.get(url, params={"since": since})).json()["time"]
    assert later
    assert min(later) > since
    (mine,) = (await client.get("/v1/metrics/history", params={"points": 2})).json()["items"]
    assert (mine["id"], len(mine["time"])) == (id, 2)
    assert (await other.get("/v1/metrics/history")).json()["items"] == []
    assert (await other.get(url)).status_code == 404


async def test_what_nobody_asks_for_is_sampled_no_more_and_forgotten(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY_S", 0.02)
    monkeypatch.setattr(history, "_ASKED_S", 0.2)
    client = await served.client()
    id = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await client.get(f"/v1/sandboxes/{id}/metrics/history")
    samples = served.server.history
    assert samples._sampler is not None
    await asyncio.wait_for(samples._sampler, 20)
    assert not samples._rings


async def test_a_box_that_is_sampled_ends_by_its_idle_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "EVERY_S", 0.05)
    async with serving(folder, config=config_of(folder, provider="local")) as served:
        client = await served.client()
        id = (await client.post("/v1/sandboxes", json={"idle": "1s"})).json()["id"]

        async def has_ended() -> bool:
            await client.get(f"/v1/sandboxes/{id}/metrics/history")
            return (await served.server.manager.look_after(id)).state is not State.READY

        await until(has_ended)
        record = await served.server.manager.record(id)
        await served.server.manager.destroy(id)
        assert record.cause is Cause.IDLE


def test_a_ring_keeps_the_newest_samples() -> None:
    from skerry.model.results import DiskUsage, Metrics

    ring = history.Ring()
    disk = DiskUsage(total=10, used=1, free=9)
    for number in range(2000):
        ring.add(float(number), Metrics(uptime_s=1, cpu_percent=2, cpu_s=1, memory_bytes=3, disk=disk, processes=1))
    view = ring.view("x", since=0.0, points=10_000)
    assert (len(view.time), view.time[-1], view.memory_bytes[-1]) == (360, 1999.0, 3.0)
