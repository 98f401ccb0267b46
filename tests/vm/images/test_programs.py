"""Programs that images are made with."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.vm.images import programs


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a program that is long at work."""
    program = tmp_path / "bin/make"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


async def test_what_a_program_says_comes_line_by_line_and_whole(make: Path, tmp_path: Path) -> None:
    write(make, 'echo "$1 $WORD"; echo complaint >&2; pwd')
    lines: list[str] = []
    said = await programs.run("make", "a b", timeout_s=20, cwd=tmp_path, env={"WORD": "c"}, on_line=lines.append)
    assert said == f"a b c\n{tmp_path}\n"
    assert sorted(lines) == sorted(["a b c", "complaint", str(tmp_path)])


async def test_a_program_that_fails_is_told_with_its_last_words(make: Path) -> None:
    write(make, "seq 100 >&2; echo the reason >&2; exit 3")
    with pytest.raises(ProviderError, match=r"(?s)make failed with code 3.*the reason") as failed:
        await programs.run("make", timeout_s=20)
    assert "\n50\n" not in str(failed.value)


async def test_a_line_without_an_end_is_read_all_the_same(make: Path) -> None:
    write(make, "head -c 300000 /dev/zero | tr '\\0' x")
    assert await programs.run("make", timeout_s=20) == "x" * 300000


async def test_a_program_that_takes_too_long_is_ended(make: Path) -> None:
    write(make, "exec sleep 600")
    with pytest.raises(ProviderError, match="did not end"):
        await programs.run("make", timeout_s=0.1)


async def test_a_program_ends_with_whoever_waits_for_it_as_its_children_do(make: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    write(make, f"(exec sleep 600) 9>{fifo} & echo begun; wait")
    begun = asyncio.Event()
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        running = asyncio.create_task(programs.run("make", timeout_s=60, on_line=lambda _: begun.set()))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        os.set_blocking(reader, True)
        assert await asyncio.to_thread(os.read, reader, 1) == b"", "a child lives on"
    finally:
        os.close(reader)


async def test_a_program_that_is_missing_is_told_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "_ELSEWHERE", ())
    with pytest.raises(ProviderError, match="apt-get install e2fsprogs"):
        await programs.run("mke2fs", timeout_s=5)
