"""What is done with sandboxes is in the ledger, once, by whichever way it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manager.world import config_of

from skerry import Sandbox, SandboxManager
from skerry.config import LedgerSettings
from skerry.errors import CreateFailed, LedgerFull, PathNotFound, SkerryError, Unsupported
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, Phase
from skerry.fleet.status import StatusReader
from skerry.ledger.files import CURRENT
from skerry.ledger.line import Line
from skerry.ledger.reading import LineFilter, read
from skerry.ledger.verify import verify
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.providers.mock import Host, Mock
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

SECRET = "Zq7xSecretValue9yK"
Tell = Callable[..., list[Line]]


@pytest.fixture
def mock() -> Mock:
    return Mock(host=Host())


@pytest.fixture
async def manager(tmp_path: Path, mock: Mock) -> AsyncIterator[AsyncSandboxManager]:
    store = await Store.open(str(tmp_path / "registry.db"))
    async with AsyncSandboxManager(config_of(tmp_path), store=store, providers={"mock": mock}) as manager:
        yield manager
        await manager.destroy_all()
    await store.aclose()
    assert verify(tmp_path / "ledger").is_whole
    for path in (tmp_path / "ledger").iterdir():
        assert SECRET.encode() not in path.read_bytes()


@pytest.fixture
def told(tmp_path: Path, manager: AsyncSandboxManager) -> Tell:
    """The lines so far, of some kinds."""

    def tell(*kinds: str) -> list[Line]:
        manager.store.ledger.flush()
        lines = read(tmp_path / "ledger", LineFilter(kinds=frozenset(kinds)))
        return [line for line in lines if line.kind not in ("begin", "rotate")]

    return tell


async def test_a_life_is_told_from_its_create_to_its_end(manager: AsyncSandboxManager, told: Tell) -> None:
    sandbox = await manager.create(name="box", image="some", env={"TOKEN": SECRET}, labels={"k": "v"}, lifetime="1h")
    await manager.pause("box")
    await manager.resume("box")
    await manager.stop("box", 0)
    await manager.start("box", {"TOKEN": SECRET})
    await manager.snapshot("box", "kept")
    await sandbox.set_lifetime("2h")
    await sandbox.set_env({"OTHER": SECRET})
    await manager.restore("box", "kept")
    await manager.destroy("box", grace_s=0)
    await manager.remove_snapshot("kept")
    lines = told()
    assert [line.kind for line in lines] == [
        "create", "ready", "pause", "resume", "stop", "start", "snapshot", "lifetime", "env", "rebuild", "ready",
        "destroy", "end", "remove",
    ]  # fmt: skip
    assert {line.sandbox for line in lines if line.kind != "remove"} == {sandbox.id}
    create = lines[0].facts
    assert (create["name"], create["image"], create["env"], create["labels"]) == ("box", "some", ["TOKEN"], {"k": "v"})
    assert lines[7].facts["lifetime_s"] == 7200
    assert lines[8].facts == {"names": ["OTHER"]}
    assert [line.facts["cause"] for line in lines[-3:-1]] == ["user", "user"]


async def test_a_create_that_fails_is_told_with_its_end(manager: AsyncSandboxManager, mock: Mock, told: Tell) -> None:
    mock.faults.fail_create(CreateFailed(f"no luck, and {SECRET}"))
    with pytest.raises(CreateFailed):
        await manager.create()
    create, end = told()
    assert (create.kind, end.kind, end.facts) == ("create", "end", {"cause": "creation_failed"})
    assert create.sandbox == end.sandbox


async def test_a_command_is_told_before_it_runs_and_its_end_after(manager: AsyncSandboxManager, told: Tell) -> None:
    sandbox = await manager.create()
    await sandbox.exec(["echo", "--password", SECRET], env={"A": SECRET}, cwd="/tmp", stdin=SECRET)
    await sandbox.exec(f"TOKEN={SECRET} false")
    await sandbox.run_code("sh", f"echo '{SECRET}'")
    lines = told("exec", "exit")
    assert [line.kind for line in lines] == ["exec", "exit"] * 3
    first, second, third = lines[::2]
    assert first.facts == {"how": "exec", "argv": ["echo", "--password", "***"], "env": ["A"], "cwd": "/tmp"}
    assert second.facts == {"how": "exec", "shell": "TOKEN=*** false"}
    assert third.facts == {"how": "code", "language": "sh", "size": len(SECRET) + 7}
    assert [line.facts["exit_code"] for line in lines[1::2]] == [0, 1, 0]
    assert [line.facts["exec"] for line in lines[1::2]] == [line.seq for line in lines[::2]]
    assert all(line.facts["duration_s"] >= 0 for line in lines[1::2])


async def test_the_end_of_a_command_comes_before_whatever_is_done_next(
    manager: AsyncSandboxManager, tmp_path: Path
) -> None:
    sandbox = await manager.create()
    for _ in range(3):
        await sandbox.exec("true")
    await asyncio.sleep(0)  # by then the last is written too
    lines = list(read(tmp_path / "ledger", LineFilter(kinds=frozenset({"exec", "exit"}))))
    assert [line.kind for line in lines] == ["exec", "exit"] * 3
    assert [line.time for line in lines] == sorted(line.time for line in lines)


async def test_processes_and_terminals_are_told_with_the_way_that_they_end(
    manager: AsyncSandboxManager, told: Tell
) -> None:
    sandbox = await manager.create()
    process = await sandbox.start(["echo", "hi"])
    await process.wait()
    await process.wait()
    await process.detach()
    async with await sandbox.start(["sleep", "60"]):
        pass
    background = await sandbox.start(["sleep", "60"], background=True, tag="t")
    await background.detach()
    terminal = await sandbox.pty("true")
    with pytest.raises(Unsupported):  # a mock has none
        await terminal.wait()
    lines = told("exec", "exit")
    assert lines[-1].facts["error"] == "unsupported"
    assert [line.kind for line in lines] == ["exec", "exit", "exec", "exit", "exec", "exec", "exit"]
    assert [line.facts["how"] for line in lines if line.kind == "exec"] == ["start", "start", "start", "terminal"]
    assert lines[3].facts["error"] == "detached"
    assert (lines[4].facts["background"], lines[4].facts["tag"]) == (True, "t")


async def test_a_command_that_comes_to_no_end_is_told_so(manager: AsyncSandboxManager, told: Tell) -> None:
    sandbox = await manager.create()
    began = asyncio.Event()
    work = asyncio.create_task(sandbox.exec("echo began; sleep 60", on_stdout=lambda _: began.set()))
    await began.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    with pytest.raises(SkerryError):
        await sandbox.exec("true", cwd="/nowhere")
    assert [line.facts["error"] for line in told("exit")] == ["cancelled", "path_not_found"]


async def test_what_comes_in_and_goes_out_is_told_with_its_size(
    manager: AsyncSandboxManager, told: Tell, tmp_path: Path
) -> None:
    sandbox = await manager.create()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text(SECRET)
    await sandbox.files.write("a", SECRET)
    await sandbox.files.append("a", "more")
    await sandbox.files.read("a")
    await sandbox.files.upload(tmp_path / "tree", "tree")
    await sandbox.files.download("tree", tmp_path / "back")
    async for _ in sandbox.files.iter_chunks("a"):
        pass
    with pytest.raises(PathNotFound):
        await sandbox.files.read("missing")
    moves = [(line.facts["way"], line.facts["path"], line.facts["bytes"]) for line in told("file")]
    size = len(SECRET)
    assert moves[:3] == [("in", "a", size), ("in", "a", 4), ("out", "a", size + 4)]
    assert [move[:2] for move in moves[3:]] == [("in", "tree"), ("out", "tree"), ("out", "a"), ("out", "missing")]
    assert all(move[2] > size for move in moves[3:6])


async def test_a_look_at_the_members_of_a_fleet_is_no_line(
    manager: AsyncSandboxManager, told: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if their boxes were on a bridge, and had addresses there
    monkeypatch.setattr(StatusReader, "_lacks_address", lambda self, box: not self._addresses.get(box.id))
    fleet = AsyncFleet(manager, FleetSpec(name="crew", phases=(Phase(name="a", spec=Spec(provider="mock")),)))
    assert (await fleet.up()).ok
    for _ in range(2):
        assert [status.error for status in (await fleet.status()).values()] == [""]
    assert told("file", "exec") == []


async def test_ports_that_are_opened_are_told(manager: AsyncSandboxManager, told: Tell) -> None:
    sandbox = await manager.create()
    address = await sandbox.expose(8000)
    async with sandbox.forward(9000):
        pass
    assert [line.facts for line in told("port")] == [{"port": 8000, "local": address}, {"port": 9000, "local": None}]


async def test_a_change_of_rules_is_told_and_refused_if_it_cannot_be(
    manager: AsyncSandboxManager, told: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await manager.create()
    record = await manager.record(sandbox.id)
    spec = msgspec.structs.replace(record.spec, allow=("pypi.org",), network="rules")
    record = await manager.store.change(record, spec=spec, kind="rules")
    (line,) = told("rules")
    assert line.facts == {"allow": ["pypi.org"], "deny": [], "network": "rules"}
    record = await manager.store.change(record, spec=msgspec.structs.replace(spec, deny=("x.org",)), kind="rules")
    assert told("rules")[-1].facts == {"allow": ["pypi.org"], "deny": ["x.org"]}
    monkeypatch.setattr(manager.store.ledger, "append", _full)
    with pytest.raises(LedgerFull):
        await manager.store.change(record, spec=msgspec.structs.replace(spec, allow=()), kind="rules")
    assert (await manager.record(sandbox.id)).spec.allow == ("pypi.org",)


def _full(*_: Any, **__: Any) -> int:
    raise LedgerFull("no room")


async def test_a_full_ledger_stops_creates_and_commands_and_nothing_that_ends(
    manager: AsyncSandboxManager, mock: Mock, told: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await manager.create()
    monkeypatch.setattr(manager.store.ledger, "append", _full)
    with pytest.raises(LedgerFull):
        await manager.create(name="other")
    for call in (
        lambda: sandbox.exec("true"),
        lambda: sandbox.run_code("python", "1"),
        lambda: sandbox.start(["true"]),
        lambda: sandbox.pty("true"),
    ):
        with pytest.raises(LedgerFull):
            await call()
    assert await manager.count() == 1
    assert len(mock.host.boxes) == 1
    await sandbox.destroy(grace_s=0)
    assert await manager.count() == 0
    assert [line.sandbox for line in told("end")][-1] == sandbox.id


async def test_an_end_that_the_host_tells_is_told_with_its_cause(
    manager: AsyncSandboxManager, told: Tell, mock: Mock
) -> None:
    sandbox = await manager.create()
    await mock.destroy(sandbox.id)
    await manager.reconcile()
    ends = told("end", "lost")
    assert [line.sandbox for line in ends] == [sandbox.id]
    assert Cause(ends[0].facts["cause"])


async def test_a_program_that_dies_before_the_registry_is_told_leaves_the_end_in_the_ledger(
    manager: AsyncSandboxManager, told: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    sandbox = await manager.create()
    real = manager.store._database.transact

    async def transact(work: Any, *, write: bool = True, frees: bool = False) -> Any:
        if write and told("end"):
            raise Died
        return await real(work, write=write, frees=frees)

    monkeypatch.setattr(manager.store._database, "transact", transact)
    with pytest.raises(Died):
        await manager.destroy(sandbox.id, grace_s=0)
    monkeypatch.undo()
    assert [line.sandbox for line in told("end")] == [sandbox.id]
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).state is State.DESTROYED


async def test_commands_can_be_told_by_name_or_not_at_all(tmp_path: Path, mock: Mock) -> None:
    for commands, expected in (("names", ["exec", "exit"]), ("off", [])):
        config = config_of(tmp_path / commands, ledger=LedgerSettings(commands=commands))  # type: ignore[arg-type]
        store = await Store.open(str(tmp_path / commands / "registry.db"))
        async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
            sandbox = await manager.create()
            await sandbox.exec(["echo", SECRET])
            await manager.destroy_all()
        await store.aclose()
        lines = list(read(tmp_path / commands / "ledger"))
        assert [line.kind for line in lines if line.kind in ("exec", "exit")] == expected
        assert SECRET.encode() not in (tmp_path / commands / "ledger" / CURRENT).read_bytes()


async def test_a_ledger_that_is_off_leaves_no_folder(tmp_path: Path, mock: Mock) -> None:
    config = config_of(tmp_path, ledger=LedgerSettings(enabled=False))
    store = await Store.open(config.database)
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        await (await manager.create()).exec("true")
        await manager.destroy_all()
        assert [line async for line in manager.ledger.show()] == []
    await store.aclose()
    assert not (tmp_path / "ledger").exists()


@pytest.mark.usefixtures("own_registry")
async def test_a_sandbox_of_the_programs_own_provider_is_in_no_ledger(tmp_path: Path) -> None:
    async with AsyncSandbox(provider_object=Mock()) as sandbox:
        await sandbox.exec("true")
    assert not (tmp_path / "state/ledger").exists()


@pytest.mark.usefixtures("own_registry")
def test_a_sandbox_without_a_manager_is_told_too(tmp_path: Path) -> None:
    with Sandbox(provider="mock") as sandbox:
        sandbox.exec(["echo", "hi"])
    kinds = [line.kind for line in read(tmp_path / "state/ledger")]
    assert kinds == ["begin", "create", "ready", "exec", "exit", "destroy", "end"]
    assert {line.who.tool for line in read(tmp_path / "state/ledger")} == {"api"}


@pytest.mark.usefixtures("own_registry")
def test_the_synchronous_interface_reads_and_verifies_it(tmp_path: Path) -> None:
    with SandboxManager() as manager:
        sandbox = manager.create(provider="mock", name="one")
        sandbox.exec("true")
        sandbox.destroy()
        lines = list(manager.ledger.show(LineFilter(sandbox="one")))
        assert [line.kind for line in lines] == ["create", "ready", "exec", "exit", "destroy", "end"]
        assert [line.kind for line in manager.ledger.show(tail=1)] == ["end"]
        verified = manager.ledger.verify()
        assert verified.is_whole
        assert manager.ledger.head() == verified.head == lines[-1].hash
        assert next(iter(manager.ledger.follow(after=lines[0].seq))).kind == "ready"


async def test_who_follows_misses_nothing_over_rotations(tmp_path: Path, mock: Mock) -> None:
    from skerry.ledger.ledger import Ledger
    from skerry.ledger.reading import AsyncLedger

    config = config_of(tmp_path)
    writer = Ledger(tmp_path / "ledger", LedgerSettings(max_bytes=1500, keep=0))
    writer.append("exec", "s", number=-1)
    lines = AsyncLedger(config).follow(LineFilter(sandbox="s"))
    first = asyncio.ensure_future(anext(lines))
    found: list[int] = []
    for number in range(60):
        writer.append("exec", "s" if number % 2 else "other", number=number)
        await asyncio.sleep(0.01 if number % 7 == 0 else 0)
    found.append((await first).facts["number"])
    while found[-1] != 59:
        found.append((await anext(lines)).facts["number"])
    await lines.aclose()  # type: ignore[attr-defined]
    assert found == [number for number in range(found[0], 60) if number % 2]
