"""What a server tells of itself: calls in the ledger, metrics, logs, spans, and whether it is well."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from surfaces.server.world import Served, serving

from skerry import log, trace
from skerry.errors import ProviderUnavailable, StoreUnavailable
from skerry.ledger.line import Line
from skerry.providers.mock import Mock
from skerry.surfaces.server import observe


async def calls(served: Served) -> list[Line]:
    served.server.manager.store.ledger.flush()
    return [line async for line in served.server.manager.ledger.show() if line.kind == "call"]


async def test_a_call_that_changes_something_is_in_the_ledger_without_what_was_said(served: Served) -> None:
    client = await served.client("acme")
    made = (await client.post("/v1/sandboxes", json={"env": {"KEY": "hunter2"}})).json()
    answer = await client.delete(f"/v1/sandboxes/{made['id']}?grace_s=0")
    await client.get("/v1/sandboxes")
    first, second = await calls(served)
    assert (first.facts["method"], first.facts["route"], first.facts["status"]) == ("POST", "/v1/sandboxes", 201)
    assert (first.who.tenant, first.who.actor.partition(":")[0]) == ("acme", "token")
    assert second.facts["request"] == answer.headers["x-request-id"]
    assert second.facts["status"] == answer.status_code
    assert set(second.facts) == {"method", "route", "status", "request"}
    assert "grace_s" not in str(second)
    assert "hunter2" not in str(first)


async def test_a_token_that_is_refused_is_in_the_ledger_without_the_token(served: Served) -> None:
    client = await served.anonymous()
    token = f"skerry_000000000000_{'s' * 43}_00000000"
    await client.get("/v1/sandboxes", headers={"authorization": f"Bearer {token}"})
    await client.get("/v1/sandboxes")
    (line,) = await calls(served)
    assert (line.facts["status"], line.facts["route"], line.who.actor) == (401, "/v1/sandboxes", "address:127.0.0.1")
    assert "sss" not in str(line)


async def test_metrics_are_for_admins_and_hold_no_ids(served: Served) -> None:
    tenant, admin = await served.client("acme"), await served.client()
    made = (await tenant.post("/v1/sandboxes", json={"name": "secret-plan"})).json()
    assert (await tenant.get("/metrics")).status_code == 403
    assert (await (await served.anonymous()).get("/metrics")).status_code == 401
    answer = await admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    assert 'skerry_calls_total{route="/v1/sandboxes",method="POST",status="201"} 1' in text
    assert 'skerry_operations_total{operation="create",provider="mock",outcome="ok"} 1' in text
    assert 'skerry_sandboxes{provider="mock",state="ready"} 1' in text
    assert 'skerry_call_seconds_count{route="/v1/sandboxes",method="POST"} 1' in text
    for told in (made["id"], "secret-plan", "acme"):
        assert told not in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


async def test_what_is_not_there_is_counted_without_its_name(served: Served) -> None:
    admin = await served.client()
    await admin.get("/no/such/thing")
    await admin.request("BREW", "/v1/sandboxes")
    text = (await admin.get("/metrics")).text
    assert 'route="other",method="GET",status="404"' in text
    assert "such" not in text
    assert "BREW" not in text


async def test_metrics_can_be_open_to_this_host(tmp_path: Path, own_registry: None, mock_provider: Mock) -> None:
    async with serving(tmp_path, mock_provider, metrics="loopback") as served:
        assert (await (await served.anonymous()).get("/metrics")).status_code == 200


async def test_anybody_may_ask_whether_it_lives_by_any_name(served: Served) -> None:
    client = await served.anonymous()
    for path in ("/healthz", "/readyz"):
        answer = await client.get(path, headers={"host": "10.1.2.3:7357"})
        assert (answer.status_code, len(answer.text) < 12) == (200, True)


async def test_it_is_not_ready_while_it_ends(served: Served) -> None:
    client = await served.anonymous()
    served.server.is_draining.set()
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/healthz")).status_code == 200


async def test_it_is_not_ready_without_its_registry(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone() -> int:
        raise StoreUnavailable("postgresql://boss:secret@db is gone")

    monkeypatch.setattr(served.server.manager.store, "last_event", gone)
    answer = await (await served.anonymous()).get("/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready\n")


async def test_its_provider_is_checked_no_more_often_than_is_good(
    served: Served, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        raise ProviderUnavailable("mock", "there is none", fix="wait")

    monkeypatch.setattr(mock_provider, "check", check)
    monkeypatch.setattr(observe, "_READY_S", -1.0)
    client = await served.anonymous()
    assert [(await client.get("/readyz")).status_code for _ in range(3)] == [503] * 3
    assert checks == 1


async def test_log_lines_are_json_with_the_ids_of_request_and_sandbox_and_no_token(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("info", as_json=True)
    try:
        client = await served.client("acme")
        made = (await client.post("/v1/sandboxes", json={})).json()
        answer = await client.get(f"/v1/sandboxes/{made['id']}")
    finally:
        log.configure("off")
    out = capsys.readouterr().err
    assert client.headers["authorization"].partition(" ")[2] not in out
    lines = [json.loads(line) for line in out.splitlines()]
    (found,) = [line for line in lines if line.get("request") == answer.headers["x-request-id"]]
    assert (found["sandbox"], found["status"], found["route"]) == (made["id"], 200, "/v1/sandboxes/{id}")
    assert found["actor"].startswith("token:")


def test_a_line_of_the_log_has_the_fields_of_the_work_that_it_tells_of(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", as_json=True)
    token = log.FIELDS.set({"request": "abc"})
    try:
        logging.getLogger("skerry.manager").warning("a line\nwith two")
    finally:
        log.FIELDS.reset(token)
        log.configure("off")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["request"] == "abc"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(api, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


async def test_spans_belong_to_the_callers_trace_and_tell_the_parts_of_a_call(
    served: Served, spans: InMemorySpanExporter
) -> None:
    client = await served.client("acme")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.post("/v1/sandboxes", json={}, headers={"traceparent": parent})
    found = {span.name: span for span in spans.get_finished_spans()}
    assert {"skerry.request", "skerry.create", "skerry.provider.create"} <= found.keys()
    request, create = found["skerry.request"], found["skerry.create"]
    assert request.context is not None
    assert create.parent is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{request.parent.span_id:016x}" == parent.split("-")[2]
    assert create.context is not None
    assert create.context.trace_id == request.context.trace_id
    assert request.attributes is not None
    assert request.attributes["http.route"] == "/v1/sandboxes"


async def test_commands_and_dials_have_spans(served: Served, spans: InMemorySpanExporter) -> None:
    async with await served.server.manager.create() as sandbox:
        await sandbox.close()
        await sandbox.exec(["true"])
    names = [span.name for span in spans.get_finished_spans()]
    assert {"skerry.exec", "skerry.dial"} <= {*names}


async def test_a_span_that_fails_says_how_and_nothing_of_the_message(spans: InMemorySpanExporter) -> None:
    heard = []
    with trace.listen(heard.append), pytest.raises(StoreUnavailable), trace.span("skerry.create", provider="mock"):
        raise StoreUnavailable("a secret")
    assert [(each.name, each.outcome) for each in heard] == [("skerry.create", "store_unavailable")]
    (span,) = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "store_unavailable"
    assert "a secret" not in span.to_json()


def test_without_anybody_who_listens_a_span_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MODULE", "no.such.module")
    assert trace.span("a", provider="b") is trace.span("c")
    with trace.span("a"), trace.following("00-1-2-3"):
        trace.note(a="b")
