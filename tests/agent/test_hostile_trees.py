"""Archives from a hostile box, judged by what is on the host afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.agent.call import WINDOW
from skerry.agent.guest import trees
from skerry.errors import FileError, LimitReached, SkerryError
from skerry.sandbox.files import AsyncFiles

from .lying_agent import ENTRY, LyingAgent, Message, sandbox_of

CONTENT = b"from the box"


def entry(
    name: str, type: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, size: int | None = None
) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = type, link, mode
    body = CONTENT if type == tarfile.REGTYPE else b""
    member.size = len(body) if size is None else size
    return member.tobuf(tarfile.PAX_FORMAT) + body + b"\0" * (-len(body) % 512)


def _tar_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


END = b"\0" * 1024
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


def escapes(outside: str) -> dict[str, list[bytes]]:
    return {
        "dots": [entry("../victim")],
        "dots inside": [entry("a/../../victim")],
        "absolute": [entry(f"{outside}/victim")],
        "absolute with many slashes": [entry(f"//{outside}/victim")],
        "through a link": [entry("door", LINK, outside), entry("door/victim")],
        "through a relative link": [entry("door", LINK, ".."), entry("door/victim")],
        "through two links": [entry("a", LINK, "b"), entry("b", LINK, outside), entry("a/victim")],
        "over a link": [entry("victim", LINK, f"{outside}/victim"), entry("victim")],
        "a folder over a link": [entry("door", LINK, outside), entry("door", tarfile.DIRTYPE, mode=0o777)],
        "a hard link out": [entry("x", HARD, f"{outside}/victim"), entry("x")],
        "a hard link out by dots": [entry("x", HARD, "../victim"), entry("x")],
        "a hard link through a link": [entry("d", LINK, outside), entry("x", HARD, "d/victim"), entry("x")],
        "a hard link to a link": [entry("l", LINK, f"{outside}/victim"), entry("x", HARD, "l"), entry("x")],
        "a device": [entry("null", tarfile.CHRTYPE)],
        "a disk": [entry("disk", tarfile.BLKTYPE)],
        "a pipe": [entry("pipe", tarfile.FIFOTYPE)],
        "a name with NUL": [entry("a\0b")],
        "an empty name": [entry("")],
        "a name of dots": [entry(".."), entry("."), entry("/")],
        "a name too long": [entry("n" * 300)],
        "a file where a folder was": [entry("d/x"), entry("d")],
        "a folder where a file was": [entry("d"), entry("d/x")],
        "garbage": [b"\xff" * 5000],
        "cut off": [entry("x")[:120]],
        "a file that is shorter than it says": [entry("x", size=1 << 20)],
        "a negative size": [entry("x", size=0).replace(b"00000000000\x00", b"-0000000001\x00", 1)],
        "a pax header that lies": [_pax({"path": "../victim"}), entry("harmless")],
        "a pax size that lies": [_pax({"size": "-5"}), entry("harmless")],
        "a pax size of the moon": [_pax({"size": "9" * 30}), entry("harmless")],
        "a sparse file": [*_sparse(64 << 20)],
        "folders 200 deep": [entry("/".join(["d"] * 200) + "/x")],
    }


def _pax(headers: dict[str, str]) -> bytes:
    """Headers that overrule those of the next entry."""
    header: bytes = tarfile.TarInfo._create_pax_generic_header(headers, tarfile.XHDTYPE, "utf-8")  # type: ignore[attr-defined]
    return header


def _sparse(size: int) -> list[bytes]:
    """A few bytes of archive that stand for a file of any size."""
    return [_pax({"GNU.sparse.realsize": str(size), "GNU.sparse.map": "0,1", "GNU.sparse.major": "0"}), entry("s")]


@pytest.fixture(autouse=True)
def no_huge_files() -> Iterator[None]:
    """A test that fails must not fill the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def downloads(tar: bytes | Iterator[bytes], disk: int | None = None, *, cut: bool = False) -> AsyncFiles:
    """A folder that an agent sends as that, or a file if it never ends, as fast as the host takes it; `cut` breaks the
    stream before its answer."""
    pieces = iter([tar]) if isinstance(tar, bytes) else tar
    held = bytearray()

    def send(agent: LyingAgent, id: int, credit: int) -> None:
        while credit > 0 and agent.is_open:
            if not held:
                held.extend(next(filter(None, pieces), b""))
            if not held:
                if cut:
                    agent.end(ConnectionResetError("gone"))
                agent.answer({"id": id}, {})
                return
            piece = bytes(held[: min(credit, 10_000)])
            del held[: len(piece)]
            credit -= len(piece)
            agent.data(id, piece)

    def script(agent: LyingAgent, message: Message) -> None:
        if message["method"] == "stat":
            agent.answer(message, {**ENTRY, "type": "file" if message["params"]["path"] == "a file" else "dir"})
        elif "id" in message:
            send(agent, message["id"], WINDOW)
        elif message["method"] == "credit":
            send(agent, message["params"]["id"], message["params"]["bytes"])

    return sandbox_of(script, disk).files


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
        if "box" not in path.parts
    }


@pytest.mark.parametrize("attack", escapes("/"))
async def test_nothing_outside_the_folder_changes(tmp_path: Path, attack: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "box"
    outside.mkdir()
    for victim in (outside / "victim", tmp_path / "victim"):
        victim.write_bytes(b"precious")
        victim.chmod(0o600)
    before, names = snapshot(tmp_path), set(os.listdir(tmp_path)) | {"box"}
    mode = outside.stat().st_mode
    with contextlib.suppress(SkerryError):
        await downloads(b"".join(escapes(str(outside))[attack]) + END).download("x", target)
    assert snapshot(tmp_path) == before
    assert set(os.listdir(tmp_path)) <= names
    assert outside.stat().st_mode == mode
    assert (outside / "victim").stat().st_nlink == 1
    for path in target.rglob("*"):
        kind = path.lstat().st_mode
        assert stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind), path
        assert stat.S_ISLNK(kind) or not kind & 0o7000, path


REFUSED = ["dots", "absolute", "through a link", "through a relative link", "a hard link out", "a device", "garbage",
           "a pipe", "cut off", "a file that is shorter than it says", "a pax header that lies"]  # fmt: skip


@pytest.mark.parametrize("attack", REFUSED)
async def test_an_attack_is_told_not_passed_over(tmp_path: Path, attack: str) -> None:
    with pytest.raises(FileError):
        await downloads(b"".join(escapes(str(tmp_path))[attack]) + END).download("x", tmp_path / "box")


async def test_setuid_and_sticky_bits_are_dropped(tmp_path: Path) -> None:
    tar = entry("tool", mode=0o6755) + entry("dir", tarfile.DIRTYPE, mode=0o7777) + END
    await downloads(tar).download("x", tmp_path / "box")
    assert stat.S_IMODE((tmp_path / "box/tool").stat().st_mode) == 0o755
    assert (tmp_path / "box/dir").stat().st_mode & 0o7000 == 0


async def test_the_limit_of_bytes_counts_what_is_announced_before_it_is_written(tmp_path: Path) -> None:
    tar = entry("bomb", size=1 << 40)
    with pytest.raises(SkerryError):
        await downloads(tar + END).download("x", tmp_path / "box", max_bytes=1 << 20)
    assert sum(path.stat().st_blocks for path in (tmp_path / "box").rglob("*")) * 512 <= 1 << 20


DISK = 1 << 20
FLOODS = {
    "a folder of one file": (_tar_header("x", 1 << 40), b"x" * 65536),
    "a folder of files": (b"", entry("x") * 10),
    "a folder of empty files": (b"", _tar_header("x", 0) * 10),
    "a file": (b"", b"x" * 65536),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_sandbox_sends_no_more_than_it_can_hold_and_nothing_stays(tmp_path: Path, flood: str) -> None:
    target = tmp_path / "x" if flood == "a file" else tmp_path / "new" / "box"
    with pytest.raises(LimitReached, match="max_bytes, --max-size"):
        await downloads(_without_end(*FLOODS[flood]), DISK).download(flood, target)
    assert os.listdir(tmp_path) == []


async def test_names_and_links_take_no_more_room_than_content_may(tmp_path: Path) -> None:
    tar = b"".join(entry(f"{number}", LINK, "t" * 90) for number in range(5_000)) + END
    with pytest.raises(LimitReached):
        await downloads(tar, DISK).download("x", tmp_path / "box")
    assert os.listdir(tmp_path) == []


async def test_what_a_sandbox_may_not_hold_comes_if_it_is_asked_for(tmp_path: Path) -> None:
    tar = entry("a") + END
    tar = _tar_header("big", DISK + 512) + b"x" * (DISK + 512) + tar
    with pytest.raises(LimitReached):
        await downloads(tar, DISK).download("x", tmp_path / "box")
    await downloads(tar, DISK).download("x", tmp_path / "box", max_bytes=2 * DISK)
    assert (tmp_path / "box/big").stat().st_size == DISK + 512


BROKEN = {
    "cut off": (entry("d/new") + entry("old") + entry("x", size=1 << 20), False),
    "a lie at the end": (entry("d/new") + entry("old") + entry("../x") + END, False),
    "a stream that breaks": (entry("d/new") + entry("old"), True),
    "a folder over a file": (entry("d/new") + entry("old/x") + END, False),
    "a file over a folder": (entry("new") + entry("d") + END, False),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_folder_that_does_not_come_whole_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "there/d").mkdir(parents=True)
    (tmp_path / "there/old").write_bytes(b"old")
    before = snapshot(tmp_path)
    tar, cut = BROKEN[how]
    with pytest.raises(SkerryError):
        await downloads(tar, cut=cut).download("x", tmp_path / "there")
    assert snapshot(tmp_path) == before
    if "over" not in how:
        with pytest.raises(SkerryError):
            await downloads(tar, cut=cut).download("x", tmp_path / "new/below/it")
        assert snapshot(tmp_path) == before


async def test_a_folder_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    endless = _without_end(*FLOODS["a folder of files"])
    has_begun = asyncio.Event()

    def told() -> Iterator[bytes]:
        for number, piece in enumerate(endless):
            if number == 20:
                has_begun.set()
            yield piece

    copying = asyncio.create_task(downloads(told(), 1 << 40).download("x", tmp_path / "new/box"))
    await has_begun.wait()
    assert os.listdir(tmp_path)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert os.listdir(tmp_path) == []


async def test_a_folder_that_comes_whole_is_merged_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "there/d/e").mkdir(parents=True)
    (tmp_path / "there/d/mine").write_bytes(b"mine")
    (tmp_path / "there/d/old").symlink_to("/nowhere")
    tar = entry("d/old") + entry("d/e/f/new") + entry("d/link", LINK, "old") + END
    await downloads(tar).download("x", tmp_path / "there")
    found = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*")}
    assert found == {"d", "d/mine", "d/old", "d/link", "d/e", "d/e/f", "d/e/f/new"}
    assert (tmp_path / "there/d/old").read_bytes() == CONTENT
    assert not (tmp_path / "there/d/old").is_symlink()


async def test_folders_of_any_depth_go_when_the_copy_fails(tmp_path: Path) -> None:
    tar = _pax({"path": "d/" * 1500 + "x"}) + entry("x") + entry("../y") + END
    try:
        with pytest.raises(SkerryError):
            await downloads(tar).download("x", tmp_path / "box")
        assert os.listdir(tmp_path) == []
    finally:  # pytest could not remove them
        for _ in trees.remove_tree(str(tmp_path / "box")):
            pass


async def test_a_small_archive_does_not_become_a_large_folder(tmp_path: Path) -> None:
    with contextlib.suppress(SkerryError):
        await downloads(b"".join(_sparse(64 << 20)) + END).download("x", tmp_path / "box")
    assert sum(path.stat().st_blocks for path in (tmp_path / "box").rglob("*")) * 512 <= 1 << 20


async def test_links_inside_the_folder_arrive_as_links(tmp_path: Path) -> None:
    tar = entry("real") + entry("soft", LINK, "real") + entry("hard", HARD, "real") + entry("gone", LINK, "/nowhere")
    await downloads(tar + END).download("x", tmp_path / "box")
    box = tmp_path / "box"
    assert os.readlink(box / "soft") == "real"
    assert os.readlink(box / "gone") == "/nowhere"
    assert (box / "hard").read_bytes() == CONTENT


async def test_an_ordinary_archive_arrives(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(__file__, "a/b/c.py")
    await downloads(buffer.getvalue()).download("x", tmp_path / "box")
    assert (tmp_path / "box/a/b/c.py").read_bytes() == Path(__file__).read_bytes()


async def test_what_is_already_in_the_folder_is_not_followed_out_of_it(tmp_path: Path) -> None:
    """A second download into a folder that the first one filled with links."""
    outside = tmp_path / "outside"
    outside.mkdir()
    files = downloads(entry("door", LINK, str(outside)) + END)
    await files.download("x", tmp_path / "box")
    with pytest.raises(FileError):
        await downloads(entry("door/victim") + END).download("x", tmp_path / "box")
    assert os.listdir(outside) == []


def _without_end(start: bytes, then: bytes) -> Iterator[bytes]:
    yield start
    while True:
        yield then * (1 + 65536 // len(then))


def _huge(type: bytes) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = type, 1 << 32
    return member.tobuf(tarfile.GNU_FORMAT)


def _old_sparse() -> bytes:
    """A map of holes that goes on in the next block, and there again."""
    member = bytearray(_huge(tarfile.GNUTYPE_SPARSE))
    member[482] = 1
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    return bytes(member)


HEADERS = {
    "a pax header without end": (_huge(tarfile.XHDTYPE), b"a"),
    "a global header without end": (_huge(tarfile.XGLTYPE), b"a"),
    "a long name without end": (_huge(tarfile.GNUTYPE_LONGNAME), b"a"),
    "a map of holes without end": (_old_sparse(), b"00000000001\0" * 42 + b"\1" + bytes(7)),
    "header after header": (b"", _pax({"comment": "x"})),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_header_without_end_is_refused_in_bounded_memory(tmp_path: Path, attack: str) -> None:
    source, kept, taken = _without_end(*HEADERS[attack]), bytearray(), 0

    def read(size: int) -> bytes:
        nonlocal taken
        while len(kept) < size:
            kept.extend(next(source))
        piece = bytes(kept[:size])
        del kept[:size]
        taken += size
        assert taken < 4 << 20, "it is still read"
        return piece

    with pytest.raises(trees.UnsafeTar):
        trees.unpack(read, os.fsencode(tmp_path / "box"), max_bytes=1 << 20, max_entries=1000)


async def test_folders_that_only_a_long_name_tells_of_count_as_entries(tmp_path: Path) -> None:
    tar = b"".join(entry(f"{number}/{'d/' * 200}x") for number in range(10)) + END
    with pytest.raises(trees.UnsafeTar, match="more than 100 entries"):
        trees.unpack(io.BytesIO(tar).read, os.fsencode(tmp_path / "box"), max_entries=100)
    assert sum(1 for _ in (tmp_path / "box").rglob("*")) <= 101


@pytest.mark.parametrize("key", ["path", "linkpath"])
async def test_a_name_that_no_file_can_have_is_an_error_of_ours(tmp_path: Path, key: str) -> None:
    tar = _pax({key: "a\0b"}) + entry("x", LINK, "y") + END
    with pytest.raises(FileError):
        await downloads(tar).download("x", tmp_path / "box")
