"""Files: any name, any content, any size."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest

from skerry.errors import (
    NotFound,
    PathDenied,
    PathExists,
    PathIsFolder,
    PathNotEmpty,
    PathNotFile,
    PathNotFolder,
    PathNotFound,
    PathTooLong,
    TooLarge,
)
from skerry.model.results import FileType
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite, eventually

BIG = 50 << 20
"""Sandboxes have broken at 28 MiB: go well beyond."""


class FileTests(Suite):
    async def test_a_file_reads_back_as_it_was_written(self, sandbox: AsyncSandbox) -> None:
        data = bytes(range(256)) * 1000
        assert await sandbox.files.write("some/new/folder/file", data) == len(data)
        assert await sandbox.files.read("some/new/folder/file") == data

    async def test_an_empty_file_is_a_file(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("empty", b"")
        assert await sandbox.files.read("empty") == b""

    async def test_a_large_file_goes_in_and_out(self, sandbox: AsyncSandbox) -> None:
        block = os.urandom(1 << 20)
        data = block * (BIG >> 20)
        await sandbox.files.write("large", data)
        assert (await sandbox.files.stat("large")).size == BIG
        assert await sandbox.files.read("large") == data

    async def test_a_large_file_is_read_piece_by_piece(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("large", io.BytesIO(bytes(5_000_000)))
        sizes = [len(piece) async for piece in sandbox.files.iter_chunks("large")]
        assert sum(sizes) == 5_000_000
        assert max(sizes) <= 1 << 20

    async def test_ranges_are_exact(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("ten", b"0123456789")
        assert await sandbox.files.read("ten", offset=3, length=4) == b"3456"
        assert await sandbox.files.read("ten", offset=8, length=100) == b"89"
        assert await sandbox.files.read("ten", offset=100) == b""

    async def test_append_and_write_in_the_middle(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("log", "one")
        assert await sandbox.files.append("log", "-two") == 7
        assert await sandbox.files.write_at("log", 3, "+") == 7
        assert await sandbox.files.read_text("log") == "one+two"

    async def test_an_atomic_write_keeps_the_mode(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("script", "a", mode=0o755)
        await sandbox.files.write("script", "b")
        assert (await sandbox.files.stat("script")).mode == 0o755

    async def test_a_cancelled_write_leaves_the_old_file(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("kept", "old")

        class Endless(io.RawIOBase):
            def read(self, size: int = -1) -> bytes:
                return b"x" * 1000

        writing = asyncio.create_task(sandbox.files.write("kept", Endless()))

        async def begun() -> bool:
            return len(await sandbox.files.list()) == 2

        await eventually(begun, "the write has begun beside the old file")
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await sandbox.files.read_text("kept") == "old"
        assert [each.name for each in await sandbox.files.list()] == ["kept"]

    async def test_stat_tells_what_a_file_is(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("file", b"12345", mode=0o640)
        await sandbox.files.make_dir("folder")
        await sandbox.files.symlink("link", "file")
        file, folder = await sandbox.files.stat("file"), await sandbox.files.stat("folder")
        link = await sandbox.files.stat("link", follow=False)
        assert (file.type, file.size, file.mode) == (FileType.FILE, 5, 0o640)
        assert folder.is_dir
        assert (link.type, link.target) == (FileType.SYMLINK, "file")
        assert (await sandbox.files.stat("link")).size == 5

    async def test_a_list_goes_as_deep_as_asked(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("tree/a/b/c", "x")
        await sandbox.files.write("tree/z", "x")
        assert [each.name for each in await sandbox.files.list("tree")] == ["a", "z"]
        assert [each.name for each in await sandbox.files.list("tree", depth=9)] == ["a", "z", "b", "c"]

    @pytest.mark.needs_real_unix
    async def test_a_list_of_thousands_is_whole(self, sandbox: AsyncSandbox) -> None:
        await sandbox.exec("mkdir many; cd many; touch $(seq 3000)")
        names = {each.name for each in await sandbox.files.list("many")}
        assert names == {str(n) for n in range(1, 3001)}

    async def test_names_that_are_not_text_survive(self, sandbox: AsyncSandbox) -> None:
        name = b"odd-\xff\xfe\n\x1b"
        await sandbox.files.write(name, "content")
        (found,) = await sandbox.files.list()
        assert os.fsencode(found.name) == name
        assert await sandbox.files.read(found.path) == b"content"

    async def test_files_are_moved_and_removed(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("from", "x")
        await sandbox.files.move("from", "to")
        assert not await sandbox.files.exists("from")
        await sandbox.files.write("other", "y")
        with pytest.raises(PathExists):
            await sandbox.files.move("other", "to", overwrite=False)
        await sandbox.files.remove("to")
        assert not await sandbox.files.exists("to")

    async def test_a_folder_is_removed_only_when_that_was_meant(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("full/of/things", "x")
        with pytest.raises(PathNotEmpty):
            await sandbox.files.remove("full")
        await sandbox.files.remove("full", recursive=True)
        assert not await sandbox.files.exists("full")
        await sandbox.files.remove("full", missing_ok=True)

    async def test_chmod_changes_the_mode(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("file", "x")
        await sandbox.files.chmod("file", 0o600)
        assert (await sandbox.files.stat("file")).mode == 0o600

    async def test_what_is_not_there_is_an_error_that_names_it(self, sandbox: AsyncSandbox) -> None:
        for attempt in (sandbox.files.read("gone"), sandbox.files.stat("gone"), sandbox.files.list("gone"),
                        sandbox.files.remove("gone"), sandbox.files.move("gone", "x")):  # fmt: skip
            with pytest.raises(PathNotFound, match="gone"):
                await attempt

    async def test_relative_paths_start_where_commands_do(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await self._expect_one_start(sandbox)
        async with self.box(provider, cwd="/tmp") as elsewhere:
            assert await elsewhere.cwd() == "/tmp"
            await self._expect_one_start(elsewhere)

    async def _expect_one_start(self, sandbox: AsyncSandbox) -> None:
        start = await sandbox.cwd()
        assert (await sandbox.exec(["pwd"])).text == f"{start}\n"
        await sandbox.files.write("sub/file", "content")
        assert (await sandbox.exec(["cat", "sub/file"])).text == "content"
        assert (await sandbox.exec(["pwd"], cwd="sub")).text == f"{start}/sub\n"
        assert await sandbox.files.read_text(f"{start}/sub/file") == "content"
        await sandbox.files.write("~/at-home", "x")
        assert (await sandbox.exec("cat ~/at-home")).text == "x"

    async def test_each_mistake_has_its_error(self, sandbox: AsyncSandbox) -> None:
        files = sandbox.files
        await files.make_dir("folder")
        await files.write("file", "x")
        for attempt, error, pythons in (
            (files.read("folder"), PathIsFolder, IsADirectoryError),
            (files.write("folder", "x"), PathIsFolder, IsADirectoryError),
            (files.list("file"), PathNotFolder, NotADirectoryError),
            (files.read("file/below"), PathNotFolder, NotADirectoryError),
            (files.write("file/below", "x"), PathNotFolder, NotADirectoryError),
            (files.read("x" * 300), PathTooLong, OSError),
            (files.read("/dev/zero"), PathNotFile, OSError),
            (files.write("/proc/new", "x"), (PathDenied, PathNotFound), OSError),
            (files.write("/usr/new", "x"), PathDenied, PermissionError),
            (files.read("file", max_bytes=0), TooLarge, TooLarge),
        ):
            with pytest.raises(error) as raised:
                await attempt
            assert isinstance(raised.value, pythons)
            assert not raised.value.retryable

    async def test_a_file_that_may_not_be_written_is_not_replaced(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("kept", "old", mode=0o444)
        for attempt in (sandbox.files.write("kept", "new"), sandbox.files.write("kept", "new", atomic=False)):
            with pytest.raises(PathDenied, match="kept"):
                await attempt
        assert await sandbox.files.read_text("kept") == "old"
        assert [each.name for each in await sandbox.files.list()] == ["kept"]

    async def test_a_tree_goes_in_and_out(self, sandbox: AsyncSandbox, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "inner").mkdir(parents=True)
        (source / "inner" / "file").write_bytes(os.urandom(300_000))
        (source / "run").write_text("#!/bin/sh\n")
        (source / "run").chmod(0o755)
        (source / "link").symlink_to("inner/file")
        await sandbox.files.upload(source, "copy")
        await sandbox.files.download("copy", tmp_path / "back")
        assert (tmp_path / "back/inner/file").read_bytes() == (source / "inner/file").read_bytes()
        assert (tmp_path / "back/run").stat().st_mode & 0o777 == 0o755
        assert os.readlink(tmp_path / "back/link") == "inner/file"

    async def test_a_single_file_goes_in_and_out(self, sandbox: AsyncSandbox, tmp_path: Path) -> None:
        (tmp_path / "in").write_bytes(b"content")
        await sandbox.files.upload(tmp_path / "in", "there")
        await sandbox.files.download("there", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == b"content"

    async def test_a_failed_download_leaves_nothing(self, sandbox: AsyncSandbox, tmp_path: Path) -> None:
        (tmp_path / "target").mkdir()
        with pytest.raises(PathNotFound):
            await sandbox.files.download("gone", tmp_path / "target" / "out")
        assert list((tmp_path / "target").iterdir()) == []

    async def test_changes_are_told_as_they_happen(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.make_dir("watched")
        async with await sandbox.files.watch("watched") as events, asyncio.timeout(10):
            await sandbox.exec("mkdir watched/inner")
            await sandbox.exec("echo x > watched/inner/file")
            seen = set()
            async for event in events:
                seen.add((event.event, event.path.rpartition("watched/")[2]))
                if {("create", "inner"), ("create", "inner/file")} <= seen:
                    break

    async def test_a_kept_watch_tells_all_up_to_the_moment_when_it_is_asked(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.make_dir("watched")
        watch = await sandbox.files.keep_watch("watched", exact=True)
        for number in range(5):
            await sandbox.files.make_dir(f"watched/{number}/in")
            await sandbox.files.write(f"watched/{number}/in/file", "x", atomic=False)
            seen = [(each.event, each.path.rpartition("watched/")[2]) for each in await watch.events()]
            assert ("create", str(number)) in seen
            assert seen[-2:] == [("create", f"{number}/in/file"), ("modify", f"{number}/in/file")]
        await sandbox.files.move("watched/0", "watched/moved")
        assert [each.event for each in await sandbox.files.kept_watch(watch.number).events()][:2] == [
            "moved_from",
            "moved_to",
        ]
        await watch.end()
        with pytest.raises(NotFound):
            await watch.events()

    async def test_details_tell_owners_by_name_and_where_links_lead(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("folder/file", "x", mode=0o640)
        await sandbox.files.symlink("link", "folder/file")
        await sandbox.files.symlink("broken", "nowhere")
        file = await sandbox.files.details("folder/file")
        assert (file.type, file.size, file.mode, bool(file.owner)) == (FileType.FILE, 1, 0o640, True)
        known = {each.name: each async for each in sandbox.files.iter_details()}
        assert known["folder"].leads_to is None
        assert known["broken"].leads_to is None
        end = known["link"].leads_to
        assert end is not None
        assert (end.type, end.mode, end.path) == (FileType.FILE, 0o640, file.path)

    async def test_a_folder_may_have_to_be_new(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.make_dir("some/new/folder", exist_ok=False)
        with pytest.raises(PathExists):
            await sandbox.files.make_dir("some/new/folder", exist_ok=False)

    async def test_a_watch_of_what_is_not_there_is_an_error(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.files.watch("gone")
