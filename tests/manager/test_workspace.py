"""The work a sandbox begins with: real git repositories, on the mock, and nothing left when it cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from loopback import served

from skerry.errors import CreateFailed, InvalidSpec, Unsupported
from skerry.host import locks
from skerry.manager import git
from skerry.manager.manager import AsyncSandboxManager
from skerry.manager.workspace import PLACE
from skerry.model.records import Cause
from skerry.model.spec import Spec, Workspace
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

from .world import ENDED, until

NAME = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


def git_init(path: Path) -> None:
    subprocess.run(["git", "init", "-q", "-b", "main", str(path)], check=True)


class Repository:
    """Two commits, two branches and a tag."""

    def __init__(self, path: Path) -> None:
        self.path = path
        git_init(path)
        self.first = self.commit("first")
        self.git("tag", "v1")
        self.git("tag", "-a", "v1-told", "-m", "told")
        self.git("branch", "old/side")
        self.second = self.commit("second")

    def git(self, *arguments: str) -> str:
        argv = ["git", "-C", str(self.path), *NAME, *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, text: str) -> str:
        (self.path / "note").write_text(text)
        if not (self.path / "link").is_symlink():
            (self.path / "link").symlink_to("note")
        self.git("add", ".")
        self.git("commit", "-q", "-m", text)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture(autouse=True)
def clones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where clones are made on the way, so that we see whether any is left."""
    folder = tmp_path / "clones"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


async def nothing_is_left(manager: AsyncSandboxManager, mock: Mock, clones: Path) -> None:
    assert not await mock.discover()
    assert not os.listdir(clones)
    assert {(record.state, record.cause) for record in await manager.list(ENDED)} <= {
        (State.DESTROYED, Cause.CREATION_FAILED)
    }


# cloned


async def test_a_repository_is_cloned_into_the_box_and_its_commit_is_written_down(
    manager: AsyncSandboxManager, repository: Repository, clones: Path
) -> None:
    sandbox = await manager.create(workspace=Workspace(source=str(repository.path)))
    assert (await sandbox.exec("pwd")).stdout == f"{PLACE}\n".encode()
    assert await sandbox.files.read("~/workspace/note") == b"second"
    assert (await sandbox.files.stat("~/workspace/link", follow=False)).target == "note"
    assert await sandbox.files.read("~/workspace/.git/HEAD") == b"ref: refs/heads/main\n"
    assert not await sandbox.files.exists("~/workspace/.git/hooks")
    for spec in (sandbox.spec, (await manager.record(sandbox.id)).spec):
        assert spec.workspace == Workspace(source=str(repository.path), commit=repository.second)
    assert not os.listdir(clones)


@pytest.mark.parametrize(
    ("commit", "head"),
    [
        ("main", "ref: refs/heads/main\n"),
        ("HEAD", "ref: refs/heads/main\n"),
        ("old/side", "ref: refs/heads/old/side\n"),
        ("v1", None),
        ("v1-told", None),
    ],
)
async def test_a_branch_is_checked_out_as_one_and_a_tag_by_its_commit(
    manager: AsyncSandboxManager, repository: Repository, commit: str, head: str | None
) -> None:
    source = f"file://{repository.path}"
    sandbox = await manager.create(workspace=Workspace(source=source, commit=commit))
    is_last = commit in ("main", "HEAD")
    hash = repository.second if is_last else repository.first
    assert sandbox.spec.workspace == Workspace(source=source, commit=hash)
    assert await sandbox.files.read_text("~/workspace/.git/HEAD") == (head or f"{hash}\n")
    assert await sandbox.files.read("~/workspace/note") == (b"second" if is_last else b"first")


async def test_a_commit_is_found_by_its_hash_or_the_beginning_of_it(
    manager: AsyncSandboxManager, repository: Repository
) -> None:
    for commit in (repository.first, repository.first[:8]):
        sandbox = await manager.create(workspace=Workspace(source=str(repository.path), commit=commit))
        assert sandbox.spec.workspace is not None
        assert sandbox.spec.workspace.commit == repository.first
        assert await sandbox.files.read("~/workspace/note") == b"first"


async def test_a_branch_that_is_called_like_a_commit_does_not_mislead(
    manager: AsyncSandboxManager, repository: Repository
) -> None:
    (repository.path / ".git/refs/heads" / repository.first).write_text(repository.second + "\n")
    sandbox = await manager.create(workspace=Workspace(source=str(repository.path), commit=repository.first))
    assert await sandbox.files.read("~/workspace/note") == b"first"


async def test_a_folder_that_was_asked_for_stays_the_one_to_start_in(
    manager: AsyncSandboxManager, repository: Repository
) -> None:
    sandbox = await manager.create(workspace=Workspace(source=str(repository.path)), cwd="/tmp")
    assert (await sandbox.exec("pwd")).stdout == b"/tmp\n"


async def test_a_sandbox_without_a_registry_has_its_workspace_too(mock: Mock, repository: Repository) -> None:
    sandbox = await AsyncSandbox.create(
        Spec.of(provider="mock", workspace=Workspace(source=str(repository.path))), provider=mock
    )
    assert await sandbox.files.read("~/workspace/note") == b"second"
    assert sandbox.spec.workspace == Workspace(source=str(repository.path), commit=repository.second)
    await sandbox.destroy()


async def test_the_same_create_by_key_clones_once(manager: AsyncSandboxManager, repository: Repository) -> None:
    asked = Workspace(source=str(repository.path))
    first = await manager.create(workspace=asked, key="once")
    repository.commit("third")
    again = await manager.create(workspace=asked, key="once")
    assert again.id == first.id
    assert again.spec.workspace == Workspace(source=str(repository.path), commit=repository.second)


async def test_nothing_of_this_machine_s_settings_and_hooks_is_used(
    manager: AsyncSandboxManager, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, hooks = tmp_path / "ran", tmp_path / "template/hooks"
    hooks.mkdir(parents=True)
    hook = hooks / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f"[init]\ntemplateDir = {hooks.parent}\n[core]\nhooksPath = {hooks}\nfsmonitor = {hook}\n"
        f'[filter "own"]\nsmudge = {hook}\n[url "/nowhere"]\ninsteadOf = {repository.path}\n'
    )
    (repository.path / ".gitattributes").write_text("* filter=own\n")
    repository.commit("filtered")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks.parent))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    sandbox = await manager.create(workspace=Workspace(source=str(repository.path)))
    assert await sandbox.files.read("~/workspace/note") == b"filtered"
    assert not ran.exists()


async def test_submodules_are_not_followed(
    manager: AsyncSandboxManager, repository: Repository, tmp_path: Path
) -> None:
    other = Repository(tmp_path / "other")
    repository.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other.path), "inner")
    repository.git("commit", "-q", "-m", "with another")
    sandbox = await manager.create(workspace=Workspace(source=str(repository.path)))
    assert await sandbox.files.list("~/workspace/inner") == []


# refused, failed, given up


@pytest.mark.parametrize(
    "source",
    ["ext::sh -c id", "fd::17", "ftp://host/x", "a/relative/path", "helper://x", "host:path", "git@host::sh"],
)
async def test_a_source_that_git_would_not_just_clone_is_refused(
    manager: AsyncSandboxManager, mock: Mock, source: str
) -> None:
    with pytest.raises(InvalidSpec, match="workspace"):
        await manager.create(workspace=Workspace(source=source))
    assert not await manager.list(ENDED)


@pytest.mark.parametrize("source", ["ssh://git@host/x.git", "git@host:x.git", "https://host/x", "git://host/x", "/x"])
def test_these_are_sources(source: str) -> None:
    git.check_source(source)


@pytest.mark.parametrize(
    "source", ["https://me:hunter2@host/x", "https://hunter2@host/x", "ssh://me:hunter2@host/x", "HTTP://hunter2@host"]
)
@pytest.mark.parametrize("with_path", [True, False])
async def test_a_password_in_a_source_is_refused_and_told_to_nobody(
    manager: AsyncSandboxManager, tmp_path: Path, source: str, with_path: bool
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        await manager.create(workspace=Workspace(source=source, path=str(tmp_path) if with_path else None))
    assert "hunter2" not in str(caught.value)
    assert not any(b"hunter2" in file.read_bytes() for file in tmp_path.glob("registry.db*"))


@pytest.mark.parametrize("commit", ["main~1", "HEAD^", "a..b", "HEAD@{1}", ":/text", "two words"])
async def test_a_commit_that_is_a_question_to_git_is_refused(
    manager: AsyncSandboxManager, repository: Repository, commit: str
) -> None:
    with pytest.raises(InvalidSpec, match="branch, tag or hash"):
        await manager.create(workspace=Workspace(source=str(repository.path), commit=commit))


@pytest.mark.parametrize("commit", ["nope", "abcd1234", "0" * 40])
async def test_an_unknown_commit_leaves_nothing(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, repository: Repository, commit: str
) -> None:
    with pytest.raises(CreateFailed, match="give a branch, a tag"):
        await manager.create(workspace=Workspace(source=str(repository.path), commit=commit))
    await nothing_is_left(manager, mock, clones)


async def test_what_is_no_repository_leaves_nothing_and_git_says_why(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, tmp_path: Path
) -> None:
    with pytest.raises(CreateFailed, match="does not exist"):
        await manager.create(workspace=Workspace(source=str(tmp_path / "missing")))
    await nothing_is_left(manager, mock, clones)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_repository_of_another_user_is_not_run_through_git(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, repository: Repository
) -> None:
    for path in (repository.path, repository.path / ".git"):
        os.chown(path, 12345, 12345)
    with pytest.raises(CreateFailed, match="belongs to another user"):
        await manager.create(workspace=Workspace(source=str(repository.path)))
    await nothing_is_left(manager, mock, clones)
    asked = Workspace(path=str(repository.path), copy=True, source=str(repository.path))
    assert (await manager.create(workspace=asked)).spec.workspace == asked


async def test_an_empty_repository_has_nothing_to_begin_with(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, tmp_path: Path
) -> None:
    git_init(tmp_path / "empty")
    with pytest.raises(CreateFailed, match="no commit yet"):
        await manager.create(workspace=Workspace(source=str(tmp_path / "empty")))
    await nothing_is_left(manager, mock, clones)


async def test_a_host_without_git_says_so(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(clones))
    with pytest.raises(CreateFailed, match="git is not installed"):
        await manager.create(workspace=Workspace(source=str(repository.path)))
    await nothing_is_left(manager, mock, clones)


async def test_a_server_that_wants_a_password_gets_none_and_nobody_is_asked(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async with served(refuse) as port:
        with pytest.raises(CreateFailed, match="asks for credentials"):
            await manager.create(workspace=Workspace(source=f"http://127.0.0.1:{port}/x.git"))
    await nothing_is_left(manager, mock, clones)


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """The URL of a git server that takes every connection and never says a word."""

    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(serve) as port:
        yield f"git://127.0.0.1:{port}/x"


async def test_a_server_that_says_nothing_is_not_waited_for_for_ever(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "DEADLINE_S", 0.5)
    async with silent_server() as url:
        with pytest.raises(CreateFailed, match=r"within 0\.5 s"):
            await manager.create(workspace=Workspace(source=url))
    await nothing_is_left(manager, mock, clones)


async def test_what_a_program_that_was_killed_has_cloned_is_removed_by_the_next(
    manager: AsyncSandboxManager, repository: Repository, clones: Path
) -> None:
    for name in ("left", "used", "new"):
        (clones / f"skerry-workspace-{name}" / ".git").mkdir(parents=True)
    for name in ("left", "used"):
        os.utime(clones / f"skerry-workspace-{name}", (0, 0))
    with locks.holding(clones / "skerry-workspace-used"):
        await manager.create(workspace=Workspace(source=str(repository.path)))
    assert {path.name for path in clones.iterdir()} == {"skerry-workspace-used", "skerry-workspace-new"}


async def test_a_host_without_room_for_a_clone_says_so(
    manager: AsyncSandboxManager, repository: Repository, clones: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(clones / "none"))
    with pytest.raises(CreateFailed, match="no room"):
        await manager.create(workspace=Workspace(source=str(repository.path)))


async def test_a_clone_that_nobody_waits_for_ends(manager: AsyncSandboxManager, mock: Mock, clones: Path) -> None:
    async with silent_server() as url:
        creating = asyncio.create_task(manager.create(workspace=Workspace(source=url)))

        async def has_begun() -> bool:
            return any((entry / ".git").exists() for entry in clones.iterdir())

        await until(has_begun)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    await nothing_is_left(manager, mock, clones)


async def test_a_copy_that_nobody_waits_for_leaves_nothing(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hang(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("skerry.agent.transfers.upload_tree", hang)
    creating = asyncio.create_task(manager.create(workspace=Workspace(source=str(repository.path))))
    await begun.wait()
    assert await mock.discover()
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await nothing_is_left(manager, mock, clones)


async def test_a_source_that_is_larger_than_the_box_is_not_cloned(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, repository: Repository
) -> None:
    (repository.path / "much").write_bytes(bytes(8 << 20))  # of which little is on its way
    repository.commit("much")
    with pytest.raises(CreateFailed, match=r"larger than the 4M that the box holds; ask for more disk"):
        await manager.create(workspace=Workspace(source=str(repository.path)), disk="4M")
    await nothing_is_left(manager, mock, clones)
    await manager.create(workspace=Workspace(source=str(repository.path)), disk="32M")


async def test_a_clone_is_given_up_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, has_ended = tmp_path / "clone", asyncio.Event()
    folder.mkdir()

    async def endless(*_: object) -> str:
        (folder / "pack").write_bytes(bytes(2 << 20))
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()
        raise AssertionError

    monkeypatch.setattr(git, "_clone", endless)
    with pytest.raises(CreateFailed, match="larger than the 1M"):
        await git.clone("https://example.org/bomb.git", None, folder, most=1 << 20)
    assert has_ended.is_set()


async def test_many_empty_files_are_not_nothing(repository: Repository, tmp_path: Path) -> None:
    for number in range(1100):
        (repository.path / f"empty-{number}").touch()
    repository.commit("many")
    with pytest.raises(CreateFailed, match="larger than the 1M"):
        await git.clone(str(repository.path), None, tmp_path / "clone", most=1 << 20)


async def test_work_that_does_not_fit_leaves_nothing(
    manager: AsyncSandboxManager, mock: Mock, clones: Path, tmp_path: Path
) -> None:
    (tmp_path / "much").mkdir()
    (tmp_path / "much/file").write_bytes(os.urandom(3 << 20))
    with pytest.raises(CreateFailed, match="could not be copied into the box"):
        await manager.create(workspace=Workspace(path=str(tmp_path / "much"), copy=True), disk="1M")
    await nothing_is_left(manager, mock, clones)


# a folder of the host


async def test_a_copied_folder_is_the_sandbox_s_own(
    manager: AsyncSandboxManager, repository: Repository, tmp_path: Path
) -> None:
    os.mkfifo(repository.path / "pipe")
    (repository.path / "note").chmod(0o755)
    (repository.path / "outside").symlink_to("/etc/passwd")
    sandbox = await manager.create(workspace=Workspace(path=str(repository.path), copy=True))
    await sandbox.exec("echo changed > note")
    assert (repository.path / "note").read_text() == "second"
    assert (await sandbox.files.stat("~/workspace/note")).mode & 0o777 == 0o755
    assert (await sandbox.files.stat("~/workspace/outside", follow=False)).target == "/etc/passwd"
    assert await sandbox.files.exists("~/workspace/.git/HEAD")
    assert not await sandbox.files.exists("~/workspace/pipe")
    assert sandbox.spec.workspace == Workspace(path=str(repository.path), copy=True)


async def test_where_a_folder_came_from_is_written_down_with_the_commit_it_is_at(
    manager: AsyncSandboxManager, repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    for path, commit in ((repository.path, repository.second), (tmp_path / "plain", None)):
        asked = Workspace(path=str(path), copy=True, source="https://example.org/x.git")
        sandbox = await manager.create(workspace=asked)
        assert sandbox.spec.workspace is not None
        assert sandbox.spec.workspace.commit == commit
    asked = Workspace(path=str(repository.path), copy=True, source="https://example.org/x.git", commit="v1")
    assert (await manager.create(workspace=asked)).spec.workspace == asked


async def test_a_path_that_is_no_folder_is_refused(manager: AsyncSandboxManager, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(InvalidSpec, match="no folder"):
            await manager.create(workspace=Workspace(path=str(tmp_path / name)))
    assert not await manager.list(ENDED)


async def test_a_provider_without_mounts_refuses_to_show_a_folder(manager: AsyncSandboxManager, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="mounts"):
        await manager.create(workspace=Workspace(path=str(tmp_path)))
    assert not await manager.list(ENDED)


# with real boxes


@pytest.mark.usefixtures("own_registry", "folder")
async def test_a_real_box_shows_copies_and_clones(repository: Repository, tmp_path: Path, folder: Path) -> None:
    shown = folder / "shown"
    shown.mkdir(mode=0o777)
    shown.chmod(0o777)
    (shown / "in").write_text("from the host")
    async with AsyncSandboxManager() as manager:
        try:
            sandbox = await manager.create(workspace=Workspace(path=str(shown)))
            assert (await sandbox.exec("pwd; cat in; echo -n back > out")).stdout == f"{PLACE}\nfrom the host".encode()
            assert (shown / "out").read_text() == "back"
            sandbox = await manager.create(workspace=Workspace(path=str(shown), copy=True))
            assert (await sandbox.exec("cat out; rm out")).stdout == b"back"
            assert (shown / "out").exists()
            sandbox = await manager.create(workspace=Workspace(source=str(repository.path), commit="old/side"))
            assert (await sandbox.exec("pwd; cat link; stat -c %U note")).stdout == f"{PLACE}\nfirstuser\n".encode()
        finally:
            await manager.destroy_all()
