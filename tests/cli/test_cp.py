from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import PROGRAM, Run
from .screen import Screen

pytestmark = pytest.mark.usefixtures("box")


def inside(skerry: Run, *command: str) -> bytes:
    done = skerry("exec", "box", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy(skerry: Run, source: str, target: str, input: bytes | None = None) -> bytes:
    done = skerry("cp", source, target, input=input)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def make_tree(root: Path) -> None:
    (root / "sub/empty").mkdir(parents=True)
    (root / "sub/file").write_bytes(b"content")
    (root / "program").write_text("#!/bin/sh\necho ran\n")
    (root / "program").chmod(0o755)
    (root / "link").symlink_to("sub/file")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"odd name")


def tree(root: Path) -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def test_a_large_file_goes_in_and_comes_out_whole(skerry: Run, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(20_000_000))
    (tmp_path / "big").chmod(0o640)
    copy(skerry, str(tmp_path / "big"), "box:/tmp/there")
    assert inside(skerry, "stat", "-c", "%s %a", "/tmp/there") == b"20000000 640\n"
    copy(skerry, "box:/tmp/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o640


def test_names_that_are_no_text_go_both_ways(skerry: Run, tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd \xff\n name")
    (tmp_path / odd).write_bytes(b"\x00\xff")
    copy(skerry, str(tmp_path / odd), f"box:/tmp/{odd}")
    copy(skerry, f"box:/tmp/{odd}", str(tmp_path / f"back {odd}"))
    assert (tmp_path / f"back {odd}").read_bytes() == b"\x00\xff"


def test_a_folder_goes_in_and_comes_out_as_it_was(skerry: Run, tmp_path: Path) -> None:
    make_tree(tmp_path / "made")
    copy(skerry, str(tmp_path / "made"), "box:new")
    assert inside(skerry, "./new/program") == b"ran\n"
    copy(skerry, "box:new", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == tree(tmp_path / "made")
    assert os.access(tmp_path / "back/program", os.X_OK)


def test_a_folder_that_is_there_gets_the_copy_inside(skerry: Run, tmp_path: Path) -> None:
    make_tree(tmp_path / "made")
    (tmp_path / "file").write_text("x")
    inside(skerry, "mkdir", "there", "other")
    copy(skerry, f"{tmp_path / 'made'}/", "box:there")
    copy(skerry, str(tmp_path / "file"), "box:there")
    copy(skerry, f"{tmp_path / 'made'}/.", "box:other")
    assert sorted(inside(skerry, "ls", "there").split()) == [b"file", b"made"]
    assert b"program" in inside(skerry, "ls", "other")
    (tmp_path / "here").mkdir()
    copy(skerry, "box:there/made", str(tmp_path / "here"))
    copy(skerry, "box:there/file", str(tmp_path / "here"))
    assert sorted(os.listdir(tmp_path / "here")) == ["file", "made"]
    copy(skerry, "box:there/made/.", str(tmp_path / "here"))
    assert "program" in os.listdir(tmp_path / "here")


def test_a_dash_is_the_content_of_a_file(skerry: Run) -> None:
    data = os.urandom(3_000_000)
    copy(skerry, "-", "box:/tmp/file", input=data)
    assert copy(skerry, "box:/tmp/file", "-") == data


def test_a_dash_is_a_tar_of_a_folder(skerry: Run, tmp_path: Path) -> None:
    make_tree(tmp_path / "made")
    copy(skerry, str(tmp_path / "made"), "box:made")
    stream = copy(skerry, "box:made", "-")
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        assert "sub/file" in [name.removeprefix("./") for name in archive.getnames()]
    copy(skerry, "-", "box:again/", input=stream)
    copy(skerry, "box:again", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == tree(tmp_path / "made")


def test_relative_paths_start_at_home_and_a_colon_may_be_in_a_name_here(skerry: Run, tmp_path: Path) -> None:
    (tmp_path / "a:b").write_text("x")
    done = subprocess.run([*PROGRAM, "cp", "./a:b", "box:"], cwd=tmp_path, timeout=30)
    assert done.returncode == 0
    assert inside(skerry, "sh", "-c", "cat ~/a:b") == b"x"


@pytest.mark.parametrize(
    ("source", "target", "word"),
    [
        ("a", "b", b"SANDBOX:PATH"),
        ("box:a", "box:b", b"SANDBOX:PATH"),
        ("/no/such/file", "box:/tmp/x", b"/no/such/file: No such file"),
        ("box:/no/such/file", "here", b"/no/such/file: No such file"),
        ("box:/etc/hostname", "/no/such/folder/x", b"/no/such/folder/x: No such file"),
        ("/etc/passwd", "box:/proc/x", b"/proc/x"),
        ("nonsense:/a", "here", b"'nonsense'"),
    ],
)
def test_what_cannot_be_copied_is_named(skerry: Run, source: str, target: str, word: bytes) -> None:
    done = skerry("cp", source, target)
    assert (done.returncode, done.stdout) == (125, b"")
    assert word in done.stderr
    assert b"bug" not in done.stderr


def test_a_reader_that_goes_away_ends_the_copy_quietly(skerry: Run) -> None:
    inside(skerry, "truncate", "-s", "1G", "/tmp/big")
    command = [*PROGRAM, "cp", "box:/tmp/big", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(10) == bytes(10)
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr.read() == b""


def test_a_closed_standard_input_is_an_empty_one(skerry: Run) -> None:
    script = "exec \"$0\" -c 'from skerry.cli import main; main()' cp - box:/tmp/empty <&-"
    assert subprocess.run(["bash", "-c", script, PROGRAM[0]], timeout=30).returncode == 0
    assert inside(skerry, "stat", "-c", "%s", "/tmp/empty") == b"0\n"


def test_ctrl_c_ends_a_copy_of_what_is_typed(skerry: Run, open_screen: Callable[..., Screen]) -> None:
    screen = open_screen("cp", "-", "box:/tmp/typed")
    screen.type("something\r")
    screen.wait_for("copying")
    screen.type("\x03")
    assert screen.wait() == 130
    assert skerry("exec", "box", "ls", "/tmp/typed").returncode != 0


@pytest.mark.parametrize("target", ["-", "file", "folder/"])
def test_more_than_the_sandbox_may_hold_comes_only_if_asked_for(skerry: Run, tmp_path: Path, target: str) -> None:
    """A file with a hole is as large as its box likes."""
    inside(skerry, "sh", "-c", "mkdir -p d && truncate -s 3T d/hole && truncate -s 9M d/small")
    here = target if target == "-" else str(tmp_path / target)
    source = "box:d" if target == "folder/" else "box:d/hole"
    done = skerry("cp", source, here)
    assert done.returncode == 125
    assert b"832M" in done.stderr
    assert b"--max-size" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name in (target.strip("/"), "-") or ".skerry" in path.name]
    if target != "folder/":
        done = skerry("cp", "--max-size", "8M", "box:d/small", here)
        assert done.returncode == 125
        assert b"larger than 8388608 bytes" in done.stderr
        assert skerry("cp", "--max-size", "10M", "box:d/small", here).returncode == 0
