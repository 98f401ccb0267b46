"""E2B's code interpreter, as its SDK speaks to it, in a real box."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from providers.making import require
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from skerry.providers.local import Local, LocalConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.e2b.interpreter import routes

pytestmark = pytest.mark.timeout(90)


class Box:
    """What the router gives: a sandbox, and what was asked for at its making."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.sandbox = sandbox
        self.envs = {"OF_THE_SANDBOX": "mine"}
        self.access_token: str | None = "ea_token"


class Client:
    def __init__(self, box: Box) -> None:
        self.box = box
        app = Starlette(routes=routes())

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            scope["skerry.e2b"] = box
            await app(scope, receive, send)

        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=routed), base_url="http://sandbox", timeout=60
        )  # fmt: skip

    async def execute(self, code: str, **more: Any) -> list[dict[str, Any]]:
        answer = await self.http.post("/execute", json={"code": code, **more}, headers={"X-Access-Token": "ea_token"})
        assert answer.status_code == 200, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        return [line for line in lines if line["type"] != "keepalive"]


@pytest.fixture
async def client(own_registry: None, tmp_path: Path) -> AsyncIterator[Client]:
    provider = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache")))
    await require(provider)
    async with AsyncSandbox(provider_object=provider) as sandbox:
        yield Client(Box(sandbox))
    await provider.aclose()


async def test_code_is_told_line_by_line(client: Client) -> None:
    told = await client.execute("print('out')\nimport sys; print('err', file=sys.stderr)\n'text'")
    assert [line["type"] for line in told] == [
        "number_of_executions", "stdout", "stderr", "result", "end_of_execution",
    ]  # fmt: skip
    assert told[0]["execution_count"] == 1
    assert (told[1]["text"], told[2]["text"]) == ("out\n", "err\n")
    assert (told[3]["text"], told[3]["is_main_result"], told[3]["extra"]) == ("text", True, {})
    failed = (await client.execute("1 / 0"))[1]
    assert (failed["type"], failed["name"], failed["value"]) == ("error", "ZeroDivisionError", "division by zero")


async def test_variables_stay_in_the_default_context_and_in_that_of_a_language(client: Client) -> None:
    await client.execute("x = 1")
    assert (await client.execute("x", language="python"))[1]["text"] == "1"
    assert (await client.execute("echo hi", language="bash"))[1]["text"] == "hi\n"


async def test_an_environment_is_that_of_the_sandbox_and_for_one_run_that_of_the_call(client: Client) -> None:
    code = "import os; os.environ.get('OF_THE_SANDBOX'), os.environ.get('OF_THE_CALL')"
    assert (await client.execute(code, env_vars={"OF_THE_CALL": "1"}))[1]["text"] == "('mine', '1')"
    assert (await client.execute(code))[1]["text"] == "('mine', None)"
    assert (await client.execute("echo $OF_THE_CALL", language="bash", env_vars={"OF_THE_CALL": "1"}))[1][
        "text"
    ] == "1\n"


async def test_contexts_are_made_listed_started_again_and_removed(client: Client) -> None:
    made = (await client.http.post("/contexts", json={"cwd": "/tmp"})).json()
    assert (made["language"], made["cwd"]) == ("python", "/tmp")
    assert (await client.execute("import os; y = os.getcwd(); y", context_id=made["id"]))[1]["text"] == "/tmp"
    listed = (await client.http.get("/contexts")).json()
    assert listed[-1] == made
    assert "python" in [each["language"] for each in listed]
    assert (await client.http.post(f"/contexts/{made['id']}/restart")).status_code == 200
    assert (await client.execute("y", context_id=made["id"]))[1]["name"] == "NameError"
    assert (await client.http.delete(f"/contexts/{made['id']}")).status_code == 200
    assert (await client.http.delete(f"/contexts/{made['id']}")).status_code == 404
    assert made["id"] not in [each["id"] for each in (await client.http.get("/contexts")).json()]


async def test_an_interpreter_that_its_code_ends_is_there_again(client: Client) -> None:
    told = await client.execute("import os; os._exit(1)")
    assert told[-2]["name"] == "UnexpectedEndOfExecution"
    assert (await client.execute("1 + 1"))[1]["text"] == "2"


async def test_what_is_wrong_is_refused_as_the_sdk_expects_it(client: Client) -> None:
    good = {"X-Access-Token": "ea_token"}
    assert (await client.http.get("/health")).status_code == 200
    assert (await client.http.post("/execute", json={"code": "1"})).status_code == 401
    assert (await client.http.post("/execute", content=b"[", headers=good)).status_code == 400
    both = {"code": "1", "context_id": "x", "language": "python"}
    assert (await client.http.post("/execute", json=both, headers=good)).status_code == 400
    unknown = {"code": "1", "context_id": "unknown"}
    assert (await client.http.post("/execute", json=unknown, headers=good)).status_code == 404
    assert (await client.http.post("/contexts", json={"language": "cobol"})).status_code == 500


async def test_code_whose_client_goes_is_interrupted(client: Client) -> None:
    await client.execute("x = 1")
    waiting = asyncio.create_task(client.execute("import time; time.sleep(600)"))
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await client.execute("x"))[1]["text"] == "1"


async def test_a_box_that_is_lost_is_no_failure_of_the_code(client: Client) -> None:
    sandbox = client.box.sandbox
    await sandbox.connection.provider.destroy(sandbox.id)
    for path, body in (("/execute", {"code": "1"}), ("/contexts", {})):
        answer = await client.http.post(path, json=body, headers={"X-Access-Token": "ea_token"})
        assert answer.status_code == 502  # which is the SDK's word for a sandbox that is not there
        kind = [answer.headers[f"skerry-{name}"] for name in ("error-code", "retryable", "infrastructure")]
        assert kind == ["sandbox_gone", "false", "true"]
