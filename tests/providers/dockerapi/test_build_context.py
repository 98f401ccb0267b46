from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from skerry.errors import InvalidSpec
from skerry.providers.dockerapi import build_context as context
from skerry.providers.dockerapi.build_context import Ignore


def tar_of(folder: Path | None, dockerfile: str = "FROM x\n") -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(b"".join(context.pack(dockerfile, folder))))


def names(folder: Path, ignored: str = "") -> set[str]:
    return set(context.wanted(folder, Ignore(ignored)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.py", "a.log", "src/b.py", "src/b.log", "src/deep/c.log", "src/deep/keep.log", "out/x", "out/y/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


ALL = {"a.py", "a.log", "src", "src/b.py", "src/b.log", "src/deep", "src/deep/c.log", "src/deep/keep.log"} | {
    "out", "out/x", "out/y", "out/y/z",
}  # fmt: skip
OUT = {"out", "out/x", "out/y", "out/y/z"}
LOGS = {name for name in ALL if name.endswith(".log")}


@pytest.mark.parametrize(
    ("patterns", "left_out"),
    [
        ("", set()),
        ("# a.log\n\n  \n", set()),
        ("*.log", {"a.log"}),
        ("**/*.log", LOGS),
        ("/out", OUT),
        ("out/", OUT),
        ("./out/../out", OUT),
        ("out/*", OUT - {"out"}),
        ("*/?.log", {"src/b.log"}),
        ("src/[a-c].py", {"src/b.py"}),
        ("src/[^b].py", set()),
        ("src/**/c.log", {"src/deep/c.log"}),
        ("**", ALL),
        ("**/deep", {"src/deep", "src/deep/c.log", "src/deep/keep.log"}),
        ("**/*.log\n!src/deep/keep.log", LOGS - {"src/deep/keep.log"}),
        ("!src/deep/keep.log\n**/*.log", LOGS),
        ("out\n!out/y", {"out/x"}),
        ("*\n!src/deep/keep.log", ALL - {"src", "src/deep", "src/deep/keep.log"}),
        (r"a\.py", {"a.py"}),
        ("\ufeffa.py", {"a.py"}),
        ("a.pyx\na.p", set()),
    ],
)
def test_dockerignore_leaves_out_what_docker_leaves_out(folder: Path, patterns: str, left_out: set[str]) -> None:
    assert names(folder, patterns) == ALL - left_out


def test_a_pattern_that_is_none_is_refused_with_its_text() -> None:
    with pytest.raises(InvalidSpec, match=r"\[z-a\]"):
        Ignore("[z-a]")


def test_the_same_files_make_the_same_tar(folder: Path) -> None:
    first = b"".join(context.pack("FROM x\n", folder))
    os.utime(folder)
    assert first == b"".join(context.pack("FROM x\n", folder))


def test_everything_in_the_context_is_roots_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("../secret")
    (inside / "folder").symlink_to("/etc")
    (inside / "run.sh").write_text("x")
    (inside / "run.sh").chmod(0o4751)
    with tar_of(inside) as tar:
        assert {(each.uid, each.gid) for each in tar} == {(0, 0)}
        assert tar.getmember("link").linkname == "../secret"
        assert tar.getmember("folder").issym()
        assert tar.getmember("run.sh").mode == 0o4751
        assert not [name for name in tar.getnames() if name.startswith("folder/")]


def test_names_that_are_long_or_not_unicode_arrive(tmp_path: Path) -> None:
    wanted = ["x" * 120 + "/" + "y" * 120, "ü", os.fsdecode(b"raw-\xff")]
    for name in wanted:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with tar_of(tmp_path) as tar:
        assert set(wanted) <= set(tar.getnames())


def test_the_dockerfile_hides_no_file_and_is_kept_from_copies(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("mine")
    (tmp_path / ".dockerignore").write_text("*.log")
    with tar_of(tmp_path, "FROM given\n") as tar:
        assert set(tar.getnames()) == {"Dockerfile", ".dockerignore", context.DOCKERFILE}
        assert tar.extractfile("Dockerfile").read() == b"mine"
        assert tar.extractfile(context.DOCKERFILE).read() == b"FROM given\n"
        assert tar.extractfile(".dockerignore").read().split() == [b"*.log", context.DOCKERFILE.encode()]


def test_without_a_context_there_is_only_the_dockerfile() -> None:
    with tar_of(None) as tar:
        assert set(tar.getnames()) == {".dockerignore", context.DOCKERFILE}


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_context_that_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSpec, match="is not a folder"):
        list(context.pack("FROM x", tmp_path / kind))


def test_a_file_that_shrinks_while_it_is_read_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(8 << 20))
    pieces = context.pack("FROM x", tmp_path)
    assert len(next(pieces)) == 512
    next(pieces)
    os.truncate(tmp_path / "big", 100)
    with pytest.raises(InvalidSpec, match="became shorter"):
        list(pieces)


def test_a_fifo_in_the_context_does_not_hold_anything_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with tar_of(tmp_path) as tar:
        assert tar.getmember("pipe").isfifo()
