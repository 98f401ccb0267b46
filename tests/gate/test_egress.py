"""The bound of what a sandbox sends: its pace by a clock of the test's own, and in real boxes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from loopback import served
from surfaces.server.world import serving as serving_rest

from skerry.config import Config
from skerry.errors import LimitReached
from skerry.gate.bounds import Bucket, Pace
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.tenants import Quota
from skerry.pool.pool import AsyncSandboxPool
from skerry.sandbox.sandbox import AsyncSandbox

from .box import PATIENCE_S, Rerouted, policy, serving
from .own_gate import config_with_gate, end_gates, kill_gate

RATE = 64 << 10
ALLOW = ("raw.test:7", "127.0.0.1:7")
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as link:
    link.settimeout(60)
    link.sendall(b"\\0" * int(sys.argv[3]))
    link.shutdown(socket.SHUT_WR)
    print(link.recv(100).decode())
"""


class Clock:
    """Time that passes as it is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def pace(self, per_s: int) -> Pace:
        return Pace(per_s, now=lambda: self.now, sleep=self.sleep)


class Sink:
    """A server that counts what it hears, and says how much that was."""

    def __init__(self) -> None:
        self.heard = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while data := await reader.read(1 << 16):
            count += len(data)
            self.heard += len(data)
        with suppress(OSError):  # whoever sent it may be gone
            writer.write(str(count).encode())
            writer.write_eof()


def test_tokens_come_at_their_rate_and_no_more_than_a_burst_is_kept() -> None:
    bucket = Bucket(100, 100, 0.0, is_full=False)
    assert not bucket.take(0.0, 1)
    assert bucket.wait_s(0.0, 50) == pytest.approx(0.5)
    assert bucket.take(0.5, 50)
    assert not bucket.take(100.0, 101)
    assert bucket.take(100.0, 100)
    assert not bucket.take(100.0, 1)


@pytest.mark.parametrize("per_s", [1 << 10, 1 << 20, 1 << 40])
async def test_what_is_sent_keeps_to_the_rate_from_the_first_byte_on(per_s: int) -> None:
    clock = Clock()
    pace, sent = clock.pace(per_s), 0
    for _ in range(50):
        for piece in pace.pieces(bytes(1 << 10)):
            await pace.wait(piece)
            sent += len(piece)
            assert sent <= per_s * clock.now * 1.000001
    assert clock.now == pytest.approx(sent / per_s)


async def test_what_was_not_sent_is_saved_up_for_a_second_and_no_longer() -> None:
    clock = Clock()
    pace, sent = clock.pace(1 << 10), 0
    clock.now = 1000.0
    for piece in pace.pieces(bytes(3 << 10)):
        await pace.wait(piece)
        sent += len(piece)
        assert sent <= (1 << 10) * (1 + clock.now - 1000.0) * 1.000001
    assert clock.now == pytest.approx(1002.0)


async def test_connections_take_turns_whatever_each_has_to_send() -> None:
    clock, sent = Clock(), Counter[int]()
    pace = clock.pace(8 << 10)

    async def send(number: int, size: int) -> None:
        for piece in pace.pieces(bytes(size)):
            await pace.wait(piece)
            sent[number] += len(piece)

    large = [asyncio.create_task(send(number, 1 << 20)) for number in range(4)]
    await send(4, 10 << 10)
    assert max(sent.values()) - min(sent.values()) <= 2 << 10
    for task in large:
        task.cancel()
    await asyncio.gather(*large, return_exceptions=True)
    await send(5, 1)  # whoever gave up keeps nobody waiting


async def test_all_connections_of_a_sandbox_send_at_one_pace_and_lose_nothing() -> None:
    sink, clock = Sink(), Clock()
    async with (
        served(sink) as port,
        serving(policy(ALLOW, egress=RATE), dialer=Rerouted(port)) as sandbox,
    ):
        shared = sandbox.session._shared
        assert shared.pace is not None
        shared.pace = clock.pace(RATE)
        clients = [await sandbox.box.connect("raw.test", 7) for _ in range(3)]

        async def send(size: int, number: int) -> bytes:
            await clients[number].send(b"\n" + bytes(size - 1))
            clients[number].writer.write_eof()
            return await clients[number].rest()

        assert await asyncio.gather(*(send(3 * RATE, number) for number in range(3))) == [b"%d" % (3 * RATE)] * 3
        assert clock.now == pytest.approx(9.0)
        assert sink.heard == 9 * RATE


async def test_what_comes_in_is_not_bounded() -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(4 << 20))
        writer.write_eof()
        await reader.read()

    clock = Clock()
    async with served(tell) as port, serving(policy(ALLOW, egress=RATE), dialer=Rerouted(port)) as sandbox:
        sandbox.session._shared.pace = clock.pace(RATE)
        client = await sandbox.box.connect("raw.test", 7)
        assert len(await client.rest()) == 4 << 20
    assert clock.now == 0.0


async def test_a_connection_that_waits_for_its_pace_ends_with_its_rule() -> None:
    sink, asked = Sink(), asyncio.Event()

    async def forever(_: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with served(sink) as port, serving(policy(ALLOW, egress=RATE), dialer=Rerouted(port)) as sandbox:
        sandbox.session._shared.pace = Pace(RATE, sleep=forever)
        client = await sandbox.box.connect("raw.test", 7)
        client.writer.write(b"\n" + bytes(1 << 20))  # of which not all is taken
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
            await sandbox.session.update(policy([], egress=RATE))
        await client.rest()
        (closed,) = await sandbox.ledger.wait("close")
        assert closed["up"] < 1 << 20


async def test_a_policy_with_another_bound_has_another_pace_and_one_without_has_none() -> None:
    async with serving(policy(ALLOW)) as sandbox:
        shared = sandbox.session._shared
        assert shared.pace is None
        await sandbox.session.update(policy(ALLOW, egress=RATE))
        first = shared.pace
        assert first is not None
        await sandbox.session.update(policy([], egress=RATE))
        assert shared.pace is first
        await sandbox.session.update(policy(ALLOW))
        assert shared.pace is None


@pytest.fixture
def config(folder: Path, local_rules: None) -> Iterator[Config]:
    """An installation of its own; its gate is ended after the test."""
    yield config_with_gate(folder)
    end_gates(folder)


@asynccontextmanager
async def sink() -> AsyncIterator[int]:
    async with served(Sink()) as port:
        yield port


async def seconds_to_send(sandbox: AsyncSandbox, port: int, size: int) -> float:
    """Seconds from before a box began to send so much to after all of it was heard: no less than it took."""
    begun = time.monotonic()
    done = await sandbox.exec(["python3", "-c", SEND, "web.test", str(port), str(size)], timeout_s=90)
    assert done.text.strip() == str(size), done.stderr
    return time.monotonic() - begun


async def test_a_box_sends_no_faster_than_it_may_also_by_the_next_gate(config: Config, folder: Path) -> None:
    async with sink() as port, AsyncSandboxManager(config) as manager:
        sandbox = await manager.create(allow=[f"web.test:{port}"], egress=RATE, name="it")
        assert sandbox.enforced["egress"].by.startswith("the gate")
        assert await seconds_to_send(sandbox, port, 3 * RATE) >= 2  # of three seconds one may have been saved up
        await asyncio.to_thread(kill_gate, folder)
        async with AsyncSandboxManager(config) as other:
            assert await seconds_to_send(await other.get("it"), port, 3 * RATE) >= 2
        await sandbox.destroy()


async def test_a_box_of_a_pool_has_the_bound_of_its_pool(config: Config) -> None:
    async with sink() as port, AsyncSandboxManager(config) as manager:
        async with AsyncSandboxPool(manager, size=1, network="rules", egress=RATE) as pool:
            sandbox = await pool.acquire(allow=[f"web.test:{port}"])
            assert sandbox.spec.egress == RATE
            assert await seconds_to_send(sandbox, port, 3 * RATE) >= 2
        await manager.destroy_all()


async def test_a_quota_of_what_is_sent_holds_in_python_and_over_rest(config: Config, folder: Path) -> None:
    asked = {"allow": ["web.test"], "egress": "6M"}
    async with serving_rest(folder, config=config) as server:
        client: httpx.AsyncClient = await server.client("acme", quota=Quota(egress=10 << 20))
        silent = await client.post("/v1/sandboxes", json={"allow": ["web.test"]})
        assert (silent.status_code, silent.json()["field"]) == (400, "egress")
        answers = await asyncio.gather(*(client.post("/v1/sandboxes", json=asked) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [201, 429, 429]
        assert (await client.post("/v1/sandboxes", json={})).status_code == 201  # it has no network
        assert (await client.get("/v1/whoami")).json()["used"]["egress"] == 6 << 20
        scoped = server.server.manager.of_project("acme", Quota(egress=10 << 20))
        with pytest.raises(LimitReached, match="10M a second of egress"):
            await scoped.create(allow=["web.test"], egress="6M", project="acme")
        await server.server.manager.destroy_all()
