"""Files on the mock, over the real client."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.errors import DiskFull, PathDenied, PathExists, PathInvalid, PathNotFound
from skerry.model.results import FileType
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox


async def test_what_is_written_is_read_whole_and_in_ranges(async_sandbox: AsyncSandbox) -> None:
    files = async_sandbox.files
    data = bytes(range(256)) * 20_000
    await files.write("big", data)
    assert await files.read("big") == data
    assert await files.read("big", offset=300, length=5) == data[300:305]
    await files.append("big", b"end")
    await files.write_at("big", 0, b"start")
    assert (await files.read("big", length=7), await files.read("big", offset=len(data))) == (b"start\x05\x06", b"end")


async def test_stat_list_and_links(async_sandbox: AsyncSandbox) -> None:
    files = async_sandbox.files
    await files.write("dir/inner/file", "x")
    await files.symlink("dir/link", "inner/file")
    await files.chmod("dir/inner/file", 0o600)
    assert [(info.path, info.type) for info in await files.list("dir", depth=5)] == [
        ("/home/user/dir/inner", FileType.DIR),
        ("/home/user/dir/link", FileType.SYMLINK),
        ("/home/user/dir/inner/file", FileType.FILE),
    ]
    assert len(await files.list("dir")) == 2
    link = await files.stat("dir/link", follow=False)
    assert (link.target, (await files.stat("dir/link")).mode) == ("inner/file", 0o600)
    assert (await async_sandbox.exec("cat ~/dir/link")).text == "x"


async def test_every_mistake_has_its_error(async_sandbox: AsyncSandbox) -> None:
    files = async_sandbox.files
    await files.write("file", "x")
    await files.write("dir/inner", "x")
    for error, attempt in (
        (PathNotFound, files.read("nope")),
        (PathInvalid, files.read("dir")),
        (PathInvalid, files.read("file/below")),
        (PathInvalid, files.read("x" * 300)),
        (PathInvalid, files.read("/dev/zero")),
        (PathInvalid, files.remove("dir")),
        (PathExists, files.move("file", "dir/inner", overwrite=False)),
        (PathDenied, files.write("/etc/passwd", "x")),
    ):
        with pytest.raises(error):
            await attempt
    await files.remove("dir", recursive=True)
    await files.remove("dir", missing_ok=True)
    assert not await files.exists("dir")


async def test_names_are_bytes(async_sandbox: AsyncSandbox) -> None:
    name = os.fsdecode(b"caf\xe9")
    await async_sandbox.files.write(name, "latin")
    assert await async_sandbox.files.read(name) == b"latin"
    assert [info.name for info in await async_sandbox.files.list()] == [name]


async def test_a_folder_three_hundred_deep_can_be_made_listed_and_removed(async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.make_dir("/".join(["d"] * 300))
    assert len(await async_sandbox.files.list("d", depth=5000)) == 299
    await async_sandbox.files.remove("d", recursive=True)
    assert await async_sandbox.files.list() == []


async def test_a_full_disk_refuses_and_keeps_what_was_there(mock_provider: Mock) -> None:
    async with AsyncSandbox(provider="mock", provider_object=mock_provider, disk="1M") as sandbox:
        await sandbox.files.write("kept", "old")
        with pytest.raises(DiskFull):
            await sandbox.files.write("kept", bytes(2 << 20))
        assert await sandbox.files.read("kept") == b"old"
        failed = await sandbox.exec("head -c 2000000 /dev/zero > big")
        assert failed.exit_code == 1
        assert "No space left" in failed.error_text
        await sandbox.exec("rm big")
        await sandbox.files.write("kept", bytes(900_000))
        disk = (await sandbox.metrics()).disk
        assert (disk.total, disk.free) == (1 << 20, disk.total - disk.used)


async def test_trees_go_up_and_come_down(async_sandbox: AsyncSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    await async_sandbox.files.upload(source, "tree")
    assert (await async_sandbox.exec("sh tree/link")).text == "ran\n"
    await async_sandbox.files.download("tree", tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "run.sh").read_text() == "#!/bin/sh\necho ran\n"
    assert (tmp_path / "back" / "link").readlink() == Path("sub/run.sh")


async def test_a_watch_tells_what_commands_change(async_sandbox: AsyncSandbox) -> None:
    async with await async_sandbox.files.watch(".", recursive=True) as watch:
        await async_sandbox.exec("mkdir d; echo x > d/f; rm d/f")
        seen = []
        async with asyncio.timeout(5):
            async for event in watch:
                seen.append((event.event, event.path.removeprefix("/home/user/")))
                if event.event == "delete":
                    break
    assert seen[:2] == [("create", "d"), ("create", "d/f")]
    assert seen[-1] == ("delete", "d/f")


async def test_extended_attributes(async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.write("f", "x")
    await async_sandbox.call("xattr", {"path": "f", "set": {"user.note": "aGk="}})
    assert await async_sandbox.call("xattr", {"path": "f"}) == {"xattrs": {"user.note": "aGk="}}
    assert await async_sandbox.call("xattr", {"path": "f", "remove": ["user.note"]}) == {"xattrs": {}}
