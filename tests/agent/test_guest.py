"""What the agent does, on every Python that this machine has: it must run in any box."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.errors import (
    AgentError,
    InterpreterNotFound,
    InvalidSpec,
    NotFound,
    PathInvalid,
    PathNotFound,
    SkerryError,
)
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest, interpreters

PYTHONS = [pytest.param(path, id=version) for version, path in interpreters().items()]
NONE = pytest.param("", marks=pytest.mark.skip(reason="no Python >= 3.8 was found"))


@pytest.fixture(params=PYTHONS or [NONE])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    with Guest(request.param) as running:
        yield running


@pytest.fixture
async def sandbox(guest: Guest) -> AsyncIterator[AsyncSandbox]:
    made = guest.sandbox()
    yield made
    await made.close()


async def test_commands_run_exactly_as_asked(sandbox: AsyncSandbox, guest: Guest) -> None:
    result = await sandbox.exec(
        ["sh", "-c", 'echo "$1" "$X"; pwd; echo err >&2; exit 3', "name", "a b"], env={"X": "é"}
    )
    assert (result.text, result.error_text, result.exit_code) == (f"a b é\n{guest.home}\n", "err\n", 3)
    assert (await sandbox.exec("kill -9 $$")).signal == 9
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126
    assert (await sandbox.exec(["cat"], stdin=b"x" * 3_000_000)).stdout == b"x" * 3_000_000
    with pytest.raises(PathNotFound, match="cwd"):
        await sandbox.exec(["true"], cwd="/no/such/folder")


async def test_a_timeout_gives_what_was_said_so_far(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("echo begun; sleep 60 & sleep 60", timeout_s=0.3)
    assert (result.timed_out, result.exit_code, result.text) == (True, 124, "begun\n")


async def test_code_runs_in_its_language(sandbox: AsyncSandbox, guest: Guest) -> None:
    result = await sandbox.run_code("python", "import sys; print(6 * 7, len(sys.argv))")
    assert result.text == "42 1\n", result.error_text
    assert (await sandbox.run_code("sh", "echo hi")).text == "hi\n"
    assert os.listdir(guest.home) == []
    with pytest.raises(InterpreterNotFound, match="lua"):
        await sandbox.run_code("lua", "", env={"PATH": "/nowhere"})
    with pytest.raises(InvalidSpec, match="klingon"):
        await sandbox.run_code("klingon", "")


async def test_background_processes_can_be_attached_to_again(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start("echo one; read x; echo $x; exit 5", background=True, stdin=True, tag="t")
    (info,) = await sandbox.processes.list()
    assert (info.tag, info.running, info.process) == ("t", True, process.number)
    await process.write(b"two\n")
    seen = b"".join([data async for _, data in process])
    assert seen == b"one\ntwo\n"
    assert (await process.wait()).exit_code == 5
    again = await sandbox.processes.attach(info.process)
    assert b"".join([data async for _, data in again]) == b"one\ntwo\n"
    with pytest.raises(NotFound):
        await (await sandbox.processes.attach(999)).wait()


async def test_a_terminal_is_one(sandbox: AsyncSandbox) -> None:
    process = await sandbox.pty("tty; stty size; read x; stty size; cat", rows=30, cols=100)
    seen = b""
    async for _, data in process:
        seen += data
        if seen.endswith(b"30 100\r\n"):
            await process.resize(40, 120)
            await process.write(b"go\n")
        if seen.endswith(b"40 120\r\n"):
            await process.close_stdin()
    assert b"/dev/pts/" in seen
    assert (await process.wait()).ok


async def test_signals_reach_a_process(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start("trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.01; done")
    seen = b""
    async for _, data in process:
        seen += data
        if seen.endswith(b"ready\n"):
            await process.signal(signal.SIGUSR1)
    assert seen.endswith(b"caught\n")
    assert (await process.wait()).exit_code == 9


async def test_files_of_any_name_and_content(sandbox: AsyncSandbox, guest: Guest) -> None:
    for name in ("plain", "sub/ü ñ", b"sub/\xff\xfe", "with\nnewline", "-rf", "~x"):
        content = os.urandom(300_000)
        path = os.path.join(os.fsencode(guest.home), os.fsencode(name))
        assert await sandbox.files.write(path, content) == len(content)
        assert await sandbox.files.read(path) == content
        assert await sandbox.files.read(path, offset=100, length=50) == content[100:150]
        assert (await sandbox.files.stat(path)).name == os.fsdecode(os.path.basename(path))
    listed = await sandbox.files.list(depth=2)
    assert {info.name for info in listed} == {"plain", "sub", "ü ñ", "\udcff\udcfe", "with\nnewline", "-rf", "~x"}
    await sandbox.files.append("plain", b"end")
    await sandbox.files.write_at("plain", 0, b"begin")
    content = (guest.home / "plain").read_bytes()
    assert content.startswith(b"begin")
    assert content.endswith(b"end")
    await sandbox.files.move("plain", "moved")
    await sandbox.files.symlink("link", "moved")
    assert (await sandbox.files.stat("link", follow=False)).target == "moved"
    await sandbox.files.chmod("moved", 0o600)
    assert (await sandbox.files.stat("moved")).mode == 0o600
    for name in ("moved", "sub"):
        await sandbox.files.remove(name, recursive=True)
    assert not await sandbox.files.exists("moved")


async def test_file_errors_say_what_is_wrong(sandbox: AsyncSandbox, guest: Guest) -> None:
    os.mkfifo(guest.home / "pipe")
    with pytest.raises(PathNotFound):
        await sandbox.files.read("missing")
    for path in ("/", "pipe", "/dev/zero"):
        with pytest.raises(PathInvalid):
            await sandbox.files.read(path)
    with pytest.raises(SkerryError):
        await sandbox.files.write("pipe", b"x")
    with pytest.raises(PathInvalid):
        await sandbox.files.read("x" * 300)
    assert (await sandbox.files.read("/proc/self/status")).startswith(b"Name:")


async def test_a_tree_goes_in_and_out_whole(sandbox: AsyncSandbox, guest: Guest, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty folder").mkdir(parents=True)
    (source / "deep").joinpath(*"abcdef").mkdir(parents=True)
    (source / "deep/a/b/file").write_bytes(os.urandom(2_000_000))
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "empty").touch()
    (source / "link").symlink_to("run")
    (source / "dangling").symlink_to("/no/where")
    Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe bytes")).write_text("odd")
    (source / ("n" * 255)).write_text("long")
    await sandbox.files.upload(source, "tree")
    await sandbox.files.download("tree", tmp_path / "back")
    for folder in (guest.home / "tree", tmp_path / "back"):
        assert described(folder) == described(source)


def described(folder: Path) -> dict[bytes, tuple[int, object]]:
    found: dict[bytes, tuple[int, object]] = {}
    for path in folder.rglob("*"):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[os.fsencode(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return found


async def test_a_watch_tells_what_happens(sandbox: AsyncSandbox, guest: Guest) -> None:
    (guest.home / "sub").mkdir()
    seen: list[tuple[str, str]] = []
    async with asyncio.timeout(20), await sandbox.files.watch(".") as events:
        (guest.home / "sub/new").write_text("x")
        (guest.home / "sub/new").rename(guest.home / "sub/moved")
        (guest.home / "made/below").mkdir(parents=True)
        (guest.home / "made/below/last").touch()
        async for event in events:
            seen.append((event.event, os.path.relpath(event.path, guest.home)))
            if event.path.endswith("last"):
                break
    assert {("create", "sub/new"), ("modify", "sub/new"), ("delete", "sub/new"), ("move", "sub/moved")} <= set(seen)
    assert {("create", "made"), ("create", "made/below")} <= set(seen)
    with pytest.raises(PathNotFound):
        await sandbox.files.watch("missing")


async def test_the_agent_measures_itself(sandbox: AsyncSandbox) -> None:
    metrics = await sandbox.metrics()
    assert metrics.processes > 0
    assert metrics.memory_bytes > 0
    assert metrics.disk.total >= metrics.disk.used > 0


async def test_an_unknown_method_is_an_error_and_the_stream_lives(sandbox: AsyncSandbox) -> None:
    with pytest.raises(AgentError, match="no method"):
        await sandbox.call("make_coffee")
    await sandbox.ping()
