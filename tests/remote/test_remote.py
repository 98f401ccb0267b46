"""What only a manager of a server has: its server, its token, and what is between."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import msgspec
import pytest
from loopback import free_port
from manager.world import config_of
from surfaces.server.test_operations_process import certificate
from surfaces.server.world import Served, serving

import skerry
from skerry.config import Config
from skerry.errors import (
    AccessDenied,
    ConfigError,
    Conflict,
    InvalidSpec,
    NotFound,
    NotPermitted,
    SkerryError,
    StoreCorrupt,
    StoreUnavailable,
    WrongState,
    all_errors,
    of_code,
)
from skerry.fleet.model import FleetSpec, Phase
from skerry.manager.handles import Handles
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause
from skerry.model.spec import Spec
from skerry.model.tenants import Scope
from skerry.net.http import Answer
from skerry.providers.mock import Mock
from skerry.remote.api import Api, problem
from skerry.remote.fleet import AsyncRemoteFleet
from skerry.remote.handles import RemoteHandles
from skerry.remote.manager import AsyncRemoteManager
from skerry.surfaces.rest import problems

BUILT_ON_OTHERS = frozenset({
    "complete", "create_default", "execute", "execute_code", "exists", "get", "is_healthy", "list_dir", "read_file",
    "set_lifetime", "with_sandbox", "write_file", "destroy_all"
})  # fmt: skip
"""Methods of a manager that only call others of it."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path / "client")


async def connect(served: Served, config: Config, tenant: str | None = None, *scopes: Scope) -> AsyncRemoteManager:
    return AsyncRemoteManager(served.url, await served.token(tenant, *scopes), config=config)


def test_no_method_of_a_manager_is_left_out() -> None:
    public = {name for name, _ in inspect.getmembers(AsyncSandboxManager) if not name.startswith("_")}
    assert public - set(vars(AsyncRemoteManager)) - BUILT_ON_OTHERS == set()
    handles = {name for name, _ in inspect.getmembers(Handles, inspect.isfunction) if not name.startswith("_")}
    assert handles - set(vars(RemoteHandles)) - {"of", "recent", "release", "keep_only", "destroy_all"} == set()


def test_every_error_comes_over_as_what_it_was() -> None:
    for kind in all_errors():
        told = problems.problem_of(of_code(kind.code, "some words", field="memory"))
        found = problem(Answer(told.status, {}, msgspec.json.encode(told)))
        assert type(found) is kind
        assert str(found) == "some words"
        assert found.retryable == kind.retryable
        assert found.infrastructure == kind.infrastructure
    assert isinstance(problem(Answer(412, {}, b'{"code":"precondition_failed"}')), Conflict)
    assert isinstance(problem(Answer(502, {}, b"<html>")), SkerryError)


@pytest.mark.parametrize(
    "url", ["", "host", "ftp://host", "http://", "http://user:pass@host", "https://host/?a=b", "file:///etc/passwd"]
)
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Api(url)


async def test_a_server_that_is_not_there_is_told(config: Config) -> None:
    manager = AsyncRemoteManager("http://127.0.0.1:9", config=config)
    with pytest.raises(StoreUnavailable):
        await manager.create()


async def test_a_wrong_token_is_told(served: Served, config: Config) -> None:
    with pytest.raises(AccessDenied):
        await AsyncRemoteManager(served.url, "wrong", config=config).list()
    with pytest.raises(AccessDenied):
        await AsyncRemoteManager(served.url, config=config).list()


async def test_on_the_unix_socket_no_token_is_needed(served: Served, config: Config) -> None:
    manager = AsyncRemoteManager(f"unix://{served.socket_path}", config=config)
    async with manager, await manager.create() as made:
        assert (await made.exec(["echo", "here"])).stdout == b"here\n"


async def test_two_tenants_have_nothing_of_each_other(served: Served, config: Config) -> None:
    async with await connect(served, config, "acme") as ours, await connect(served, config, "other") as theirs:
        made = await ours.create(name="plan")
        assert made.spec.project == "acme"
        assert await theirs.list() == []
        for reference in (made.id, made.id[:8], "plan"):
            with pytest.raises(NotFound):
                await theirs.get(reference)
        # a handle that somebody tells of is of no use either
        stolen = theirs.handles.of(await ours.record("plan"))
        with pytest.raises(NotFound):
            await stolen.exec(["true"])
        assert [each async for each in theirs.events()] == []
        await made.destroy()


async def test_each_call_needs_its_scope(served: Served, config: Config) -> None:
    async with await connect(served, config, "acme") as owner, await connect(served, config, "acme", Scope.READ) as eye:
        made = await owner.create(name="box")
        seen = await eye.get("box")
        await seen.ping()
        assert await seen.processes.list() == []
        for call in (
            seen.exec(["true"]), seen.start(["sh"], background=True), seen.run_code("sh", ""), seen.files.read("x"),
            seen.files.list("."), seen.files.write("x", b""), seen.files.remove("x"),
            seen.set_env({"A": "1"}), seen.set_lifetime("1h"), eye.destroy("box"), eye.create(),
        ):  # fmt: skip
            with pytest.raises(NotPermitted):
                await call
        tunnel = await seen.connect(80)
        with pytest.raises(NotPermitted):
            await tunnel.read()
        async with await connect(served, config, "acme", Scope.READ, Scope.EXEC) as worker:
            assert (await (await worker.get("box")).exec(["echo", "1"])).stdout == b"1\n"
        await made.destroy()


async def test_the_methods_of_the_server_are_not_for_clients(served: Served, config: Config) -> None:
    async with await connect(served, config) as manager, await manager.create() as made:
        for method in (
            "network",
            "take",
            "resolved",
            "refuse",
            "sync_clock",
            "shutdown",
            "terminate",
            "serve",
            "x" * 99,
        ):
            with pytest.raises(SkerryError) as told:
                await made.call(method, {"wish": 1, "grace_s": 0, "time": 1, "argv": ["true"]})
            assert told.value.rpc_code == -32601
        await made.ping()


async def test_a_revoked_token_ends_its_streams(
    served: Served, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.surfaces.server.app.LOOK_S", 0.05)
    async with await connect(served, config) as owner, await connect(served, config, "acme") as manager:
        made = await manager.create()
        client = await made.connection.connect()
        (token,) = await served.server.access.tokens("acme")
        await served.server.access.revoke(token.id)
        async with asyncio.timeout(20):
            while client.is_open:  # noqa: ASYNC110 -- whoever holds a client is told of nothing but its calls
                await asyncio.sleep(0.02)
        with pytest.raises(AccessDenied):
            await made.exec(["true"])
        await owner.destroy(made.id)


async def test_an_ephemeral_sandbox_ends_with_its_program(served: Served, config: Config) -> None:
    async with await connect(served, config) as manager:
        made = await manager.create(ephemeral=True)
        await made.exec(["true"])
    async with await connect(served, config) as other:
        async with asyncio.timeout(20):
            assert (await other.wait(made.id)).cause is Cause.OWNER_DIED
        kept = await other.create(ephemeral=True)
        await kept.destroy()
        assert (await other.record(kept.id)).cause is Cause.USER


async def test_a_server_gives_the_ids(served: Served, config: Config) -> None:
    async with await connect(served, config) as manager:
        with pytest.raises(InvalidSpec):
            await manager.create(id=skerry.SandboxId("00000000-0000-4000-8000-000000000000"))
        with pytest.raises(WrongState):
            _ = manager.store


async def test_what_is_not_set_here_is_as_the_server_is_set(served: Served, config: Config) -> None:
    unlike = msgspec.structs.replace(config, provider="docker", lifetime="1h")  # by default: nobody said so
    manager = AsyncRemoteManager(served.url, await served.token(), config=unlike)
    async with manager, await manager.create() as made:
        assert (made.spec.provider, made.spec.lifetime_s) == ("mock", 0)
    said = msgspec.structs.replace(unlike, provider="mock", origins={"lifetime": "$SKERRY_LIFETIME"})
    manager = AsyncRemoteManager(served.url, await served.token(), config=said)
    async with manager, await manager.create() as made:
        assert made.spec.lifetime_s == 3600


@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_a_fleet_is_the_servers(served: Served, config: Config, tenant: str | None) -> None:
    phases = (
        Phase(name="db", spec=Spec(provider="mock")),
        Phase(name="web", count=2, wait_for=("db",), spec=Spec(provider="mock")),
    )
    spec = FleetSpec(name="crew", phases=phases)
    async with await connect(served, config, tenant) as manager:
        fleet = skerry.AsyncFleet(manager, spec)
        assert isinstance(fleet, AsyncRemoteFleet)
        assert not (await fleet.plan()).is_empty
        told: list[str] = []
        report = await fleet.up(on_event=lambda event: told.append(type(event).__name__))
        assert report.ok
        assert told[0] == "PhaseStarted"
        assert len(await fleet.status()) == 3
        outcomes = await fleet.exec("web", ["echo", "hello"])
        assert [each.result and each.result.stdout for each in outcomes.values()] == [b"hello\n"] * 2
        assert (await fleet.scale(web=1)).ok
        opened = await skerry.AsyncFleet.open(manager, "crew")
        assert sorted(await opened.status()) == ["agent-db-001", "agent-web-001"]
        assert await opened.stop_phase("web") == ["agent-web-001"]
        assert await fleet.down() == ["agent-db-001"]
        assert await fleet.down() == []


async def test_what_goes_wrong_in_a_stream_of_events_is_the_error_that_it_was(
    served: Served, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(**_: object) -> None:
        raise StoreCorrupt("event 7 cannot be read")

    monkeypatch.setattr(served.server.manager.store, "events", fail)
    async with await connect(served, config) as manager:
        for follow in (False, True):
            with pytest.raises(StoreCorrupt, match="event 7"):
                async for _ in manager.events(follow=follow):
                    pass


async def test_a_stream_of_events_is_opened_again(
    tmp_path: Path, own_registry: None, mock_provider: Mock, config: Config
) -> None:
    """The server ends and another begins: whoever follows misses nothing."""
    from surfaces.server import world

    port = free_port()
    seen: list[str] = []
    following: asyncio.Task[None] | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "free_port", lambda: port)
        for round in range(2):
            async with serving(tmp_path, mock_provider) as served:
                manager = await connect(served, config)
                if following is None:

                    async def follow(manager: AsyncRemoteManager = manager) -> None:
                        async for event in manager.events(follow=True):
                            seen.append(event.kind)
                            if seen.count("destroyed") == 2:
                                return

                    following = asyncio.create_task(follow())
                async with await manager.create(name=f"n{round}"):
                    pass
                if round:
                    async with asyncio.timeout(30):
                        await following
    assert seen.count("created") == 2


def test_a_program_without_a_loop_uses_the_same(tmp_path: Path, own_registry: None, mock_provider: Mock) -> None:
    """The server runs in a thread of its own here, as a program's would in a process."""
    import threading

    ready, done = threading.Event(), threading.Event()
    told: list[str] = []

    def run() -> None:
        async def main() -> None:
            async with serving(tmp_path, mock_provider) as served:
                told.extend([served.url, await served.token()])
                ready.set()
                await asyncio.to_thread(done.wait)

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        with skerry.connect(*told) as manager:
            with manager.create(name="sync") as made:
                assert made.exec(["echo", "hello"]).stdout == b"hello\n"
                made.files.write("a", b"b")
                assert manager.read_file("sync", "a") == b"b"
                assert [each.name for each in manager.list()] == ["sync"]
            assert [each.kind for each in manager.events()][-1] == "destroyed"
    finally:
        done.set()
        thread.join(30)


async def test_a_server_is_trusted_by_its_certificate(
    tmp_path: Path, own_registry: None, mock_provider: Mock, config: Config
) -> None:
    cert, key = certificate(tmp_path, "localhost")
    async with serving(tmp_path, mock_provider, tls_cert=cert, tls_key=key) as served:
        url, token = f"https://localhost:{served.url.rpartition(':')[2]}", await served.token()
        trusting = AsyncRemoteManager(url, token, ca=cert, config=config)
        async with trusting, await trusting.create() as made:
            assert (await made.exec(["echo", "safe"])).stdout == b"safe\n"
            data = b"x" * 3_000_000
            await made.files.write("big", data)
            assert await made.files.read("big") == data
        with pytest.raises(StoreUnavailable, match="certificate"):
            await AsyncRemoteManager(url, token, config=config).create()
    with pytest.raises(ConfigError):
        Api(url, ca=str(tmp_path / "missing"))
