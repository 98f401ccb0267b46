"""What is the same at home and on a server: each test runs against both."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.errors import (
    CallInterrupted,
    Conflict,
    InterpreterNotFound,
    InvalidSpec,
    NotFound,
    PathIsFolder,
    PathNotFound,
    SandboxGone,
    Unsupported,
    UserNotFound,
)
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def sandbox(manager: AsyncSandboxManager) -> AsyncIterator[AsyncSandbox]:
    async with await manager.create() as sandbox:
        yield sandbox


def only_on(manager: AsyncSandboxManager, kind: str) -> None:
    if manager.config.provider != kind:
        pytest.skip(f"{manager.config.provider} has no real processes")


# commands


async def test_a_command_runs_to_its_end(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec(["echo", "hello"])
    assert (result.exit_code, result.stdout) == (0, b"hello\n")
    result = await sandbox.exec("cat", stdin=b"some text")
    assert result.stdout == b"some text"
    assert (await sandbox.exec("exit 3")).exit_code == 3
    assert (await sandbox.exec(["no-such-program"])).not_started == "not_found"


async def test_output_comes_as_it_is_written(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    process = await sandbox.start("echo one; read line; echo two $line >&2", stdin=True)
    chunks = aiter(process)
    assert await anext(chunks) == (1, b"one\n")
    await process.write("three\n")
    assert await anext(chunks) == (2, b"two three\n")
    assert (await process.wait()).exit_code == 0


async def test_of_much_output_the_beginning_and_the_end_are_kept(
    manager: AsyncSandboxManager, sandbox: AsyncSandbox
) -> None:
    only_on(manager, "local")
    result = await sandbox.exec("seq 1 400000", limit=1000)
    assert result.truncated
    assert result.stdout.startswith(b"1\n2\n")
    assert result.stdout.endswith(b"400000\n")
    assert len((await sandbox.exec("head -c 30000000 /dev/zero", limit=40 << 20)).stdout) == 30_000_000


async def test_a_command_ends_after_its_time(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    assert (await sandbox.exec("echo begun; sleep 60", timeout_s=0.3)).timed_out


async def test_a_long_command_arrives_whole(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    text = "x" * 3_000_000
    assert (await sandbox.exec(f"echo -n {text} | wc -c")).stdout.strip() == b"3000000"
    code = "print(len('''" + text + "'''))"
    assert (await sandbox.run_code("python", code, stdin="more")).stdout == b"3000000\n"


async def test_code_runs(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    assert (await sandbox.run_code("python", "print(6 * 7)")).stdout == b"42\n"
    with pytest.raises((InterpreterNotFound, InvalidSpec)):
        await sandbox.run_code("befunge", "")


async def test_a_terminal_has_a_size_and_is_typed_on(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    process = await sandbox.pty(["sh"], rows=30, cols=100)
    said = b""

    async def until(text: bytes) -> None:
        nonlocal said
        async for _, data in process:
            said += data
            if text in said:
                return

    await process.write("stty size\n")
    await until(b"30 100")
    await process.resize(40, 120)
    await process.write("stty size\n")
    await until(b"40 120")
    await process.write("exit 7\n")
    assert (await process.wait()).exit_code == 7


async def test_a_background_process_lives_on_and_is_attached_to_again(
    manager: AsyncSandboxManager, sandbox: AsyncSandbox
) -> None:
    only_on(manager, "local")
    process = await sandbox.start("echo ready; exec sleep 60", background=True, tag="sleeper")
    assert process.number is not None
    await sandbox.close()
    (found,) = [each for each in await sandbox.processes.list() if each.process == process.number]
    assert (found.tag, found.running) == ("sleeper", True)
    again = await sandbox.processes.attach(process.number)
    assert await anext(aiter(again)) == (1, b"ready\n")
    await sandbox.processes.signal(process.number, signal.SIGTERM)
    assert (await again.wait()).signal == signal.SIGTERM


async def test_a_foreground_process_is_signalled_and_dies_with_its_stream(
    manager: AsyncSandboxManager, sandbox: AsyncSandbox
) -> None:
    only_on(manager, "local")
    process = await sandbox.start("trap 'echo caught; exit 4' USR1; echo set; while :; do sleep 0.05; done")
    chunks = aiter(process)
    assert await anext(chunks) == (1, b"set\n")
    await process.signal(signal.SIGUSR1)
    assert (await process.wait()).exit_code == 4
    left = await sandbox.start("echo $$; exec sleep 60")
    _, pid = await anext(aiter(left))
    waiting = asyncio.ensure_future(left.wait())
    await asyncio.sleep(0)
    sandbox.connection.close()
    with pytest.raises(CallInterrupted):
        await waiting
    async with asyncio.timeout(20):
        await sandbox.exec(f"while kill -0 {int(pid)}; do sleep 0.05; done")


async def test_an_environment_is_added_to(sandbox: AsyncSandbox) -> None:
    await sandbox.set_env({"COLOUR": "blue"})
    assert (await sandbox.exec("echo $COLOUR")).stdout == b"blue\n"
    await sandbox.close()
    assert (await sandbox.exec("echo $COLOUR", env={"COLOUR": "red"})).stdout == b"red\n"
    assert (await sandbox.exec("echo $COLOUR")).stdout == b"blue\n"


async def test_errors_of_commands_have_their_classes(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    with pytest.raises(PathNotFound):
        await sandbox.exec(["true"], cwd="/no/such/folder")
    with pytest.raises((UserNotFound, Unsupported)):
        await sandbox.exec(["true"], user="nobody-of-that-name")
    with pytest.raises(InvalidSpec):
        await sandbox.exec([])


# files


async def test_files_go_in_and_come_out(sandbox: AsyncSandbox) -> None:
    data = bytes(range(256)) * 40_000
    assert await sandbox.files.write("a/b.bin", data) == len(data)
    assert await sandbox.files.read("a/b.bin") == data
    assert await sandbox.files.read("a/b.bin", offset=256, length=3) == b"\0\1\2"
    assert [each.name for each in await sandbox.files.list("a")] == ["b.bin"]
    await sandbox.files.append("a/b.bin", b"end")
    assert (await sandbox.files.stat("a/b.bin")).size == len(data) + 3
    await sandbox.files.move("a/b.bin", "c.bin")
    assert not await sandbox.files.exists("a/b.bin")
    await sandbox.files.remove("c.bin")
    with pytest.raises(PathNotFound):
        await sandbox.files.read("c.bin")
    with pytest.raises((PathIsFolder, InvalidSpec)):
        await sandbox.files.read("a")


async def test_folders_go_in_and_come_out(manager: AsyncSandboxManager, sandbox: AsyncSandbox, tmp_path: Path) -> None:
    only_on(manager, "local")
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_bytes(b"x" * 2_000_000)
    (source / "link").symlink_to("deep")
    await sandbox.files.upload(source, "there")
    assert (await sandbox.exec("wc -c < there/deep/er/file")).stdout.strip() == b"2000000"
    await sandbox.files.download("there", tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "er" / "file").stat().st_size == 2_000_000
    assert (tmp_path / "back" / "link").is_symlink()


async def test_changes_of_files_are_told(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    async with await sandbox.files.watch(".") as events:
        await sandbox.exec("touch seen")
        async for event in events:
            if event.path.endswith("seen"):
                break


async def test_a_kept_watch_tells_what_happened_meanwhile(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    watch = await sandbox.files.keep_watch(".")
    await sandbox.files.write("new.txt", b"x")
    assert "new.txt" in {event.path.rpartition("/")[2] for event in await watch.events()}
    await watch.end()


async def test_names_that_are_no_text_survive(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    await sandbox.files.write(b"\xff\xfe", b"odd")
    assert await sandbox.files.read(b"\xff\xfe") == b"odd"


# ports


async def test_a_port_is_reached(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    only_on(manager, "local")
    await sandbox.files.write("page.txt", "from within")
    server = await sandbox.start(["python3", "-u", "-m", "http.server", "8123", "--bind", "127.0.0.1"])
    assert b"8123" in (await anext(aiter(server)))[1]
    request = b"GET /page.txt HTTP/1.0\r\n\r\n"
    async with await sandbox.connect(8123) as tunnel:
        await tunnel.write(request)
        answer = b""
        while data := await tunnel.read():
            answer += data
    assert answer.endswith(b"from within")
    host, _, port = (await sandbox.expose(8123)).partition(":")
    async with sandbox.forward(8123) as forward:
        for address in ((host, int(port)), forward.address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request)
            assert (await reader.read()).endswith(b"from within")
            writer.close()
            await writer.wait_closed()
    with pytest.raises(NotFound):
        async with await sandbox.connect(9) as tunnel:
            await tunnel.read()


# lives


async def test_sandboxes_are_found_by_what_they_are(manager: AsyncSandboxManager) -> None:
    async with await manager.create(name="one", labels={"team": "a"}) as one, await manager.create() as other:
        assert (await manager.get("one")).id == one.id
        assert (await manager.get(one.id[:12])).id == one.id
        assert {each.id for each in await manager.list()} == {one.id, other.id}
        assert [each.id for each in await manager.list(Filter(labels={"team": "a"}))] == [one.id]
        assert await manager.list(Filter(states=frozenset({State.STOPPED}))) == []
        assert await manager.count() == 2
        assert await manager.exists("one")
        assert await manager.is_healthy("one")
        with pytest.raises(Conflict):
            await manager.create(name="one")
    assert not await manager.exists("one")
    assert [each.cause for each in await manager.list(Filter(include_ended=True))] == [Cause.USER] * 2
    for reference in ("one", "00000000-0000-4000-8000-000000000000", "..", "a/b"):
        with pytest.raises(NotFound):
            await manager.get(reference)


async def test_the_same_key_gives_the_same_sandbox(manager: AsyncSandboxManager) -> None:
    async with await manager.create(key="once") as made:
        assert (await manager.create(key="once")).id == made.id


async def test_what_is_asked_for_is_what_there_is(manager: AsyncSandboxManager) -> None:
    spec = Spec.of(provider=manager.config.provider, memory="100M", lifetime="1h", labels={"a": "b"}, env={"A": "1"})
    async with await manager.create(spec) as made:
        assert (made.spec.memory, made.spec.lifetime_s, made.spec.labels) == (100 << 20, 3600.0, {"a": "b"})
        assert (await made.exec("echo $A")).stdout == b"1\n"
        record = await manager.record(made.id)
        assert record.ends_at is not None
        assert 3500 < record.ends_at - record.created_at < 3700
        await made.set_lifetime("2h")
        assert (await manager.record(made.id)).spec.lifetime_s == 7200
        assert any("lifetime" in each for each in (await manager.explain(made.id)).why)


async def test_what_is_wrong_with_a_spec_is_told(manager: AsyncSandboxManager) -> None:
    with pytest.raises(InvalidSpec) as told:
        await manager.create(memory="much")
    assert told.value.field == "memory"
    if manager.config.provider == "local":
        with pytest.raises(Unsupported):
            await manager.create(image="debian")


async def test_what_happens_is_told_in_order(manager: AsyncSandboxManager) -> None:
    async with await manager.create() as made:
        pass
    kinds = [each.kind async for each in manager.events(sandbox=made.id)]
    assert kinds[0] == "created"
    assert kinds[-1] == "destroyed"
    last = [each.seq async for each in manager.events()][-1]
    seen: list[str] = []

    async def follow() -> None:
        async for event in manager.events(after=last, follow=True):
            seen.append(event.kind)
            if event.kind == "destroyed":
                return

    following = asyncio.create_task(follow())
    async with await manager.create():
        pass
    async with asyncio.timeout(20):
        await following
    assert seen[0] == "created"


async def test_the_end_of_a_sandbox_is_waited_for(manager: AsyncSandboxManager) -> None:
    made = await manager.create()
    waiting = asyncio.create_task(manager.wait(made.id))
    await manager.destroy(made.id)
    assert (await waiting).cause is Cause.USER
    with pytest.raises(NotFound):
        await manager.wait(made.id, {State.READY})
    with pytest.raises((SandboxGone, NotFound)):
        await (await manager.get(made.id)).exec(["true"])


async def test_a_handle_of_one_that_has_ended_says_so(manager: AsyncSandboxManager) -> None:
    made = await manager.create()
    await made.exec(["true"])
    await manager.destroy(made.id)
    with pytest.raises(NotFound):
        await made.exec(["true"])
    await manager.destroy(made.id)


async def test_all_that_fit_are_ended_at_once(manager: AsyncSandboxManager) -> None:
    made = [await manager.create(labels={"n": str(n)}) for n in range(3)]
    outcomes = await manager.destroy_all()
    assert {each.id for each in outcomes} == {each.id for each in made}
    assert all(each.error is None for each in outcomes)
    assert await manager.prune(older_s=0) == 3


async def test_a_sandbox_stands_still_and_goes_on(manager: AsyncSandboxManager) -> None:
    only_on(manager, "mock")
    async with await manager.create() as made:
        await manager.pause(made.id)
        assert (await manager.record(made.id)).state is State.PAUSED
        await manager.resume(made.id)
        assert (await made.exec(["echo", "on"])).stdout == b"on\n"
        await manager.stop(made.id)
        await manager.start(made.id, {"A": "1"})
        assert (await made.exec("echo $A")).stdout == b"1\n"
        assert (await made.metrics()).processes >= 0
        await manager.snapshot(made.id, "kept")
        assert [each.name for each in await manager.snapshots()] == ["kept"]
        async with await manager.fork(made.id, name="twin") as twin:
            assert twin.spec.name == "twin"
        twins = await manager.fork_many(made.id, 2)
        assert len({made.id, *(each.id for each in twins)}) == 3
        for each in twins:
            await each.destroy()
        for refused in (
            manager.pause(made.id, save=True),
            manager.snapshot(made.id, "warm", with_memory=True),
            manager.fork(made.id, with_memory=True),
            manager.fork_many(made.id, 2, with_memory=True),
        ):
            with pytest.raises(Unsupported, match="memory"):
                await refused
        assert [each.id for each in await manager.list()] == [made.id]
        await manager.restore(made.id, "kept")
    await manager.remove_snapshot("kept")
    with pytest.raises(NotFound):
        await manager.remove_snapshot("kept")


async def test_lines_of_the_ledger_tell_what_was_done(manager: AsyncSandboxManager) -> None:
    only_on(manager, "local")
    async with await manager.create(name="told") as made:
        await made.exec(["echo", "a command"], env={"SECRET": "x"})
        await made.run_code("python", "print(1)")
        process = await made.pty(["true"])
        await process.wait()
        await made.files.write("in.txt", b"12345")
        await made.files.read("in.txt")
        await made.set_env({"B": "2"})
        lines = [line async for line in manager.ledger.show()]
        mine = [line for line in lines if line.sandbox == made.id]
        execs = [line.facts for line in mine if line.kind == "exec"]
        assert [each["how"] for each in execs] == ["exec", "code", "terminal"]
        assert execs[0]["env"] == ["SECRET"]
        assert "command" in str(execs[0])
        files = [line.facts for line in mine if line.kind == "file"]
        assert [(each["way"], each["path"], each["bytes"]) for each in files] == [
            ("in", "in.txt", 5),
            ("out", "in.txt", 5),
        ]
        assert [line.facts["names"] for line in mine if line.kind == "env"] == [["B"]]
        ends = 0
        async with asyncio.timeout(20):
            async for line in manager.ledger.follow(after=0):
                ends += line.kind == "exit"
                if ends == 3:
                    break
        assert (await manager.ledger.verify()).is_whole


# interpreters


async def test_an_interpreter_remembers(manager: AsyncSandboxManager, sandbox: AsyncSandbox) -> None:
    if manager.config.provider != "local":
        with pytest.raises(Unsupported):
            await sandbox.interpreter()
        return
    python = await sandbox.interpreter()
    assert (await python.run("x = 4; print('hi')")).stdout == "hi\n"
    again = await (await manager.get(sandbox.id)).interpreter()
    assert (await again.run("x")).text == "4"
    slow = await again.run("while True: pass", timeout_s=0.3)
    assert slow.timed_out
    running = asyncio.create_task(python.run("import time; time.sleep(600)"))
    await asyncio.sleep(0.3)
    await again.interrupt()
    assert (await running).interrupted
    running = asyncio.create_task(python.run("time.sleep(600)"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await again.run("x", timeout_s=20)).text == "4"
    await python.restart()
    assert (await again.run("'x' in dir()")).text == "False"
    assert [each.name for each in await sandbox.interpreters.list()] == ["python"]
    await python.close()
    assert await sandbox.interpreters.list() == []
